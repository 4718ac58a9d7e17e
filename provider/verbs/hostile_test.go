//go:build linux

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

const (
	victimSize = 256 << 10      // of the memory, which is registered as a whole
	exposedAt  = victimSize / 2 // the offset of the exposed part
	exposedLen = 4096
)

// victim is an endpoint, and its peer. The endpoint's memory is registered and cached, a part is
// exposed, and was exposed before.
type victim struct {
	hostile, e *Endpoint
	mem        []byte             // the endpoint's memory, full of 's'
	live       session.Descriptor // of the exposed part
	old        session.Descriptor // of the same part, revoked
}

func newVictim(t *testing.T, l *listener, rights session.Rights) *victim {
	t.Helper()
	v := &victim{mem: bytes.Repeat([]byte{'s'}, victimSize)}
	v.hostile, v.e = pair(t, l, Config{})
	for range 3 { // until it is cached
		v.e.mem.Revoke(expose(t, v.hostile, v.e, v.mem, rights))
	}
	part := v.mem[exposedAt:][:exposedLen]
	v.old = expose(t, v.hostile, v.e, part, rights)
	v.e.mem.Revoke(v.old)
	v.live = expose(t, v.hostile, v.e, part, rights)
	if v.e.dom.cache.Stats().Entries == 0 {
		t.Fatal("nothing is cached")
	}
	return v
}

// unharmed reports whether the memory is unchanged.
func (v *victim) unharmed() bool { return bytes.Count(v.mem, []byte{'s'}) == victimSize }

// forgery makes the descriptor with which the victim's memory is attacked.
type forgery func(*testing.T, *victim) session.Descriptor

func revoked(_ *testing.T, v *victim) session.Descriptor { return v.old }

// moved returns the exposed descriptor, moved by off bytes.
func moved(off int) forgery {
	return func(_ *testing.T, v *victim) session.Descriptor {
		d := v.live
		d.Addr += uint64(off)
		return d
	}
}

// otherKey returns a descriptor whose key differs by off from the exposed one.
func otherKey(off int32) forgery {
	return func(_ *testing.T, v *victim) session.Descriptor {
		d := v.live
		d.Key = uint64(uint32(d.Key) + uint32(off))
		return d
	}
}

// cachedKey returns a descriptor with a key of the cached registration, which was given to nobody.
func cachedKey(key func(*regcache.Region) uint32) forgery {
	return func(t *testing.T, v *victim) session.Descriptor {
		t.Helper()
		r, err := v.e.dom.cache.Acquire(v.mem, regcache.LocalRead)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		if start, n := r.Range(); n < victimSize || start > addressOf(v.mem) {
			t.Fatal("the memory is not in the cache")
		}
		d := v.live
		d.Key = uint64(key(r))
		return d
	}
}

// messages returns a descriptor of the victim's message buffers, with the key of their registration.
func messages(mem func(*Endpoint) ([]byte, *ibv.MR)) forgery {
	return func(_ *testing.T, v *victim) session.Descriptor {
		b, mr := mem(v.e)
		return session.Descriptor{Addr: uint64(addressOf(b)), Key: uint64(mr.LKey), Len: uint64(len(b))}
	}
}

func outgoing(e *Endpoint) ([]byte, *ibv.MR) { return e.send.mem, e.send.mr }
func incoming(e *Endpoint) ([]byte, *ibv.MR) { return e.recv.mem, e.recv.mr }

var attacks = []struct {
	name  string
	lacks []string // devices that do not refuse it
	forge forgery
}{
	{"keeps a descriptor", nil, revoked},
	{"past the end", []string{"windows"}, moved(exposedLen - 8)},
	{"in front", []string{"windows"}, moved(-8)},
	{"the rest of the object", []string{"windows"}, moved(exposedLen)},
	{"far away", nil, moved(64 << 20)},
	// siw serves reads with the key of any registration in the domain (it does not check rights,
	// siw_qp_tx.c).
	{"guesses the cache's key", []string{"siw"}, cachedKey((*regcache.Region).LKey)},
	{"guesses the cache's remote key", []string{"siw"}, cachedKey((*regcache.Region).RKey)},
	{"guesses the key of what is sent", []string{"siw"}, messages(outgoing)},
	{"guesses the key of what is received", []string{"siw"}, messages(incoming)},
	{"guesses the next key", nil, otherKey(1)},
	{"guesses the key before", nil, otherKey(-1)},
	{"guesses another object's key", nil, otherKey(1 << 8)},
}

