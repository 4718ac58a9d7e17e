//go:build linux

package verbs

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/regcache/cachetest"
	"github.com/sanconn/san/session"
)

// cacheCard is a device for the cache to be held against: what it reads from memory
// it writes through the cable into a sink at the other end.
type cacheCard struct {
	registrar
	a, b *Endpoint

	mu   sync.Mutex // guards what follows
	sink []byte
	into session.Descriptor
}

func newCacheCard(t testing.TB) *cacheCard {
	t.Helper()
	l := listen(t, Config{})
	a, b, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.discard)
	t.Cleanup(b.discard)
	begin(a)
	begin(b)
	c := &cacheCard{registrar: registrar{a.dom.pd}, a: a, b: b, sink: b.mem.Alloc(64 << 10)}
	if c.into, err = b.mem.Expose(c.sink, session.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	return c
}

// Send implements cachetest.Device.
func (c *cacheCard) Send(r *regcache.Region, b []byte) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own, err := c.a.dom.cache.Acquire(c.sink, regcache.LocalRead) // for the endpoint to release
	if err != nil {
		return nil, err
	}
	e := c.a
	e.q.mu.Lock()
	wr := ibv.SendWR{
		ID: kindWrite, Opcode: ibv.OpWrite, Flags: ibv.Signaled, NumSGE: 1,
		RemoteAddr: c.into.Addr, RemoteKey: uint32(c.into.Key),
	}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(b)), Length: uint32(len(b)), LKey: r.LKey()}
	if _, err := e.q.qp.PostSend([]ibv.SendWR{wr}); err != nil {
		e.q.mu.Unlock()
		return nil, err
	}
	e.mem.writes.push(transfer{kind: session.WriteDone, id: 1, region: own})
	e.q.mu.Unlock()
	if err := expectEvent(e, session.WriteDone); err != nil {
		return nil, err
	}
	// On iWARP it is there only once a later message is.
	room := e.ReserveControl(session.MaxControl)
	if room == nil {
		return nil, errors.New("no room for a message")
	}
	e.CommitControl(len(room))
	if err := expectEvent(c.b, session.Message); err != nil {
		return nil, err
	}
	c.b.Drop()
	return append([]byte(nil), c.sink[:len(b)]...), nil
}

// expectEvent polls until there is an event, which has to be of that kind.
func expectEvent(e *Endpoint, kind session.EventKind) error {
	var ev session.Event
	for began := time.Now(); !e.Poll(&ev); runtime.Gosched() {
		if e.Err() != nil || time.Since(began) > patience {
			return fmt.Errorf("no event of kind %v: %w", kind, e.Err())
		}
	}
	if ev.Kind != kind || ev.Err != nil {
		return fmt.Errorf("event %v: %w", ev.Kind, ev.Err)
	}
	return nil
}

// Stale implements cachetest.Device: the cache's own verification sees frames.
func (c *cacheCard) Stale(*regcache.Region, []byte) error { return nil }

// The test that holds regcache against a simulated card, on the real one: what
// the device reads from a cached registration is what the program wrote.
func TestNoHitIsStaleOnTheDevice(t *testing.T) {
	c := newCacheCard(t)
	cache, err := regcache.New(c, regcache.Config{Budget: regcache.NewBudget(16<<20, 48), Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	(&cachetest.Churn{Cache: cache, Device: c}).Run(t)
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
}

// That test can fail: when the owner of a mapping declares it stable and then
// changes it, the device goes on reading the old pages.
func TestTheDeviceTellsAStaleRegistration(t *testing.T) {
	c := newCacheCard(t)
	cache, err := regcache.New(c, regcache.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	b, err := unix.Mmap(-1, 0, 16<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	stable, err := regcache.Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()

	read := func() []byte {
		r, err := cache.Acquire(b, regcache.LocalRead)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		got, err := c.Send(r, b)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	b[0] = 'a'
	if got := read(); got[0] != 'a' {
		t.Fatalf("the device read %q", got[0])
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	b[0] = 'b'
	if got := read(); got[0] != 'a' {
		t.Errorf("the device read %q, want what was in the page that it has", got[0])
	}
}

// What registering costs, and what the cache saves of it.
func BenchmarkRegistration(b *testing.B) {
	c := newCacheCard(b)
	for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 8 << 20} {
		for _, tt := range []struct {
			name   string
			config regcache.Config
			access regcache.Access
			fresh  bool
		}{
			{"no cache", regcache.Config{Disabled: true}, regcache.LocalWrite, false},
			{"hit", regcache.Config{}, regcache.LocalWrite, false},
			{"exposed, pages pinned", regcache.Config{}, regcache.RemoteRead, false},
			{"exposed, not pinned", regcache.Config{NoPin: true}, regcache.RemoteRead, false},
			{"used once", regcache.Config{}, regcache.LocalWrite, true},
			{"used once, eager", regcache.Config{Eager: true}, regcache.LocalWrite, true},
		} {
			b.Run(fmt.Sprintf("%d KiB/%s", size>>10, tt.name), func(b *testing.B) {
				tt.config.Budget = regcache.NewBudget(64<<20, 1024)
				cache, err := regcache.New(c, tt.config)
				if err != nil {
					b.Fatal(err)
				}
				defer cache.Close()
				buffer := make([]byte, size)
				fill := func() {
					for i := 0; i < size; i += 4096 {
						buffer[i] = 1
					}
				}
				fill()
				use := func() {
					r, err := cache.Acquire(buffer, tt.access)
					if err != nil {
						b.Fatal(err)
					}
					r.Release()
				}
				use()
				use()
				for b.Loop() {
					if tt.fresh {
						b.StopTimer()
						buffer = make([]byte, size)
						fill()
						b.StartTimer()
					}
					use()
				}
			})
		}
	}
}

// Memory that is used again costs no registration: neither what a megabyte is
// written from, nor what it is read into, nor what is in between.
func TestMemoryUsedAgainIsNotRegistered(t *testing.T) {
	const size, before, count = 1 << 20, 10, 20
	l := listen(t, Config{})
	a, b := sessions(t, l, session.Config{})
	from, into := make([]byte, size), make([]byte, size)
	move := func() {
		t.Helper()
		sent := make(chan error, 1)
		go func() { _, err := a.Write(from); sent <- err }()
		if _, err := io.ReadFull(readerFunc(b.Read), into); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
	}
	for range before {
		move()
	}
	had := regcache.DefaultBudget().Stats()
	for range count {
		move()
	}
	has := regcache.DefaultBudget().Stats()
	// How many chunks are in use at a time is a matter of chance, and so is
	// which slabs of the arena they lie in; each is registered once.
	if n := has.Registrations - had.Registrations; n >= count {
		t.Errorf("%d registrations in %d transfers", n, count)
	}
	if has.Hits == had.Hits {
		t.Error("no hit: the cache was not asked")
	}
}
