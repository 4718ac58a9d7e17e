package benchmarks

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/benchmarks/internal/cputime"
)

// serverVar is set in a process that is a server instead of a benchmark. Its arguments are
// one of servers, a transport and the file to serve, if any.
const serverVar = "BENCH_SERVER"

// servers are the servers by name. Each serves l until l is closed.
var servers = map[string]func(l net.Listener, file string) error{
	"http":    serveHTTP,
	"copy":    serveCopies,
	"connect": serveConnects,
	"echo":    serveEcho,
	"move":    serveUntilEnd,
}

func TestMain(m *testing.M) {
	if os.Getenv(serverVar) == "" {
		os.Exit(m.Run())
	}
	if os.Args[1] == busyProcess {
		runBusy()
	}
	if err := runServer(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runServer prints its address. Then, for each line of its standard input, it prints the processor time
// that it has used, in ns. It returns when the input ends.
func runServer(server, transport, file string) error {
	tr, err := transportNamed(transport)
	if err != nil {
		return err
	}
	l, err := tr.listen("")
	if err != nil {
		return err
	}
	defer l.Close()
	failed := make(chan error, 1)
	go func() { failed <- servers[server](l, file) }()
	fmt.Println(l.Addr())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			fmt.Println(cputime.OfProcess().Nanoseconds())
		}
	}()
	select {
	case err := <-failed:
		return err
	case <-done:
		return nil
	}
}

func transportNamed(name string) (transport, error) {
	for _, tr := range transports {
		if tr.name == name {
			return tr, nil
		}
	}
	return transport{}, fmt.Errorf("no transport %q", name)
}

// A process is a server process, as the benchmark sees it.
type process struct {
	addr net.Addr
	in   io.Writer
	out  *bufio.Reader
}

// startServer starts this program again, as a server over tr, until the benchmark ends.
func startServer(b *testing.B, server string, tr transport, file string) *process {
	b.Helper()
	cmd := exec.Command(os.Args[0], server, tr.name, file)
	cmd.Env = append(os.Environ(), serverVar+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error("server:", err)
		}
	})
	p := &process{in: in, out: bufio.NewReader(out)}
	if p.addr, err = net.ResolveTCPAddr("tcp", p.line(b)); err != nil {
		b.Fatal(err)
	}
	return p
}

// line returns the next line that the process prints.
func (p *process) line(b *testing.B) string {
	b.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		b.Fatal("server:", err)
	}
	return strings.TrimSpace(line)
}

// cpu returns the processor time that both processes together have used so far.
func (p *process) cpu(b *testing.B) time.Duration {
	b.Helper()
	if _, err := fmt.Fprintln(p.in); err != nil {
		b.Fatal("server:", err)
	}
	there, err := strconv.ParseInt(p.line(b), 10, 64)
	if err != nil {
		b.Fatal("server:", err)
	}
	return cputime.OfProcess() + time.Duration(there)
}
