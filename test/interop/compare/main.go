// Compare measures programs over shared memory and over TCP: net/http, fasthttp, gRPC and
// Redis, with the server in a process of its own. It prints a table.
//
//	go run ./compare [-rounds 9] [-time 300ms] [-only REGEXP] [-simulate mlx5-roce]
//
// The connections of both transports exist all the time. In each round one transport is measured, and
// then the other, in an order that changes with each round. Figures are medians of the rounds. With
// -simulate, a simulated RDMA device (test/hwsim) takes the place of shared memory.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/test/hwsim"
)

func main() {
	log.SetFlags(0)
	server := flag.Bool("server", false, "serve, until standard input ends (what this program starts)")
	rounds := flag.Int("rounds", 9, "`rounds` of each measurement")
	length := flag.Duration("time", 300*time.Millisecond, "`time` of a transport in a round")
	only := flag.String("only", "", "measure what matches `regexp`")
	profile := flag.String("simulate", "", "run on a simulated RDMA device of this `family`")
	flag.Parse()
	hwsim.Use()
	if *profile != "" && hwsim.Settings() == "" {
		if err := simulate(*profile); err != nil {
			log.Fatal(err)
		}
		return
	}
	if *server {
		if err := serveAll(); err != nil {
			log.Fatal(err)
		}
		return
	}
	chosen, err := regexp.Compile(*only)
	if err != nil {
		log.Fatal(err)
	}
	if err := compare(chosen, *rounds, *length); err != nil {
		log.Fatal(err)
	}
}

// A transport is a way to listen and dial.
type transport struct {
	name   string
	listen func() (net.Listener, error)
	dial   dialFunc
}

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

const loopback = "127.0.0.1:0"

var transports = [2]transport{
	{
		"tcp",
		func() (net.Listener, error) { return net.Listen("tcp", loopback) },
		new(net.Dialer).DialContext,
	},
	{
		carrier(),
		func() (net.Listener, error) {
			return (&san.ListenConfig{Policy: san.Require}).Listen(context.Background(), "tcp", loopback)
		},
		(&san.Dialer{Policy: san.Require, Providers: []string{carrier()}}).DialContext,
	},
}

// carrier returns the provider that is compared with TCP.
func carrier() string {
	if hwsim.Settings() != "" {
		return "verbs"
	}
	return "shm"
}

// simulate runs this program again, on a simulated device with a link like that of a ConnectX-7.
func simulate(profile string) error {
	dir, err := os.MkdirTemp("/dev/shm", "san-compare")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fabric, err := hwsim.In(dir, "latency_ns=2000,bandwidth=50000000000,profile="+profile)
	if err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = fabric.Programs(), os.Stdout, os.Stderr
	return cmd.Run()
}

// addresses has the address of each service, by service and transport.
type addresses map[string]map[string]string

// serveAll serves each service on each transport, and prints the addresses.
func serveAll() error {
	all := make(addresses)
	for name, serve := range services {
		all[name] = make(map[string]string)
		for _, tr := range transports {
			l, err := tr.listen()
			if err != nil {
				return err
			}
			go serve(l)
			all[name][tr.name] = l.Addr().String()
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(all); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func compare(chosen *regexp.Regexp, rounds int, length time.Duration) error {
	cmd := exec.Command(os.Args[0], "-server")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer cmd.Wait()
	defer stdin.Close()
	var at addresses
	if err := json.NewDecoder(bufio.NewReader(stdout)).Decode(&at); err != nil {
		return err
	}

	fmt.Printf("%s, %d processors, %d rounds of %v\n\n", runtime.Version(), runtime.NumCPU(), rounds, length)
	fmt.Printf("| | TCP, a second | %[1]s, a second | %[1]s : TCP | p99, TCP | p99, %[1]s | TCP : %[1]s |\n", carrier())
	fmt.Println("|---|---|---|---|---|---|---|")
	for _, m := range measurements {
		if !chosen.MatchString(m.name()) {
			continue
		}
		results, err := m.run(at[m.service], rounds, length)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name(), err)
		}
		fmt.Println(row(m.name(), results))
	}
	return nil
}
