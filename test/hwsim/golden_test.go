//go:build linux && cgo

package hwsim_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

var update = flag.Bool("update", false, "write the golden traces anew")

type goldenProfile struct {
	name    string
	reads   bool // memory is read by RDMA, so the number of registrations depends on timing
	windows bool
	costs   string // further settings
}

// goldenProfiles are families of different kinds.
var goldenProfiles = []goldenProfile{
	{"mlx5-ib", true, true, ""},       // InfiniBand with windows of type 2
	{"irdma-roce", true, true, ""},    // RoCE with windows of type 2
	{"irdma-iwarp", false, false, ""}, // iWARP
	// RoCE without windows, where an offer would cost more than the copies that it saves.
	{"bnxt_re", false, false, ",latency_ns=2000,reg_ns=10000000"},
	// A device on which registrations cost nothing, so that each Write is offered, and Revoke
	// deregisters.
	{"mana", true, false, ""},
}

// goldenWrites are the Writes of one connection: how often one buffer is written.
var goldenWrites = []struct {
	name   string
	size   int
	writes int
}{
	{"100B", 100, 1},
	{"64KiB", 64 << 10, 2},
	{"1MiB", 1 << 20, 3},
	{"16MiB", 16 << 20, 3},
}

const (
	envTrace   = "SAN_TRACE"
	envProfile = "SAN_TEST_PROFILE"
	// goldenArena is the arena's size in MiB. It makes send buffers have 4 MiB on any machine.
	goldenArena = 256
	// readFirst is how long a Read waits before its Write begins. Then its memory waits for an offer
	// when the Write comes, as the second Read's memory must, so that the third one's is read into.
	readFirst = 100 * time.Millisecond
	// goldenTries bounds how often a connection is repeated because a busy machine has disturbed it.
	goldenTries = 20
)

// TestGoldenTraces compares how Writes of four sizes go over five device families with testdata/traces:
// each message of both ends, and what was exposed, read and written by RDMA, revoked, registered and
// bound. `go test ./test/hwsim -run TestGoldenTraces -update` writes the files again.
func TestGoldenTraces(t *testing.T) {
	switch testenv.Device() {
	case "":
	case hwsim.Lane:
		goldenInside(t)
		return
	default:
		return // this is the lane of real drivers
	}
	for i, p := range goldenProfiles {
		t.Run(p.name, func(t *testing.T) {
			f := hwsim.New(t, fmt.Sprintf("seed=%d,jitter_us=8,profile=%s%s", 51+i, p.name, p.costs))
			env := []string{fmt.Sprintf("SAN_ARENA=%d", goldenArena), envTrace + "=" + filepath.Join(t.TempDir(), "trace"), envProfile + "=" + p.name}
			out := runOn(t, f, "TestGoldenTraces", 1, env, fmt.Sprintf("-update=%v", *update))
			if n := bytes.Count(out, []byte("    --- PASS")); n != len(goldenWrites) {
				t.Errorf("%d of %d sizes\n%s", n, len(goldenWrites), out)
			}
		})
	}
}

// goldenInside is TestGoldenTraces in a process that has the device.
func goldenInside(t *testing.T) {
	accepted := make(chan net.Conn)
	l := listen(t, func(c net.Conn) {
		accepted <- c
		<-t.Context().Done() // the test closes the connection
	})
	if goldenHere().windows {
		awaitWindows(t, l, accepted)
	}
	for _, w := range goldenWrites {
		t.Run(w.name, func(t *testing.T) {
			got := ""
			for tries := 0; got == ""; tries++ {
				if tries == goldenTries {
					t.Fatalf("%d connections have sent notes or left send buffers that they need not", tries)
				}
				c, s := golden(t, l, accepted)
				steps := goldenSteps(t, c, s, w.size, w.writes)
				got = goldenForm(t, c, w.size, steps)
			}
			goldenCompare(t, filepath.Join("testdata", "traces", os.Getenv(envProfile)+"-"+w.name+".txt"), got)
		})
	}
}

func goldenCompare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("%s differs: what is to be (-), what was (+)\n%s\nall of it:\n%s", path, d, got)
	}
}

// golden makes a connection, moves it, and returns both ends.
func golden(t *testing.T, l net.Listener, accepted <-chan net.Conn) (c, s *sanconn.Conn) {
	t.Helper()
	c, err := dial(t, l)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case conn := <-accepted:
		s = conn.(*sanconn.Conn)
	case <-time.After(patience):
		t.Fatal("nothing was accepted")
	}
	for _, c := range []net.Conn{c, s} {
		c.SetDeadline(time.Now().Add(patience))
	}
	return c, s
}

// awaitWindows waits until a connection has exposed memory by a window, because the probe for windows
// runs in the background.
func awaitWindows(t *testing.T, l net.Listener, accepted <-chan net.Conn) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		c, s := golden(t, l, accepted)
		goldenSteps(t, c, s, 1<<20, 2)
		if verbs.WindowsBound() < 2 { // one for an inbox, and one for an offer
			return errors.New("no window is in use")
		}
		return nil
	})
}

