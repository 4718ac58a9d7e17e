package verbs

import (
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Bytes both ways at once, through sessions, come as they went, by each way of
// moving them and on each kind of domain, window and queue.
func TestTransfers(t *testing.T) {
	const total = 4 << 20
	const byRead, byWrite = session.FeatureRDMAWrite, session.FeatureRDMARead
	for _, tt := range []struct {
		name string
		cfg  Config
		off  session.Feature
	}{
		{"read", Config{}, byRead},
		{"write", Config{}, byWrite},
		{"read, windows", Config{ForceWindows: true}, byRead},
		{"write, windows", Config{ForceWindows: true}, byWrite},
		{"read, shared queue", Config{SharedDomain: true, SRQFrom: 1}, byRead},
		{"write, windows, shared queue", Config{SharedDomain: true, SRQFrom: 1, ForceWindows: true}, byWrite},
	} {
		if tt.cfg.ForceWindows && testenv.Device() == "siw" {
			continue
		}
		if tt.off|switchedOff()&(byRead|byWrite) == byRead|byWrite {
			continue // neither is left
		}
		t.Run(tt.name, func(t *testing.T) {
			nothingLeft(t)
			tt.cfg.Threshold, tt.cfg.Disable = 32<<10, tt.off
			l := listen(t, tt.cfg)
			x, y, err := connect(l, tt.cfg)
			if err != nil {
				t.Fatal(err)
			}
			mustHave(t, x, tt.cfg)
			mustHave(t, y, tt.cfg)
			a, b := negotiate(t, x, y, session.Config{Disable: tt.off})
			var wg sync.WaitGroup
			for i, s := range []*session.Session{a, b} {
				other := []*session.Session{b, a}[i]
				sent := make(chan [32]byte, 1)
				wg.Go(func() {
					r, h := rand.NewChaCha8([32]byte{byte(i)}), sha256.New()
					sizes := rand.New(r)
					buf := make([]byte, 1<<20)
					for left := total; left > 0; {
						p := buf[:min(left, 1+sizes.IntN(len(buf)))]
						r.Read(p)
						h.Write(p)
						if n, err := s.Write(p); err != nil || n != len(p) {
							t.Errorf("Write of %d: %d, %v", len(p), n, err)
							break
						}
						left -= len(p)
					}
					sent <- [32]byte(h.Sum(nil))
					if err := s.CloseWrite(); err != nil {
						t.Errorf("CloseWrite: %v", err)
					}
				})
				wg.Go(func() {
					h := sha256.New()
					n, err := io.CopyBuffer(h, struct{ io.Reader }{readerFunc(other.Read)}, make([]byte, 300_000))
					if err != nil || n != int64(total) {
						t.Errorf("read %d of %d: %v", n, total, err)
					}
					if [32]byte(h.Sum(nil)) != <-sent {
						t.Error("other bytes than were sent")
					}
				})
			}
			wg.Wait()
			for _, s := range []*session.Session{a, b} {
				if st := s.Stats(); st.OfferedBytesSent < uint64(total/2) {
					t.Errorf("%d bytes of %d moved by RDMA", st.OfferedBytesSent, total)
				}
			}
			var errs []error
			for _, s := range []*session.Session{a, b} {
				errs = append(errs, s.Close())
				<-s.Closed()
			}
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
			for _, e := range []*Endpoint{x, y} {
				st := e.dom.cache.Stats()
				if st.DeregisterFailed != 0 {
					t.Errorf("%d registrations were not removed", st.DeregisterFailed)
				}
				if st.Promoted != 0 && without(session.FeatureRegCache) {
					t.Errorf("%d registrations were kept", st.Promoted)
				}
			}
		})
	}
}
