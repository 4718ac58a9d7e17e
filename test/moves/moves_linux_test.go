package moves

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

var (
	runs  = flag.Int("moves.runs", 30, "runs of each kind")
	first = flag.Uint64("moves.seed", 1, "the first seed")
)

const (
	envRole = "SAN_TEST_MOVES" // "server", or "client" and the server's address
	envFile = "SAN_TEST_FILE"  // the role that often calls File, which goes back to TCP; the frames are large then
	conns   = 6                // at the same time
	patient = 20 * time.Second // the longest that any step may take
)

func TestMain(m *testing.M) {
	hwsim.Use() // when TestOnHwsim runs these tests
	role, rest, _ := strings.Cut(os.Getenv(envRole), " ")
	switch role {
	case "server":
		os.Exit(serve(rest))
	case "client":
		os.Exit(dial(rest))
	}
	os.Exit(m.Run())
}

// carrier returns the provider that should carry connections that have moved.
func carrier() string {
	if testenv.Device() == hwsim.Lane {
		return "verbs"
	}
	return "shm"
}

// Two processes use their connections undisturbed.
func TestMoves(t *testing.T) {
	moved := false
	each(t, func(t *testing.T, seed uint64) {
		p := start(t, seed)
		moved = hasMoved(p.want(t, p.client)) || moved
		p.server.in.Close()
		p.want(t, p.server)
	})
	if !moved {
		t.Error("no connection has moved")
	}
}

// hasMoved reports whether a connection of a process has moved, by the Stats that it prints.
func hasMoved(out string) bool {
	return regexp.MustCompile(`(Dialed|Accepted):map\[[^]]*` + carrier() + `:[1-9]`).MatchString(out)
}

// One of the processes is killed at a random moment while the other uses its connections.
func TestKills(t *testing.T) {
	moved, n := 0, 0
	each(t, func(t *testing.T, seed uint64) {
		p := start(t, seed)
		r := rand.New(rand.NewPCG(seed, 1))
		delay := time.Duration(r.IntN(1<<(10+r.IntN(9)))) * time.Microsecond
		victim, other := p.client, p.server
		if r.IntN(2) == 0 {
			victim, other = other, victim
		}
		if seed%2 == 0 {
			victim.out.ReadString('\n') // a connection has moved, however slow the machine is, or the process has ended
		}
		time.Sleep(delay)
		victim.cmd.Process.Kill()
		victim.cmd.Wait()
		p.server.in.Close()
		if n++; hasMoved(p.want(t, other)) {
			moved++
		}
	})
	t.Logf("of %d victims %d had moved", n, moved)
	if moved < 2*n/5 {
		t.Errorf("of %d victims only %d had moved", n, moved)
	}
}

// One of the processes is killed just when a connection goes back to TCP, in a Write or between two.
func TestKillsOnTheWayBack(t *testing.T) {
	left, n := 0, 0
	each(t, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 1))
		leaver := []string{"client", "server"}[r.IntN(2)]
		t.Setenv(envFile, leaver)
		p := start(t, seed)
		ends := []*process{p.client, p.server}
		if leaver == "server" {
			slices.Reverse(ends)
		}
		n++
		for {
			line, err := ends[0].out.ReadString('\n')
			if err != nil {
				break // the process has ended
			}
			if strings.HasPrefix(line, "leaves") {
				left++
				break
			}
		}
		time.Sleep(time.Duration(r.IntN(1<<r.IntN(11))) * time.Microsecond)
		victim := r.IntN(2)
		ends[victim].cmd.Process.Kill()
		ends[victim].cmd.Wait()
		p.server.in.Close()
		p.want(t, ends[1-victim])
	})
	t.Logf("in %d of %d a connection went back", left, n)
	if left < (n+1)/2 {
		t.Errorf("in %d of %d only a connection went back", left, n)
	}
}

// One of the processes is stopped for a while, and then goes on.
func TestStops(t *testing.T) {
	each(t, func(t *testing.T, seed uint64) {
		p := start(t, seed)
		r := rand.New(rand.NewPCG(seed, 1))
		for range 3 {
			time.Sleep(time.Duration(r.IntN(1<<r.IntN(14))) * time.Microsecond)
			victim := []*process{p.client, p.server}[r.IntN(2)]
			victim.cmd.Process.Signal(syscall.SIGSTOP)
			time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
			victim.cmd.Process.Signal(syscall.SIGCONT)
		}
		p.want(t, p.client)
		p.server.in.Close()
		p.want(t, p.server)
	})
}