// A hostile peer attacks memory that is registered, cached and was exposed before: it gets an error and
// no byte, and changes none.
func TestHostilePeer(t *testing.T) {
	for _, name := range []string{"registrations", "windows"} {
		windows := name == "windows"
		if windows && testenv.Device() == "siw" {
			continue
		}
		l := listen(t, Config{})
		l.windows = windows
		for _, tt := range attacks {
			if slices.Contains(tt.lacks, name) && testenv.Device() != hwsim.Lane { // on rxe, windows have no bounds
				t.Logf("%s: not refused here: %s", name, tt.name)
				continue
			}
			t.Run(name+"/"+tt.name, func(t *testing.T) {
				if !slices.Contains(tt.lacks, testenv.Device()) {
					expectNothingRead(t, newVictim(t, l, session.RemoteRead), tt.forge)
				}
				expectNothingWritten(t, newVictim(t, l, session.RemoteWrite), tt.forge)
			})
		}
		// The permitted access works.
		v := newVictim(t, l, session.RemoteRead|session.RemoteWrite)
		sink := make([]byte, exposedLen)
		if err := read(t, v.hostile, sink, v.live); err != nil || bytes.Count(sink, []byte{'s'}) != exposedLen {
			t.Errorf("the descriptor in force: %v", err)
		}
	}
}

// No device writes to the memory that messages are sent from, not even this end's own.
func TestNothingWritesToWhatIsSent(t *testing.T) {
	if testenv.Device() == "siw" {
		return // it does not check the rights of a read's sink
	}
	l := listen(t, Config{})
	keys := map[string]func(*Endpoint) ([]byte, *ibv.MR){"its key": outgoing}
	if testenv.Device() == hwsim.Lane { // on rxe 96 of 4,096 bytes arrived, seen once
		keys["the key of what is received"] = incoming
	}
	for name, by := range keys {
		a, b := pair(t, l, Config{})
		exposed := bytes.Repeat([]byte{'s'}, exposedLen)
		d := expose(t, a, b, exposed, session.RemoteRead)
		wr := ibv.SendWR{Opcode: ibv.OpRead, RemoteAddr: d.Addr, RemoteKey: uint32(d.Key)}
		mem, _ := outgoing(a)
		clear(mem) // removes an earlier connection's messages
		_, mr := by(a)
		wr.SGE = ibv.SGE{Addr: uint64(addressOf(mem)), Length: exposedLen, LKey: mr.LKey}
		a.q.mu.Lock()
		a.send.wr[0] = wr
		a.send.postLocked(true)
		a.q.mu.Unlock()
		if err := endOf(t, a); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("by %s: %v, want ECONNRESET", name, err)
		}
		if n := bytes.Count(mem, []byte{'s'}); n > 0 {
			t.Errorf("by %s %d bytes came", name, n)
		}
	}
}

func expectNothingRead(t *testing.T, v *victim, forge forgery) {
	t.Helper()
	sink := bytes.Repeat([]byte{'o'}, 64)
	if err := read(t, v.hostile, sink, forge(t, v)); err == nil || bytes.IndexByte(sink, 's') >= 0 {
		t.Errorf("a read ended with %v and %q", err, sink)
	}
}

func expectNothingWritten(t *testing.T, v *victim, forge forgery) {
	t.Helper()
	if err := write(t, v.hostile, make([]byte, 64), forge(t, v)); err == nil {
		t.Error("a write was not refused")
	}
	endOf(t, v.e)
	if !v.unharmed() {
		t.Error("memory was changed")
	}
}

