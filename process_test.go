package san

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

var (
	streamBytes = flag.Int64("stream", 256<<20, "bytes each way of the stream between two processes")
	killRounds  = flag.Int("kills", 12, "processes to kill per role and lane")
)

// Tests with two processes run this binary again, in a role.
const (
	envRole = "SAN_TEST_ROLE"
	envLane = "SAN_TEST_LANE"
	envAddr = "SAN_TEST_ADDR"
	// envBytes is how much the stream role sends.
	envBytes = "SAN_TEST_BYTES"
)

// roles are what the second process can do. A role talks to its test by lines on standard
// output, and ends when standard input does.
var roles = map[string]func(l lane) error{
	"stream": roleStream,
	"write":  roleWrite,
	"read":   roleRead,
	"idle":   roleIdle,
	"leave":  roleLeave,
	"many":   roleMany,
	"listen": roleListen,
	"plain":  rolePlain,
}

func TestMain(m *testing.M) {
	if role := roles[os.Getenv(envRole)]; role != nil {
		go func() {
			io.Copy(io.Discard, os.Stdin)
			os.Exit(3) // the test is gone
		}()
		for _, l := range lanes {
			if l.name == os.Getenv(envLane) {
				if err := role(l); err != nil {
					fmt.Println("error:", err)
					os.Exit(1)
				}
				os.Exit(0)
			}
		}
		fmt.Println("error: no such lane")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// process is the test's side of a role.
type process struct {
	*exec.Cmd
	lines *bufio.Scanner
	stdin io.Closer
}

// startRole starts this binary in a role, by way of another command if there is
// one.
func startRole(t testing.TB, role string, l lane, addr string, by ...string) *process {
	t.Helper()
	args := append(by[:len(by):len(by)], os.Args[0])
	p := &process{Cmd: exec.Command(args[0], args[1:]...)}
	p.Env = append(os.Environ(), envRole+"="+role, envLane+"="+l.name, envAddr+"="+addr)
	p.Stderr = os.Stderr
	stdin, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.lines = bufio.NewScanner(stdout)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		p.Process.Kill()
		p.Wait()
	})
	return p
}

// line reads what the role says next.
func (p *process) line(t testing.TB) string {
	t.Helper()
	if !p.lines.Scan() {
		t.Fatalf("the other process ended: %v", p.lines.Err())
	}
	if s, bad := strings.CutPrefix(p.lines.Text(), "error:"); bad {
		t.Fatalf("the other process:%s", s)
	}
	return p.lines.Text()
}

func (l lane) dialRole() (net.Conn, error) {
	c, err := l.dialer().Dial("tcp", os.Getenv(envAddr))
	if err != nil {
		return nil, err
	}
	if got := InfoOf(c); got.Provider != l.provider {
		return nil, fmt.Errorf("provider %s, reason %v: %v", got.Provider, got.Fallback, got.Cause)
	}
	return c, nil
}

// disturb has the collector and the scavenger run until stop is called.
func disturb() (stop func()) {
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		var keep [16][]byte
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
				keep[i%len(keep)] = make([]byte, 1<<20)
				debug.FreeOSMemory()
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

func roleStream(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	defer disturb()()
	total, err := strconv.ParseInt(os.Getenv(envBytes), 10, 64)
	if err != nil {
		return err
	}
	e := streamEnd{conn: c, seed: 2}
	t := new(failures)
	e.both(t, total)
	if err := t.err(); err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(e.sum()), hex.EncodeToString(e.gotSum()), e.got)
	return c.Close()
}

// both sends and receives at once.
func (e *streamEnd) both(t testing.TB, total int64) {
	var wg sync.WaitGroup
	wg.Go(func() { e.send(t, total) })
	wg.Go(func() { e.receive(t) })
	wg.Wait()
}

// failures stands in for a test in a process that has none.
type failures struct {
	testing.TB
	mu   sync.Mutex
	errs []error
}

