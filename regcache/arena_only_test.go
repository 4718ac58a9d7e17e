package regcache

import (
	"errors"
	"testing"
)

var globalForArenaOnly [1 << 16]byte

// A cache that is only for arenas registers no other memory, however often it is used and with whatever
// access.
func TestArenaOnly(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{ArenaOnly: true})
	declared := make([]byte, 1<<16)
	r, err := Declare(declared)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Withdraw()
	for what, b := range map[string][]byte{"heap": make([]byte, 1<<16), "global": globalForArenaOnly[:], "declared": declared} {
		for range 2 {
			for _, access := range []Access{LocalRead, LocalWrite, BindWindow, RemoteRead, RemoteWrite} {
				if _, err := c.Acquire(b, access); !errors.Is(err, ErrUnknownMemory) {
					t.Errorf("%s, %v: %v", what, access, err)
				}
				if yes, err := c.Worth(b, access, 1); yes || !errors.Is(err, ErrUnknownMemory) {
					t.Errorf("%s, %v: worth it: %v, %v", what, access, yes, err)
				}
			}
		}
	}
	if d.made != 0 {
		t.Errorf("%d registrations", d.made)
	}
	a := NewArena(0, 0)
	defer a.Close()
	buf, err := a.Get(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer buf.Put()
	for _, access := range []Access{LocalWrite, RemoteRead} {
		release(t, acquire(t, c, buf.Bytes(), access))
	}
	if s := c.Stats(); s.Unknown == 0 || d.made == 0 {
		t.Errorf("%d were counted as unknown, %d registrations", s.Unknown, d.made)
	}
}
