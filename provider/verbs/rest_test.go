//go:build linux

package verbs

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// registered returns how many bytes this process has registered that caches would not give up for
// others.
func registered() int64 {
	_, messages := controlArena().Bytes()
	s := regcache.DefaultBudget().Stats()
	return messages + s.PinnedBytes - s.IdleBytes
}

// An idle connection has only its message buffers registered, also after it has been busy.
func TestConnectionAtRestIsSmall(t *testing.T) {
	withoutReady(t)
	nothingLeft(t)
	l := listen(t, Config{})
	before := registered()
	a, b := sessions(t, l, session.Config{})
	const ends = 2
	rests := func() error {
		_, buffers := regcache.DefaultArena().Bytes()
		if n := registered() - before; n > ends*restBytes || buffers != 0 {
			return fmt.Errorf("%d bytes are registered at its ends, want %d at most; %d bytes of send buffers", n, ends*restBytes, buffers)
		}
		return nil
	}
	testenv.Eventually(t, patience, rests) // once the probe of the device has ended
	for range 2 {
		streams(t, a, b, 3<<20)
		if without(session.FeatureRDMAWrite) {
			continue
		}
		if st := a.Stats(); st.OfferedBytesSent == 0 {
			t.Errorf("nothing went by RDMA: %+v", st)
		}
	}
	testenv.Eventually(t, patience, rests)
	streams(t, a, b, 1<<20)
}

var resting = flag.Int("resting", 200, "connections that TestManyAtRest has at a time")

const restingPeer = "SAN_TEST_RESTING" // the address to dial, in the child

// As many connections as wanted are open between two processes, within the usual budget. Each is used
// once before the others are made, and again afterwards.
func TestManyAtRest(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	child := exec.Command(os.Args[0], "-test.run=^TestDialMany$", "-test.v", fmt.Sprintf("-resting=%d", *resting))
	child.Env = append(os.Environ(), restingPeer+"="+l.addrs()[0].String())
	var out bytes.Buffer
	child.Stdout, child.Stderr = &out, &out
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	served := make(chan struct{})
	go func() {
		defer close(served)
		serveMany(t, l)
	}()
	err := <-ended
	t.Logf("%s", &out)
	if err != nil || !bytes.Contains(out.Bytes(), []byte("--- PASS: TestDialMany")) {
		t.Errorf("the other process: %v", err)
	}
	l.Close()
	<-served
}

// serveMany echoes on each connection, until the listener is closed and all peers have gone.
func serveMany(t *testing.T, l *listener) {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		e, err := l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			s := session.New(e, session.Config{Accepting: true})
			defer s.Abort()
			if err := s.Negotiate(patient(t)); err != nil {
				t.Error(err)
				return
			}
			for b := make([]byte, 4<<10); ; {
				n, err := s.Read(b)
				if err != nil {
					return
				}
				if _, err := s.Write(b[:n]); err != nil {
					return
				}
			}
		})
	}
}

// TestDialMany is the child's part.
func TestDialMany(t *testing.T) {
	address, child := os.LookupEnv(restingPeer)
	if !child {
		return
	}
	withoutReady(t) // each process would have these in addition
	cable(t)
	before, heap, began := registered(), heapInUse(), time.Now()
	all := make([]*session.Session, *resting)
	for i := range all {
		e, err := Dial(patient(t), netip.Addr{}, netip.MustParseAddrPort(address), Config{})
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		all[i] = session.New(e, session.Config{})
		defer all[i].Abort()
		if err := all[i].Negotiate(patient(t)); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		echo(t, all[i], 64)
	}
	connected, n := time.Since(began), int64(len(all))
	t.Logf("%d connections in %v; each has %d bytes registered and %d of the heap at this end", n, connected, (registered()-before)/n, (heapInUse()-heap)/n)
	if now := registered() - before; now > n*restBytes+probeMemory {
		t.Errorf("%d connections have %d bytes registered", n, now)
	}
	for _, s := range all {
		echo(t, s, 3000)
	}
}

// echo sends n bytes, and reads them back.
func echo(t *testing.T, s *session.Session, n int) {
	t.Helper()
	sent, got := bytes.Repeat([]byte{byte(n)}, n), make([]byte, n)
	if _, err := s.Write(sent); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(readerFunc(s.Read), got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%v; right bytes: %v", err, bytes.Equal(got, sent))
	}
}

// heapInUse returns the bytes of the program's heap and stacks.
func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