func (f *failures) Helper()           {}
func (f *failures) Error(args ...any) { f.Errorf("%s", fmt.Sprint(args...)) }
func (f *failures) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}
func (f *failures) err() error { return errors.Join(f.errs...) }

func TestTwoProcessesStream(t *testing.T) {
	total := *streamBytes
	if testing.Short() {
		total = min(total, 16<<20)
	}
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		t.Setenv(envBytes, fmt.Sprint(total))
		p := startRole(t, "stream", l, ln.Addr().String())
		c := mustAccept(t, ln)
		wantProvider(t, c, l.provider)
		defer disturb()()
		e := streamEnd{conn: c, seed: 1}
		e.both(t, total)
		var sent, got string
		var n int64
		if _, err := fmt.Sscan(p.line(t), &sent, &got, &n); err != nil {
			t.Fatal(err)
		}
		if want := hex.EncodeToString(e.sum()); got != want || n != total {
			t.Errorf("sent %d bytes, %d arrived, checksums equal: %v", total, n, got == want)
		}
		if mine := hex.EncodeToString(e.gotSum()); mine != sent || e.got != total {
			t.Errorf("received %d of %d bytes, checksums equal: %v", e.got, total, mine == sent)
		}
	})
}

// heir leaves a child behind that holds all descriptors. Over TCP or a queue pair the peer
// would then not see the end.
func (l lane) heir() int {
	if l.provider != "shm" {
		return 0
	}
	return holdDescriptors()
}

// killSize is the size of the writing role's Writes.
const killSize = 100_000

func roleWrite(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	fmt.Println("ready", l.heir())
	b := make([]byte, killSize)
	for total := 0; ; total += len(b) {
		position(b, total)
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
}

func roleRead(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	fmt.Println("ready", l.heir())
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 300_000))
	return err
}

func roleIdle(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(c, "last words"); err != nil {
		return err
	}
	fmt.Println("ready", l.heir())
	_, err = c.Read(make([]byte, 1))
	return err
}

// roleLeave returns from main without Close, as TCP allows.
func roleLeave(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	_, err = io.WriteString(c, "last words")
	return err
}

// When a process is killed, at any moment, the other one gets what had arrived and soon an
// error, and nothing is left behind.
func TestKilledProcess(t *testing.T) {
	rounds := *killRounds
	if testing.Short() {
		rounds = min(rounds, 3)
	}
	rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
	eachLane(t, func(t *testing.T, l lane) {
		for _, role := range []string{"write", "read", "idle"} {
			t.Run(role, func(t *testing.T) {
				ln := l.listen(t, l.here())
				killOne(t, ln, role, l, 0) // what a first connection sets up for good
				before := resources(t)
				for range rounds {
					killOne(t, ln, role, l, time.Duration(rnd.IntN(30_000))*time.Microsecond)
				}
				wantResources(t, before)
			})
		}
	})
}

func killOne(t *testing.T, ln net.Listener, role string, l lane, after time.Duration) {
	t.Helper()
	p := startRole(t, role, l, ln.Addr().String())
	c := mustAccept(t, ln)
	defer c.Close()
	wantProvider(t, c, l.provider)
	var heir int
	if _, err := fmt.Sscanf(p.line(t), "ready %d", &heir); err != nil {
		t.Fatal(err)
	}
	if heir != 0 {
		if h, err := os.FindProcess(heir); err == nil {
			defer h.Kill()
		}
	}
	killed := make(chan struct{})
	time.AfterFunc(after, func() {
		p.Process.Kill()
		close(killed)
	})
	c.SetDeadline(time.Now().Add(patience))
	var err error
	switch role {
	case "read":
		b := make([]byte, 200_000)
		for err == nil {
			_, err = c.Write(b)
		}
	default:
		var n, total int
		for b := make([]byte, 150_000); err == nil; total += n {
			n, err = c.Read(b)
			if role == "write" {
				wantPositions(t, b[:n], total)
			}
		}
		switch {
		case role == "idle" && total != len("last words"):
			t.Errorf("%d bytes of the last words arrived", total)
		case role == "write" && err == io.EOF && total%killSize != 0 && l.provider != providerTCP: // TCP cannot tell
			t.Errorf("EOF after %d bytes, in the middle of a Write", total)
		}
	}
	<-killed
	if err != io.EOF && !isPeerGone(err) {
		t.Errorf("error %v", err)
	}
	p.Wait()
}