// ownMemory is memory that an endpoint keeps registered for itself, with its keys. The peer may access
// nothing of it, except what is exposed, with that exposure's key.
type ownMemory struct {
	mem  []byte
	keys []uint32
	old  *session.Descriptor // of an exposure that was revoked; nil: it was never exposed
}

var ownMemories = map[string]func(*testing.T, *Endpoint, *Endpoint) ownMemory{
	"the receive buffers of messages": func(_ *testing.T, _, e *Endpoint) ownMemory {
		return ownMemory{mem: e.recv.mem, keys: []uint32{e.recv.mr.LKey, e.recv.mr.RKey}}
	},
	"the send buffers of messages": func(_ *testing.T, _, e *Endpoint) ownMemory {
		return ownMemory{mem: e.send.mem, keys: []uint32{e.send.mr.LKey, e.send.mr.RKey}}
	},
	"an inbox": func(t *testing.T, hostile, e *Endpoint) ownMemory {
		own := allocated(t, e, regcache.LocalWrite)
		expose(t, hostile, e, own.mem, session.RemoteWrite)
		return own
	},
	"an inbox that it has left": func(t *testing.T, hostile, e *Endpoint) ownMemory {
		own := allocated(t, e, regcache.LocalWrite)
		d := expose(t, hostile, e, own.mem, session.RemoteWrite)
		e.mem.Revoke(d)
		own.old = &d
		return own
	},
	"a send buffer": func(t *testing.T, _, e *Endpoint) ownMemory { return allocated(t, e, regcache.LocalRead) },
}

// allocated returns memory of the arena, registered by the endpoint's cache.
func allocated(t *testing.T, e *Endpoint, access regcache.Access) ownMemory {
	t.Helper()
	mem := e.mem.Alloc(victimSize)
	if mem == nil {
		t.Fatal("no memory")
	}
	for i := range mem {
		mem[i] = 's'
	}
	if e.mem.windows.on() {
		access |= regcache.BindWindow
	}
	r, err := e.dom.cache.Acquire(mem, access)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release() // the cache keeps it
	return ownMemory{mem: mem, keys: []uint32{r.LKey(), r.RKey()}}
}

// A hostile peer that knows the key of memory that an endpoint keeps registered for itself can neither
// read nor write it.
func TestHostilePeerAtOwnMemory(t *testing.T) {
	for _, windows := range []bool{false, true} {
		if windows && testenv.Device() == "siw" {
			continue
		}
		l := listen(t, Config{})
		l.windows = windows
		for name, of := range ownMemories {
			t.Run(fmt.Sprintf("%s, windows %v", name, windows), func(t *testing.T) {
				for key := range 3 {
					for _, writes := range []bool{false, true} {
						if !writes && testenv.Device() == "siw" {
							continue // see attacks
						}
						attackOwnMemory(t, l, of, key, writes)
					}
				}
			})
		}
	}
}

// attackOwnMemory attacks the last bytes of such memory with one of its keys; the last key is the
// revoked one.
func attackOwnMemory(t *testing.T, l *listener, of func(*testing.T, *Endpoint, *Endpoint) ownMemory, key int, writes bool) {
	t.Helper()
	hostile, e := pair(t, l, Config{})
	own := of(t, hostile, e)
	const n = 64
	at := own.mem[len(own.mem)-n:]
	d := session.Descriptor{Addr: uint64(addressOf(at)), Len: n}
	switch {
	case key < len(own.keys):
		d.Key = uint64(own.keys[key])
	case own.old != nil:
		d.Key = own.old.Key
	default:
		return
	}
	before := bytes.Clone(own.mem)
	mine := bytes.Repeat([]byte{'o'}, n)
	var err error
	if writes {
		err = write(t, hostile, mine, d)
	} else {
		err = read(t, hostile, mine, d)
	}
	if err == nil {
		t.Errorf("key %d, write %v: not refused", key, writes)
	}
	endOf(t, e)
	if !bytes.Equal(own.mem, before) {
		t.Errorf("key %d, write %v: memory was changed", key, writes)
	}
	if !bytes.Equal(mine, bytes.Repeat([]byte{'o'}, n)) {
		t.Errorf("key %d: it got %q", key, mine)
	}
}
