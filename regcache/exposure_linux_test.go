package regcache

import (
	"bytes"
	"testing"
)

// A peer that has an exposure's key, address and length gets these bytes while they are exposed, and no
// others.
func TestAPeerGetsWhatIsExposedAndNothingElse(t *testing.T) {
	for name, config := range map[string]Config{
		"pages stay pinned": {},
		"nothing stays":     {Disabled: true},
	} {
		t.Run(name, func(t *testing.T) {
			nic := newNIC(t)
			c := newCache(t, nic, config)
			memory := make([]byte, 256<<10)
			fill(memory, 3)
			secret := make([]byte, 64<<10)
			defer release(t, acquireAgain(t, c, secret, LocalWrite)) // registered, but not for remote access

			exposed := memory[10_000:20_000]
			start, n := addressOf(exposed), len(exposed)
			r := acquireAgain(t, c, exposed, RemoteRead)
			key := r.RKey()

			got, err := nic.remote(key, start, n, RemoteRead)
			if err != nil || !bytes.Equal(got, exposed) {
				t.Errorf("the peer read %d bytes, %v; want what is exposed", len(got), err)
			}
			refused := func(what string, key uint32, addr uintptr, n int, right Access) {
				t.Helper()
				if got, err := nic.remote(key, addr, n, right); err != errRemoteAccess || got != nil {
					t.Errorf("%s: %d bytes, %v; want an error", what, len(got), err)
				}
			}
			refused("one byte past the end", key, start+1, n, RemoteRead)
			refused("one byte before the start", key, start-1, 2, RemoteRead)
			refused("round the end of the address space", key, start, -1, RemoteRead)
			refused("writing what is exposed for reading", key, start, n, RemoteWrite)
			for guess := range uint32(1000) {
				if guess != key {
					refused("a guessed key", guess, start, 1, RemoteRead)
					refused("a guessed key", guess, addressOf(secret), 1, RemoteRead)
					refused("a guessed key", guess, addressOf(secret), 1, RemoteWrite)
				}
			}

			release(t, r)
			refused("a descriptor that was kept", key, start, n, RemoteRead)
			for guess := range uint32(1000) {
				refused("any key after the release", guess, start, 1, RemoteRead)
			}
			again := acquire(t, c, exposed, RemoteWrite)
			refused("the old key for the new exposure", key, start, n, RemoteWrite)
			refused("reading what is exposed for writing", again.RKey(), start, n, RemoteRead)
			release(t, again)
		})
	}
}
