package verbs

import (
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

const (
	transferSize = 4 << 20
	// The feature to switch off, so that bytes move by the other one.
	byRead, byWrite = session.FeatureRDMAWrite, session.FeatureRDMARead
)

// transfers are the ways to move bytes, for each kind of domain and window.
var transfers = []struct {
	name    string
	cfg     Config
	windows bool
	off     session.Feature
}{
	{"read", Config{}, false, byRead},
	{"write", Config{}, false, byWrite},
	{"read, windows", Config{}, true, byRead},
	{"write, windows", Config{}, true, byWrite},
	{"read, shared domain", Config{SharedDomain: true}, false, byRead},
	{"write, windows, shared domain", Config{SharedDomain: true}, true, byWrite},
}

// Sessions send bytes in both directions at the same time, in each way: all arrive unchanged, and no
// registration is left.
func TestTransfers(t *testing.T) {
	for _, tt := range transfers {
		if tt.windows && testenv.Device() == "siw" {
			continue
		}
		if tt.off|switchedOff()&(byRead|byWrite) == byRead|byWrite {
			continue // both are switched off then
		}
		t.Run(tt.name, func(t *testing.T) {
			nothingLeft(t)
			tt.cfg.Threshold, tt.cfg.Disable = 32<<10, tt.off
			l := listen(t, tt.cfg)
			l.windows = tt.windows
			x, y, err := connect(l, tt.cfg)
			if err != nil {
				t.Fatal(err)
			}
			mustHave(t, x, tt.cfg, tt.windows)
			mustHave(t, y, tt.cfg, tt.windows)
			a, b := negotiate(t, x, y, session.Config{Disable: tt.off})
			transferBothWays(t, a, b)
			expectMovedByRDMA(t, a, b)
			for _, s := range []*session.Session{a, b} {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				<-s.Closed()
			}
			expectDeregistered(t, x, y)
		})
	}
}

func transferBothWays(t *testing.T, a, b *session.Session) {
	t.Helper()
	var wg sync.WaitGroup
	for seed, s := range []*session.Session{a, b} {
		other := []*session.Session{b, a}[seed]
		sent := make(chan [32]byte, 1)
		wg.Go(func() {
			sent <- writeRandom(t, s, byte(seed))
			if err := s.CloseWrite(); err != nil {
				t.Errorf("CloseWrite: %v", err)
			}
		})
		wg.Go(func() {
			h := sha256.New()
			n, err := io.CopyBuffer(h, struct{ io.Reader }{readerFunc(other.Read)}, make([]byte, 300_000))
			if err != nil || n != transferSize {
				t.Errorf("read %d of %d: %v", n, transferSize, err)
			}
			if [32]byte(h.Sum(nil)) != <-sent {
				t.Error("other bytes than were sent")
			}
		})
	}
	wg.Wait()
}

// writeRandom writes bytes that depend on a seed, in Writes of random sizes, and returns their hash.
func writeRandom(t *testing.T, s *session.Session, seed byte) [32]byte {
	r, h := rand.NewChaCha8([32]byte{seed}), sha256.New()
	sizes := rand.New(r)
	buf := make([]byte, 1<<20)
	for left := transferSize; left > 0; {
		p := buf[:min(left, 1+sizes.IntN(len(buf)))]
		r.Read(p)
		h.Write(p)
		if n, err := s.Write(p); err != nil || n != len(p) {
			t.Errorf("Write of %d: %d, %v", len(p), n, err)
			break
		}
		left -= len(p)
	}
	return [32]byte(h.Sum(nil))
}

func expectMovedByRDMA(t *testing.T, both ...*session.Session) {
	t.Helper()
	for _, s := range both {
		if n := s.Stats().OfferedBytesSent; n < transferSize/2 {
			t.Errorf("%d bytes of %d moved by RDMA", n, transferSize)
		}
	}
}

func expectDeregistered(t *testing.T, both ...*Endpoint) {
	t.Helper()
	for _, e := range both {
		st := e.dom.cache.Stats()
		if st.DeregisterFailed != 0 {
			t.Errorf("%d registrations were not removed", st.DeregisterFailed)
		}
		if st.Promoted != 0 && without(session.FeatureRegCache) {
			t.Errorf("%d registrations were kept", st.Promoted)
		}
	}
}
