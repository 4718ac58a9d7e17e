package main

import (
	"bufio"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

var serve = flag.Bool("serve", false, "")
var mode = flag.String("mode", "net", "net, tcp, shm")
var n = flag.Int("n", 10000, "")

func usage() string {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, _ := os.ReadDir("/proc/self/fd")
	b, _ := os.ReadFile("/proc/self/status")
	rss := map[string]string{}
	for _, l := range strings.Split(string(b), "\n") {
		f := strings.Fields(l)
		if len(f) > 1 {
			rss[f[0]] = f[1]
		}
	}
	return fmt.Sprintf("heap %d stack %d sys %d fds %d anon %s shmem %s", m.HeapAlloc, m.StackInuse, m.Sys, len(fds), rss["RssAnon:"], rss["RssShmem:"])
}

func main() {
	runtime.MemProfileRate = 1
	flag.Parse()
	if *serve {
		var l net.Listener
		var err error
		if *mode == "net" {
			l, err = net.Listen("tcp", "127.0.0.1:0")
		} else {
			l, err = san.Listen("tcp", "127.0.0.1:0")
		}
		if err != nil {
			panic(err)
		}
		fmt.Println(l.Addr())
		in := bufio.NewReader(os.Stdin)
		var conns []net.Conn
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				b := make([]byte, 16)
				c.Read(b)
				c.Write(b)
				conns = append(conns, c)
			}
		}()
		for {
			if _, err := in.ReadString('\n'); err != nil {
				return
			}
			fmt.Println(usage(), len(conns))
		}
	}
	cmd := exec.Command(os.Args[0], append([]string{"-serve"}, os.Args[1:]...)...)
	w, _ := cmd.StdinPipe()
	r, _ := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	cmd.Start()
	out := bufio.NewReader(r)
	addr, _ := out.ReadString('\n')
	addr = strings.TrimSpace(addr)
	show := func(what string) {
		fmt.Println(what, "dialer", usage())
		fmt.Fprintln(w, "x")
		l, _ := out.ReadString('\n')
		fmt.Print(what, " acceptor ", l)
	}
	d := &san.Dialer{}
	if *mode == "shm" {
		d.Options = sanconn.Options{MoveAtOnce: true}
	}
	dial := func() net.Conn {
		var c net.Conn
		var err error
		if *mode == "net" {
			c, err = net.Dial("tcp", addr)
		} else {
			c, err = d.Dial("tcp", addr)
		}
		if err != nil {
			panic(err)
		}
		b := make([]byte, 16)
		c.Write(b)
		c.Read(b)
		return c
	}
	var conns []net.Conn
	for range 10 {
		conns = append(conns, dial())
	}
	show("before")
	for len(conns) < *n {
		conns = append(conns, dial())
	}
	if *mode == "shm" {
		left := 0
		for range 600 {
			left = 0
			for _, c := range conns {
				if san.InfoOf(c).Provider != "shm" {
					left++
				}
			}
			if left == 0 {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		fmt.Println("not moved:", left)
		for _, c := range conns {
			if i := san.InfoOf(c); i.Provider != "shm" {
				fmt.Printf("%+v\n", i)
				break
			}
		}
	}
	time.Sleep(2 * time.Second)
	show("after")
	f, _ := os.Create("/tmp/heap.prof")
	pprof.Lookup("heap").WriteTo(f, 0)
	f.Close()
	w.Close()
	cmd.Wait()
	runtime.KeepAlive(conns)
}