func each(t *testing.T, test func(t *testing.T, seed uint64)) {
	n := *runs
	if testing.Short() {
		n = min(n, 5)
	}
	for seed := *first; seed < *first+uint64(n); seed++ {
		test(t, seed)
		if t.Failed() {
			t.Fatalf("replay: -run '^%s$' -moves.seed %d -moves.runs 1", t.Name(), seed)
		}
	}
}

// pair is a server and its client.
type pair struct{ server, client *process }

type process struct {
	name string
	cmd  *exec.Cmd
	in   io.Closer
	out  *bufio.Reader
	err  strings.Builder
}

func start(t *testing.T, seed uint64) pair {
	t.Helper()
	server := run(t, "server", strconv.FormatUint(seed, 10))
	address := server.line(t)
	client := run(t, "client", strings.TrimSpace(address)+" "+strconv.FormatUint(seed, 10))
	client.line(t) // the client is about to dial
	return pair{server, client}
}

// line returns the next line that the process prints.
func (p *process) line(t *testing.T) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.cmd.Wait()
		t.Fatalf("the %s: %v\n%s", p.name, err, p.err.String())
	}
	return line
}

func run(t *testing.T, role, what string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{name: role, cmd: exec.Command(exe)}
	p.cmd.Env = append(os.Environ(), envRole+"="+role+" "+what, "SAN_MOVE=now")
	p.cmd.Stderr = &p.err
	p.in, err = p.cmd.StdinPipe()
	out, err2 := p.cmd.StdoutPipe()
	if err := errors.Join(err, err2, p.cmd.Start()); err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

// want waits until a process has ended without an error, and returns what it has printed.
func (p pair) want(t *testing.T, one *process) string {
	t.Helper()
	late := time.AfterFunc(5*patient, func() { one.cmd.Process.Signal(syscall.SIGQUIT) })
	defer late.Stop()
	rest, _ := io.ReadAll(one.out)
	if err := one.cmd.Wait(); err != nil {
		t.Errorf("the %s: %v\n%s%s", one.name, err, rest, one.err.String())
	}
	if testing.Verbose() {
		t.Logf("%s: %s", one.name, rest)
	}
	return string(rest)
}

// serve is the server's main function. It returns when its standard input and its connections have
// ended.
func serve(seed string) int {
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fail(err)
	}
	fmt.Println(l.Addr())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		l.Close()
	}()
	var all work
	for n := uint64(0); ; n++ {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			break
		} else if err != nil {
			return fail(err)
		}
		all.begin(c, seed, 2*n)
	}
	return all.end()
}

// dial is the client's main function.
func dial(what string) int {
	address, seed, _ := strings.Cut(what, " ")
	fmt.Println("begins")
	var all work
	for n := range uint64(conns) {
		ctx, cancel := context.WithTimeout(context.Background(), patient)
		c, err := new(san.Dialer).DialContext(ctx, "tcp", address)
		cancel()
		if err != nil {
			if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
				break // the server was killed
			}
			return fail(err)
		}
		all.begin(c, seed, 2*n+1)
	}
	return all.end()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// work is what a process does on its connections.
type work struct {
	group sync.WaitGroup
	moved sync.Once
	mu    sync.Mutex
	bad   []string
}

func (w *work) begin(c net.Conn, seed string, n uint64) {
	s, _ := strconv.ParseUint(seed, 10, 64)
	e := &end{work: w, n: n, conn: c.(*sanconn.Conn), rnd: [2]*rand.Rand{rand.New(rand.NewPCG(s, 4*n)), rand.New(rand.NewPCG(s, 4*n+1))}}
	w.group.Go(func() {
		var both sync.WaitGroup
		both.Go(e.write)
		both.Go(e.read)
		both.Wait()
		if info := san.InfoOf(c); !e.over.Load() {
			fmt.Println(n, info)
		}
		if e.rnd[0].IntN(8) == 0 {
			e.conn.SetLinger(0)
		}
		c.Close()
	})
}

