//go:build linux

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/cachetest"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// cacheDevice implements cachetest.Device: it reads memory with the real device, which writes it over
// the cable into a sink at the other end.
type cacheDevice struct {
	registrar
	a, b *Endpoint

	mu   sync.Mutex // guards what follows
	sink []byte
	into session.Descriptor
}

func newCacheDevice(t testing.TB) *cacheDevice {
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
	c := &cacheDevice{registrar: registrar{a.dom.pd, arriving(Config{})}, a: a, b: b, sink: b.mem.Alloc(64 << 10)}
	if c.into, err = b.mem.Expose(c.sink, session.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	return c
}

// Send implements cachetest.Device.
func (c *cacheDevice) Send(r *regcache.Region, b []byte) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own, err := c.a.dom.cache.Acquire(c.sink, regcache.LocalRead) // the endpoint releases it
	if err != nil {
		return nil, err
	}
	e := c.a
	e.q.mu.Lock()
	wr := ibv.SendWR{
		ID: kindWrite, Opcode: ibv.OpWrite, Flags: ibv.Signaled,
		RemoteAddr: c.into.Addr, RemoteKey: uint32(c.into.Key),
	}
	wr.SGE = ibv.SGE{Addr: uint64(addressOf(b)), Length: uint32(len(b)), LKey: r.LKey()}
	if _, err := e.q.qp.PostSend([]ibv.SendWR{wr}); err != nil {
		e.q.mu.Unlock()
		return nil, err
	}
	e.mem.writes.push(transfer{kind: session.WriteDone, id: 1, region: own})
	e.q.mu.Unlock()
	if err := expectEvent(e, session.WriteDone); err != nil {
		return nil, err
	}
	// On iWARP the bytes are certain to have arrived only after a later message.
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

// expectEvent polls until there is an event, which must be of the kind.
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

// What the device reads by a cached registration is what the program has written. regcache runs the same
// test on a simulated network card.
func TestNoHitIsStaleOnTheDevice(t *testing.T) {
	cachetest.NewChurn(t, newCacheDevice(t), regcache.Config{}).Run()
}

// This shows that the test above can fail: if the owner of a mapping declares it stable, and then
// changes it, the device still reads the old pages.
func TestTheDeviceGoesOnReadingTheRegisteredPages(t *testing.T) {
	c := newCacheDevice(t)
	cache := regcache.New(c, regcache.Config{})
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

// BenchmarkRegistration measures what a registration costs, and what the cache saves.
func BenchmarkRegistration(b *testing.B) {
	c := newCacheDevice(b)
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
			{"exposed, not pinned", regcache.Config{Disabled: true}, regcache.RemoteRead, false},
			{"used once", regcache.Config{}, regcache.LocalWrite, true},
		} {
			b.Run(fmt.Sprintf("%d KiB/%s", size>>10, tt.name), func(b *testing.B) {
				tt.config.Budget = regcache.NewBudget(64<<20, 1024)
				cache := regcache.New(c, tt.config)
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

// reuse has what the caches of both ends of a connection did while the same memory was written from, and
// read into, reuseCount times.
type reuse struct {
	writer, reader *Endpoint
	from, into     []byte
	offers         uint64 // Writes by rendezvous
	writes, reads  regcache.Stats
}

const (
	reuseSize  = 1 << 20
	reuseCount = 20
	// Rounds before the count begins, until all memory that is in use at a time is registered. How many
	// that takes is random.
	reuseBefore = 10
)

func useAgain(t *testing.T, config session.Config) *reuse {
	t.Helper()
	l := listen(t, Config{})
	x, y, err := connect(l, l.cfg)
	if err != nil {
		t.Fatal(err)
	}
	a, b := negotiate(t, x, y, config)
	u := &reuse{writer: x, reader: y, from: make([]byte, reuseSize), into: make([]byte, reuseSize)}
	for range reuseBefore {
		u.move(t, a, b)
	}
	u.offers, u.writes, u.reads = a.Stats().OffersSent, x.dom.cache.Stats(), y.dom.cache.Stats()
	for range reuseCount {
		u.move(t, a, b)
	}
	u.offers = a.Stats().OffersSent - u.offers
	u.writes, u.reads = cacheStatsSince(x, u.writes), cacheStatsSince(y, u.reads)
	return u
}

// move writes the memory at a, and reads it at b.
func (u *reuse) move(t *testing.T, a, b *session.Session) {
	t.Helper()
	for i := range u.from {
		u.from[i]++
	}
	sent := make(chan error, 1)
	go func() { _, err := a.Write(u.from); sent <- err }()
	if _, err := io.ReadFull(readerFunc(b.Read), u.into); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(u.from, u.into) {
		t.Fatal("the bytes read are not those written")
	}
}

// cacheStatsSince returns what an end's cache has done since it had the statistics given.
func cacheStatsSince(e *Endpoint, had regcache.Stats) regcache.Stats {
	has := e.dom.cache.Stats()
	return regcache.Stats{
		Hits: has.Hits - had.Hits, Once: has.Once - had.Once, Exposed: has.Exposed - had.Exposed,
		Registrations: has.Registrations - had.Registrations,
	}
}

// Writes through the send buffer do not register the application's memory, and the send buffer is
// registered once.
func TestTheSendBufferIsRegisteredOnce(t *testing.T) {
	u := useAgain(t, session.Config{Disable: session.FeatureRDMARead})
	if u.offers != 0 {
		t.Fatalf("%d of %d Writes went by rendezvous", u.offers, reuseCount)
	}
	// How many chunks are in use at a time, and in which slabs of the arena they lie, is random. Each is
	// registered once.
	if made := u.writes.Registrations + u.reads.Registrations; made >= reuseCount {
		t.Errorf("%d registrations in %d Writes", made, reuseCount)
	}
	if u.writes.Hits+u.reads.Hits == 0 {
		t.Error("no hit: nothing went through the cache")
	}
}

// By rendezvous, bytes go from the application's memory to the application's memory. If that is used
// again, only what the peer may access is registered again, for each Write.
func TestMemoryUsedAgainIsNotRegistered(t *testing.T) {
	u := useAgain(t, session.Config{
		Threshold:     reuseSize,
		ReceiveBudget: 4 << 10, // so that hardly anything is fetched before a Read
	})
	if u.offers != reuseCount {
		t.Fatalf("%d of %d Writes went by rendezvous", u.offers, reuseCount)
	}
	for _, end := range []struct {
		what   string
		e      *Endpoint
		memory []byte
		access regcache.Access
		did    regcache.Stats
	}{
		{"written from", u.writer, u.from, regcache.LocalRead, u.writes},
		{"read into", u.reader, u.into, regcache.LocalWrite, u.reads},
	} {
		if end.did.Hits < reuseCount || end.did.Once != 0 {
			t.Errorf("memory %s %d times: %d hits, %d registrations for one use", end.what, reuseCount, end.did.Hits, end.did.Once)
		}
		if own := end.did.Registrations - end.did.Exposed; own >= reuseCount {
			t.Errorf("memory %s %d times: %d registrations that are not for the peer", end.what, reuseCount, own)
		}
		// Acquire registers memory that is not in the cache.
		had := end.e.dom.cache.Stats()
		r, err := end.e.dom.cache.Acquire(end.memory, end.access)
		if err != nil {
			t.Fatal(err)
		}
		if n := cacheStatsSince(end.e, had).Registrations; n != 0 {
			t.Errorf("the memory %s is not in the cache", end.what)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
}