// goldenSteps lets the dialer's end write, the other end read, and both close in order, one step after
// the other. It returns how many registrations and windows each Write has needed.
func goldenSteps(t *testing.T, c, s *sanconn.Conn, size, writes int) (costs string) {
	t.Helper()
	b, sink := random(size), make([]byte, size)
	for i := range writes {
		before := costsSoFar(t, c, s)
		clear(sink)
		var wrote sync.WaitGroup
		wrote.Go(func() {
			if err := testenv.Await(patience, func() error { return hasWaited(s, readFirst) }); err != nil {
				t.Error(err)
			}
			if n, err := c.Write(b); n != size || err != nil {
				t.Errorf("Write: %d, %v", n, err)
			}
		})
		_, err := io.ReadFull(s, sink)
		wrote.Wait()
		if err != nil || !bytes.Equal(sink, b) {
			t.Fatalf("Read: %v, equal: %v", err, bytes.Equal(sink, b))
		}
		costs += fmt.Sprintf("Write %d: %s\n", i+1, costsSoFar(t, c, s).since(t, before))
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("Read at the end: %d, %v", n, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		_, a := tracedSoFar(t, c)
		if !a.has("> CloseAck") || a.has("> Inbox") && !a.has("- revoked") {
			return fmt.Errorf("Close is not answered:\n%s", strings.Join(a.lines, "\n"))
		}
		return nil
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return costs
}

// hasWaited returns nil once a Read has waited for at least that long.
func hasWaited(c *sanconn.Conn, least time.Duration) error {
	text := c.Debug()
	_, wait, _ := strings.Cut(text, "read    waits for messages, for ")
	wait, _, _ = strings.Cut(wait, "\n")
	if d, err := time.ParseDuration(wait); err != nil || d < least {
		return errors.New("the Read does not wait long enough:\n" + text)
	}
	return nil
}

// costs are counts of both ends that a trace does not show.
type costs struct {
	registrations, windows uint64
	exposed                uint64 // registrations for the peer's access
	exposedNow             int64
	invalidates            int64
	sent, received         uint64 // bytes from and to the programs' own memory
}

func costsSoFar(t *testing.T, c, s *sanconn.Conn) costs {
	st := regcache.DefaultBudget().Stats()
	return costs{
		registrations: st.Registrations, windows: verbs.WindowsBound(),
		exposed: st.Exposed, exposedNow: st.PinnedEntries - int64(st.Entries),
		invalidates: hwsim.WorkHere(t).Invalidates,
		sent:        c.Stats().DirectBytesSent, received: s.Stats().DirectBytesReceived,
	}
}

// mostRegistrations bounds the registrations for a Write if their number depends on timing: those of its
// own memory, and of the chunks that hold what was read ahead of the reader, 16 of 256 KiB
// (session.Config.ReceiveBudget). Those of an earlier connection may still exist. With one for each
// chunk in which 16 MiB come, there would be 64.
const mostRegistrations = 32

// since returns the costs of a Write.
func (c costs) since(t *testing.T, before costs) string {
	t.Helper()
	made := c.registrations - before.registrations
	text := fmt.Sprintf("registrations: %d", made)
	if here := goldenHere(); here.reads {
		if made > mostRegistrations {
			t.Errorf("%d registrations, want at most %d", made, mostRegistrations)
		}
		text = fmt.Sprintf("registered for the peer: %d, deregistered: %d", c.exposed-before.exposed, int64(c.exposed-before.exposed)-c.exposedNow+before.exposedNow)
		if here.windows {
			text = fmt.Sprintf("windows bound: %d, invalidated: %d", c.windows-before.windows, c.invalidates-before.invalidates)
		}
	}
	return text + fmt.Sprintf("; bytes from own memory: %d, to it: %d", c.sent-before.sent, c.received-before.received)
}

// goldenHere returns the profile of this process.
func goldenHere() goldenProfile {
	return goldenProfiles[slices.IndexFunc(goldenProfiles, func(p goldenProfile) bool { return p.name == os.Getenv(envProfile) })]
}

// goldenForm returns the normal form of the traces of both ends of a closed connection, or "" if a busy
// machine has disturbed it.
func goldenForm(t *testing.T, c net.Conn, size int, costs string) string {
	t.Helper()
	var d, a *traceEnd
	testenv.Eventually(t, patience, func() error {
		d, a = tracedSoFar(t, c)
		for _, e := range []*traceEnd{d, a} {
			if !e.has("- close", "- abort") {
				return fmt.Errorf("an end is still open:\n%s", strings.Join(e.lines, "\n"))
			}
		}
		return nil
	})
	if d.has("> LeaveInbox") || d.sessions+a.sessions != 2 {
		return ""
	}
	if diff := d.disagrees(a) + a.disagrees(d); diff != "" {
		t.Fatalf("what one end sends is not what the other gets:\n%s", diff)
	}
	return named("dialer\n" + d.normal(size) + "\nacceptor\n" + a.normal(size) + "\ncosts\n" + costs)
}

// tracedSoFar returns the traces of both ends of a connection so far.
func tracedSoFar(t *testing.T, c net.Conn) (dialer, acceptor *traceEnd) {
	t.Helper()
	b, err := os.ReadFile(os.Getenv(envTrace))
	if err != nil {
		t.Fatal(err)
	}
	return traced(string(b), c.LocalAddr().String(), c.RemoteAddr().String())
}
