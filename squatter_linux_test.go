package san

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// Another user takes as many names as it can like those under which a process is found, before and after
// the process takes its own. Whatever the squatter answers, connections move to the right process, also
// with Require.
func TestSquatter(t *testing.T) {
	testenv.NeedRoot(t)
	for _, answers := range []string{"nothing", "garbage", "hangs up"} {
		t.Run(answers, func(t *testing.T) {
			tcp := plainListen(t, "127.0.0.1:0")
			port := portOf(tcp.Addr().String())
			squat := func() {
				startProcess(t, "squat", moves, port, func(c *exec.Cmd) {
					asNobody(c)
					c.Env = append(c.Env, envName+"="+answers, envBytes+"=2000")
				}).line(t)
			}
			squat()
			l := mustAdopt(t, &ListenConfig{Policy: Require, Providers: []string{shm.Name}}, tcp)
			squat()
			at := uint16(tcp.Addr().(*net.TCPAddr).Port)
			if names, err := shm.Names(t.Context(), at, nobody, shm.Config{}); err != nil || len(names) < 1000 {
				t.Fatalf("%d of its names count as such: %v", len(names), err)
			}
			go reply(l, 1)
			for range 3 {
				if by, err := exchange(&Dialer{Policy: Require}, tcp.Addr().String()); err != nil || by.name != 1 || by.provider != shm.Name {
					t.Fatalf("%+v, %v", by, err)
				}
			}
			if lack := l.Unavailable(); len(lack) != 0 {
				t.Errorf("the listener lacks %v", lack)
			}
		})
	}
}

func init() { roles["squat"] = roleSquat }

// roleSquat takes many names of a port: random ones, and some that are malformed.
func roleSquat(lane) error {
	names, _ := strconv.Atoi(os.Getenv(envBytes))
	for n := range names {
		name := fmt.Sprintf("@san-shm/%d/%s/%016x", session.Version, os.Getenv(envAddr), rand.Uint64())
		if n%100 == 0 { // some are malformed
			// With the process's id: otherwise the remainders of two squatters' names may be equal.
			name = fmt.Sprint(name[:len(name)-rand.IntN(16)], os.Getpid(), strings.Repeat("\x00", 1+n/50))
		}
		l, err := net.Listen("unixpacket", name)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				switch os.Getenv(envName) {
				case "garbage":
					fmt.Fprint(c, strings.Repeat("garbage", 20))
				case "hangs up":
					c.Close()
				}
			}
		}()
	}
	fmt.Println("squats")
	select {}
}
