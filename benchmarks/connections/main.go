// Connections measures what each of one to ten thousand connections between two processes of this host
// costs: its latency, its memory, and the processor time of all while idle, and while one in a hundred is
// active.
//
//	go run ./benchmarks/connections [-counts 1,10,100,1000,10000] [-svg FILE]
//
// It prints a table for TCP and one for shared memory, and draws both. Needs Linux.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/sanconn/san"
	"github.com/sanconn/san/benchmarks/internal/cputime"
)

func main() {
	log.SetFlags(0)
	server := flag.String("server", "", "serve by `transport`, until standard input ends (what this program starts)")
	counts := flag.String("counts", "1,10,100,1000,3000,10000", "`numbers` of connections")
	svg := flag.String("svg", "", "`file` to draw to")
	flag.Parse()
	if err := run(*server, *counts, *svg); err != nil {
		log.Fatal(err)
	}
}

func run(server, counts, svg string) error {
	for _, tr := range transports {
		if tr.name == server {
			return serve(tr)
		}
	}
	var numbers []int
	for _, text := range strings.Split(counts, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || (len(numbers) > 0 && n <= numbers[len(numbers)-1]) {
			return fmt.Errorf("-counts %s: not rising numbers from 1", counts)
		}
		numbers = append(numbers, n)
	}
	curves := make(map[string][]point)
	for _, tr := range transports {
		points, err := measure(tr, numbers)
		if err != nil {
			return fmt.Errorf("%s: %w", tr.name, err)
		}
		curves[tr.name] = points
		printTable(tr.name, points)
	}
	if svg == "" {
		return nil
	}
	return os.WriteFile(svg, drawing(curves), 0o644)
}

// A transport is a way to listen and dial.
type transport struct {
	name   string
	listen func() (net.Listener, error)
	dial   func(address string) (net.Conn, error)
}

const loopback = "127.0.0.1:0"

// TCP is first, because it leaves less memory behind, which would affect the second measurement.
var transports = [2]transport{
	{
		"tcp",
		func() (net.Listener, error) { return net.Listen("tcp", loopback) },
		func(address string) (net.Conn, error) { return net.Dial("tcp", address) },
	},
	{
		"shm",
		func() (net.Listener, error) {
			return (&san.ListenConfig{Policy: san.Require}).Listen(context.Background(), "tcp", loopback)
		},
		func(address string) (net.Conn, error) {
			return (&san.Dialer{Policy: san.Require, Providers: []string{"shm"}}).Dial("tcp", address)
		},
	},
}

// messageSize is the size of a message that is sent and echoed.
const messageSize = 64

// serve echoes messages. It prints its address, and then an answer for each line of standard input.
func serve(tr transport) error {
	l, err := tr.listen()
	if err != nil {
		return err
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, messageSize)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			}()
		}
	}()
	fmt.Println(l.Addr())
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		value, err := questions[lines.Text()]()
		if err != nil {
			return err
		}
		fmt.Println(value)
	}
	return nil
}

// questions are the values that a process can report about itself.
var questions = map[string]func() (int64, error){
	"memory":    ownMemory,
	"processor": func() (int64, error) { return cputime.OfProcess().Nanoseconds(), nil },
}

// peer is the server's process.
type peer struct {
	address string
	in      io.WriteCloser
	out     *bufio.Reader
	cmd     *exec.Cmd
}

func start(tr transport) (*peer, error) {
	p := &peer{cmd: exec.Command(os.Args[0], "-server", tr.name)}
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := p.out.ReadString('\n')
	p.address = strings.TrimSpace(line)
	return p, err
}

func (p *peer) end() {
	p.in.Close()
	p.cmd.Wait()
}

// both returns the sum of both processes' answers.
func (p *peer) both(question string) (int64, error) {
	own, err := questions[question]()
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Fprintln(p.in, question); err != nil {
		return 0, err
	}
	line, err := p.out.ReadString('\n')
	if err != nil {
		return 0, err
	}
	theirs, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	return own + theirs, err
}
