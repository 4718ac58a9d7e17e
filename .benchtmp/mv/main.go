package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

var serve = flag.Bool("serve", false, "")
var n = flag.Int("n", 500, "")
var prof = flag.String("prof", "", "")

func cpu() time.Duration {
	var r syscall.Rusage
	syscall.Getrusage(0, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
func startProf(name string) func() {
	if *prof == "" {
		return func() {}
	}
	f, _ := os.Create(*prof + name)
	pprof.StartCPUProfile(f)
	return func() { pprof.StopCPUProfile(); f.Close() }
}

func main() {
	flag.Parse()
	if *serve {
		l, err := san.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		fmt.Println(l.Addr())
		in := bufio.NewReader(os.Stdin)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go io.Copy(c, struct{ io.Reader }{c})
			}
		}()
		var stop func()
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			switch line {
			case "start\n":
				stop = startProf(".server")
			case "stop\n":
				stop()
			}
			fmt.Println(int64(cpu()))
		}
	}
	cmd := exec.Command(os.Args[0], append([]string{"-serve"}, os.Args[1:]...)...)
	w, _ := cmd.StdinPipe()
	r, _ := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	cmd.Start()
	out := bufio.NewReader(r)
	addr, _ := out.ReadString('\n')
	addr = addr[:len(addr)-1]
	ask := func(s string) time.Duration {
		fmt.Fprintln(w, s)
		var d int64
		fmt.Fscanln(out, &d)
		return time.Duration(d)
	}
	run := func(d *san.Dialer, want string) (mine, theirs, wall time.Duration) {
		var conns []net.Conn
		a, b, t := cpu(), ask("x"), time.Now()
		buf := make([]byte, 100)
		for range *n {
			c, err := d.DialContext(context.Background(), "tcp", addr)
			if err != nil {
				panic(err)
			}
			c.Write(buf)
			io.ReadFull(c, buf)
			for i := 0; want != "" && san.InfoOf(c).Provider != want; i++ {
				time.Sleep(200 * time.Microsecond)
				if i > 10000 {
					panic("does not move")
				}
			}
			conns = append(conns, c)
			if len(conns) == 50 {
				for _, c := range conns {
					c.Close()
				}
				conns = nil
			}
		}
		for _, c := range conns {
			c.Close()
		}
		time.Sleep(50 * time.Millisecond)
		return cpu() - a, ask("x") - b, time.Since(t)
	}
	now := &san.Dialer{Options: sanconn.Options{MoveAtOnce: true}}
	tcp := &san.Dialer{}
	run(now, "shm")
	run(tcp, "")
	ask("start")
	stop := startProf(".client")
	for range 3 {
		m1, s1, w1 := run(now, "shm")
		m0, s0, w0 := run(tcp, "")
		k := time.Duration(*n)
		fmt.Printf("move: dialer %v acceptor %v wall %v; tcp: %v %v %v; a move: %v + %v\n", m1/k, s1/k, w1/k, m0/k, s0/k, w0/k, (m1-m0)/k, (s1-s0)/k)
	}
	stop()
	ask("stop")
	w.Close()
	cmd.Wait()
}