// When a program ends without Close, what it wrote arrives, and then EOF. Over RDMA there is
// an error instead, because bytes are lost with the process.
func TestProcessThatLeavesWithoutClose(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		startRole(t, "leave", l, ln.Addr().String())
		c := mustAccept(t, ln)
		c.SetDeadline(time.Now().Add(patience))
		got, err := io.ReadAll(c)
		if l.provider == "verbs" && errors.Is(err, syscall.ECONNRESET) && strings.HasPrefix("last words", string(got)) {
			return
		}
		if string(got) != "last words" || err != nil {
			t.Errorf("read %q, %v", got, err)
		}
	})
}

// rolePlain is a TCP server without SANs.
func rolePlain(lane) error {
	ln, err := net.Listen("tcp", os.Getenv(envAddr))
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go io.Copy(c, c)
	}
}

// roleListen accepts and never reads.
func roleListen(l lane) error {
	lc := ListenConfig{Options: l.options}
	ln, err := lc.Listen(context.Background(), "tcp", l.here())
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for {
		switch _, err := ln.Accept(); {
		case errors.Is(err, syscall.EMFILE): // as a server does, though it would wait a little
			runtime.Gosched()
		case err != nil:
			return err
		}
	}
}

const manyConns = 2000

// roleMany holds many connections, each of which echoes.
func roleMany(l lane) error {
	var wg sync.WaitGroup
	for range manyConns {
		c, err := l.dialRole()
		if err != nil {
			return err
		}
		wg.Go(func() { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
	}
	fmt.Println("ready")
	wg.Wait()
	return nil
}

// Many connections between two processes, idle first and then all used.
func TestManyConnections(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		if l.provider == "verbs" {
			return // devices of the guest have room for a few hundred queue pairs
		}
		ln := l.listen(t, l.here())
		p := startRole(t, "many", l, ln.Addr().String())
		before := resources(t)
		conns := make([]net.Conn, manyConns)
		for i := range conns {
			conns[i] = mustAccept(t, ln)
		}
		p.line(t)
		now := resources(t)
		t.Logf("%d connections: %d descriptors and %d goroutines more here", manyConns,
			now.descriptors-before.descriptors, now.goroutines-before.goroutines)
		if l.provider != providerTCP && now.descriptors-before.descriptors > 100 {
			t.Errorf("%d descriptors more", now.descriptors-before.descriptors)
		}
		if n := now.goroutines - before.goroutines; n > 100 {
			t.Errorf("%d goroutines more", n)
		}
		for i, c := range conns {
			say(t, c, c, fmt.Sprint("connection ", i))
		}
	})
}

// held is what a process must have given back. Objects are the kernel's RDMA objects.
type held struct {
	goroutines, descriptors, mappings, objects int
}

func resources(t testing.TB) held {
	t.Helper()
	objects := 0
	if inGuest != "" {
		for _, n := range testenv.RDMAObjects(t) {
			objects += n
		}
	}
	runtime.GC()
	return held{runtime.NumGoroutine(), countDescriptors(t), countMappings(t), objects}
}

// wantResources waits until the process holds no more than before.
func wantResources(t testing.TB, before held) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		now := resources(t)
		if now.goroutines <= before.goroutines && now.descriptors <= before.descriptors && now.mappings <= before.mappings && now.objects <= before.objects {
			return nil
		}
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return fmt.Errorf("before %+v, now %+v\n%s", before, now, bytes.TrimSpace(stacks))
	})
}

// runTrue forks and executes something.
func runTrue(ctx context.Context) error {
	return exec.CommandContext(ctx, "true").Run()
}