func (w *work) end() int {
	w.group.Wait()
	fmt.Printf("%+v\n", san.Stats())
	if len(w.bad) > 0 {
		return fail(errors.New(strings.Join(w.bad, "\n")))
	}
	return 0
}

func (w *work) errorf(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bad = append(w.bad, fmt.Sprintf(format, args...))
}

// end is one end of a connection. Each direction is a sequence of frames: a length, and as many bytes,
// which depend on their positions. Each frame is one Write, so a stream that ends within a frame was
// cut.
type end struct {
	*work
	n    uint64
	conn *sanconn.Conn
	rnd  [2]*rand.Rand
	over atomic.Bool
}

const frames = 1000

// row is more bytes than one Read takes. Each byte depends on its position.
var row = func() (row [1<<17 + 256]byte) {
	for i := range row {
		row[i] = byte(i)
	}
	return row
}()

func (e *end) write() {
	r := e.rnd[0]
	at, most, files := 0, 18, 2000 // one frame in so many is written after a call of File
	if leaver := os.Getenv(envFile); leaver != "" {
		most = 24 // larger than a ring, so that Writes are cut in their middle
		if strings.HasPrefix(os.Getenv(envRole), leaver) {
			files = 20
		}
	}
	for range frames {
		b := make([]byte, 4+r.IntN(1<<r.IntN(most)))
		binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
		for i := 4; i < len(b); {
			i += copy(b[i:], row[(at+i)%256:])
		}
		at += len(b)
		switch k := r.IntN(2000); {
		case k%files == 0 && (files == 2000 || e.conn.Provider() != "tcp"):
			if files < 2000 {
				fmt.Println("leaves")
			}
			f, err := e.conn.File()
			for end := time.Now().Add(patient); errors.Is(err, syscall.ETIMEDOUT) && time.Now().Before(end); {
				f, err = e.conn.File() // the peer's process was stopped
			}
			if err == nil {
				f.Close()
			} else if !gone(err) && !strings.Contains(err.Error(), "have not been read") {
				e.errorf("File: %v", err)
			}
		case k < 120:
			time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
		case k < 160:
			e.conn.Stats()
		}
		e.conn.SetWriteDeadline(time.Now().Add(patient))
		if _, err := e.conn.Write(b); err != nil {
			e.over.Store(true)
			if !gone(err) {
				e.errorf("Write: %v", err)
			}
			return
		}
		if e.conn.Provider() != "tcp" {
			e.moved.Do(func() { fmt.Println("moved") })
		}
	}
	if err := e.conn.CloseWrite(); err != nil && !gone(err) {
		e.errorf("CloseWrite: %v", err)
	}
}

func (e *end) read() {
	r := e.rnd[1]
	at, want, header := 0, 0, make([]byte, 0, 4)
	b := make([]byte, 1<<17)
	for {
		e.conn.SetReadDeadline(time.Now().Add(patient))
		n, err := e.conn.Read(b[:1+r.IntN(1<<r.IntN(17))])
		for p := b[:n]; len(p) > 0; {
			if want == 0 {
				if header = append(header, p[0]); len(header) == 4 {
					want, header = int(binary.LittleEndian.Uint32(header)), header[:0]
					at += 4
				}
				p = p[1:]
				continue
			}
			k := min(want, len(p))
			if !bytes.Equal(p[:k], row[at%256:][:k]) {
				e.errorf("%d: of %d bytes from %d on these came: %.40x, in a frame with %d bytes to come, by %v", e.n, k, at, p[:k], want, san.InfoOf(e.conn))
				return
			}
			at, want, p = at+k, want-k, p[k:]
		}
		if err == nil {
			continue
		}
		cut := want > 0 || len(header) > 0
		switch {
		case err == io.EOF && cut && strings.Contains(e.conn.Debug(), "read by the SAN"): // the other direction may be on TCP
			e.errorf("%d: a clean end within a frame, at %d, %d to come, header %d: %v", e.n, at, want, len(header), e.conn.Debug())
		case err == io.EOF:
		case gone(err):
			e.over.Store(true)
		default:
			e.errorf("Read: %v", err)
		}
		return
	}
}

// gone reports whether an error is one that a killed peer causes.
func gone(err error) bool {
	for _, e := range []error{syscall.ECONNRESET, syscall.EPIPE, syscall.ENOTCONN} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
