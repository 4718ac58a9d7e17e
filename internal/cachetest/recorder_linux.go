package cachetest

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/sanconn/san/internal/frames"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
)

// recorder is a Registrar that passes everything on to a device, and records the physical
// frames of what is registered.
type recorder struct{ device regcache.Registrar }

// recorded takes the place of the device's own Ref.
type recorded struct {
	mr     regcache.MR // the device's
	frames frames.Record
	ended  atomic.Bool
}

func newRecorder(t *testing.T, device regcache.Registrar) recorder {
	t.Helper()
	if err := frames.Visible(); err != nil {
		testenv.Missing(t, err.Error())
	}
	return recorder{device}
}

// Register implements regcache.Registrar.
func (rec recorder) Register(addr uintptr, n int, access regcache.Access) (regcache.MR, error) {
	mr, err := rec.device.Register(addr, n, access)
	if err != nil {
		return mr, err
	}
	own := &recorded{mr: mr, frames: frames.Of(addr, n)}
	mr.Ref = own
	return mr, nil
}

// Deregister implements regcache.Registrar.
func (rec recorder) Deregister(mr regcache.MR) error {
	own := mr.Ref.(*recorded)
	own.ended.Store(true)
	return rec.device.Deregister(own.mr)
}

// stale returns an error unless r is registered, covers b, and has the pages of b.
func stale(r *regcache.Region, b []byte) error {
	own := r.MR().Ref.(*recorded)
	if own.ended.Load() {
		return errors.New("not registered any more")
	}
	return own.frames.Compare(addressOf(b), len(b))
}
