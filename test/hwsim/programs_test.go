//go:build linux

package hwsim

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// patience bounds each program. A test that reaches it has failed.
const patience = 2 * time.Minute

var perftest = flag.Bool("hwsim.perftest", false, "run perftest's programs as well, which take seconds to begin")

// rdma-core's own programs, and perftest's, run unchanged on the simulated device. So it behaves as a
// device not only for this project.
func TestPrograms(t *testing.T) {
	if testenv.Device() != "" {
		return // this is the lane of real drivers
	}
	for _, tt := range []struct {
		program, args string
		client        string // further arguments of the client
		settings      string
	}{
		{"ibv_rc_pingpong", "-g 0 -n 20", "localhost", "seed=1"},
		{"ibv_rc_pingpong", "-g 0 -n 20 -e", "localhost", "seed=2"}, // with a completion channel
		{"rping", "-C 20 -V -a 127.0.0.1", "-c", "seed=3"},
		{"rping", "-C 20 -V -a 127.0.0.1", "-c", "seed=4,profile=irdma-iwarp"},
		{"ucmatose", "-C 10", "-s 127.0.0.1", "seed=5"},
		{"ib_send_lat", "-n 20", "localhost", "seed=6"},
		{"ib_send_bw", "-n 20", "localhost", "seed=7"}, // not -R: its second connection may come before the server listens for it
		{"ib_write_bw", "-n 20", "localhost", "seed=8"},
		{"ib_read_bw", "-n 20", "localhost", "seed=9"},
		{"ib_read_bw", "-n 20", "localhost", "seed=10,profile=mlx5-ib"},
		{"ib_write_lat", "-n 20", "localhost", "calm"}, // waits for a message's last byte, so it needs a device that does not write that first
		{"rping", "-C 20 -V -a 127.0.0.1", "-c", "latency_ns=2000"},
		{"ibv_rc_pingpong", "-g 0 -n 20 -e", "localhost", "latency_ns=2000"},
		{"ib_send_lat", "-n 20", "localhost", "latency_ns=2000"},
		{"ib_send_bw", "-n 1000", "localhost", "latency_ns=2000"},
		{"ib_write_lat", "-n 20", "localhost", "latency_ns=2000"},
		{"ib_write_bw", "-n 200", "localhost", "latency_ns=2000"},
		{"ib_read_bw", "-n 200", "localhost", "latency_ns=2000"},
		{"ib_write_bw", "-n 200", "localhost", "latency_ns=2000,no_copy"},
		{"ib_read_bw", "-n 200", "localhost", "latency_ns=2000,no_copy"},
	} {
		if strings.HasPrefix(tt.program, "ib_") && !*perftest {
			continue
		}
		t.Run(fmt.Sprintf("%s %s %s", tt.program, tt.args, tt.settings), func(t *testing.T) {
			if _, err := exec.LookPath(tt.program); err != nil {
				testenv.Missing(t, "ibverbs-utils and rdmacm-utils, or perftest: "+err.Error())
			}
			f := New(t, tt.settings)
			_, port, _ := net.SplitHostPort(testenv.UnusedAddress(t))
			port = "-p " + port
			server := strings.Fields(tt.args + " " + port)
			client := strings.Fields(tt.args + " " + port + " " + tt.client)
			if tt.program == "rping" {
				server = append(server, "-s")
			}
			if tt.program == "ucmatose" {
				server = append(server, "-b", "127.0.0.1")
			}
			f.both(t, tt.program, server, client)
			f.Used(t)
		})
	}
}

// both runs a server, and a client, which is repeated until the server listens.
func (f Fabric) both(t *testing.T, program string, server, client []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	command := func(args []string) *exec.Cmd {
		c := exec.CommandContext(ctx, program, args...)
		c.Env = f.Programs()
		return c
	}
	serving := make(chan error, 1)
	var served []byte
	go func() {
		var err error
		served, err = command(server).CombinedOutput()
		serving <- err
	}()
	for {
		out, err := command(client).CombinedOutput()
		if err == nil {
			if err := <-serving; err != nil {
				t.Fatalf("server: %v\n%s", err, served)
			}
			return
		}
		select {
		case serr := <-serving:
			t.Fatalf("client: %v\n%s\nserver: %v\n%s", err, out, serr, served)
		case <-time.After(50 * time.Millisecond): // the server may not listen yet
		}
	}
}
