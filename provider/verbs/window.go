package verbs

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// windows has an endpoint's memory windows, of type 2. An exposure binds a window onto a registration
// that stays in the cache. Revoke invalidates the window, which costs a work request; deregistering
// would cost a system call and the pages (rules K4, K5). If the device enforces windows (probe.go), a
// window's key is of use only to the peer of this queue pair (R2), in exactly its range and rights.
//
// A window is bound from the posting of the bind until the completion of its invalidation. Only the
// caller that removes its exposure from the table invalidates it, because some kernels do not survive a
// second invalidation. The window of an offer is invalidated by the peer, with the message that ends
// its use (SEND_WITH_INV), if both devices are known to do that. A window that can no longer be
// invalidated goes with the queue pair.
type windows struct {
	q     *queuePair
	pd    *ibv.PD
	may   bool         // the send queue has room for them
	trust *atomic.Bool // the probe's result for the device

	all  []*window // by index; at most maxWindows; guarded by mu of q, like the fields below
	free []*window
	wr   [1]ibv.SendWR
}

// windowsBound counts the binds of all windows of the process.
var windowsBound atomic.Uint64

// WindowsBound returns how often this process has bound a memory window, without probes. It may be
// called concurrently.
func WindowsBound() uint64 { return windowsBound.Load() }

type window struct {
	mw    *ibv.MW // nil: closed
	index int
	key   uint32
	bound bool

	returnable bool // the peer may invalidate it: it is bound, and was not invalidated here
}

// on reports whether memory is exposed by windows, which it is once the device is known to enforce
// them.
func (ws *windows) on() bool { return ws.may && ws.trust.Load() }

// revokeTime bounds how long Revoke waits for an invalidation. The invalidation is in the send queue
// after all that was posted. If the peer has gone, it would take until the retries are used up (17 to
// 70 s by default). After revokeTime the connection ends.
const revokeTime = 5 * time.Second

// errNoWindow means that no window is possible for this memory, or at this endpoint.
var errNoWindow = errors.New("verbs: no memory window")

// bind binds a window, which the peer may invalidate if it is returnable. The device binds it before it
// sends any message that is committed from then on.
func (ws *windows) bind(r *regcache.Region, b []byte, access ibv.Access, returnable bool) (*window, error) {
	ws.q.mu.Lock()
	defer ws.q.mu.Unlock()
	if ws.q.overLocked() {
		return nil, errOver
	}
	if len(ws.free) == 0 {
		if err := ws.addLocked(); err != nil {
			return nil, fmt.Errorf("%w: %w", errNoWindow, err)
		}
	}
	last := len(ws.free) - 1
	w := ws.free[last]
	wr := &ws.wr[0]
	*wr = ibv.SendWR{ID: kindBind | uint64(w.index)}
	w.key = w.mw.Bind(wr, r.MR().Ref.(*ibv.MR), addressOf(b), len(b), access)
	n, err := ws.q.qp.PostSend(ws.wr[:])
	if n > 0 {
		ws.free = ws.free[:last]
		w.bound, w.returnable = true, returnable
		windowsBound.Add(1)
	}
	if err != nil {
		if n > 0 {
			ws.q.failLocked(deviceError(err)) // the window goes with the queue pair
		}
		return nil, err
	}
	return w, nil
}

// addLocked makes one more window.
func (ws *windows) addLocked() error {
	if len(ws.all) == maxWindows {
		return fmt.Errorf("all %d in use: %w", maxWindows, syscall.ENOBUFS)
	}
	mw, err := ws.pd.AllocMW()
	if err != nil {
		return err
	}
	w := &window{mw: mw, index: len(ws.all)}
	ws.all = append(ws.all, w)
	ws.free = append(ws.free, w)
	return nil
}

// unbind ends the peer's access, by an invalidation, or if that is not possible, by the end of the
// queue pair and of the window.
func (ws *windows) unbind(w *window) {
	err := ws.postInvalidate(w)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), revokeTime)
		defer cancel()
		err = ws.q.await(ctx, func() bool { return ws.freedLocked(w) })
	}
	if err != nil {
		ws.q.fail(deviceError(fmt.Errorf("verbs: revoke: %w", err)))
		ws.q.mu.Lock()
		w.closeLocked()
		ws.q.mu.Unlock()
	}
}

// freedLocked makes the window available once its invalidation has completed. Only the goroutine that
// waits for that calls it: if the window were freed earlier, another goroutine could bind it again, and
// the wait would be for the end of the new binding.
func (ws *windows) freedLocked(w *window) bool {
	if w.bound {
		return false
	}
	ws.free = append(ws.free, w)
	return true
}

// postInvalidate invalidates the window, unless the peer has.
func (ws *windows) postInvalidate(w *window) error {
	ws.q.mu.Lock()
	defer ws.q.mu.Unlock()
	switch {
	case !w.bound:
		return nil
	case ws.q.overLocked():
		return errOver
	}
	w.returnable = false // a peer that invalidates it from here on has broken the contract
	wr := &ws.wr[0]
	*wr = ibv.SendWR{ID: kindUnbind | uint64(w.index), Flags: ibv.Signaled}
	w.mw.Invalidate(wr, w.key)
	_, err := ws.q.qp.PostSend(ws.wr[:])
	return err
}

// returnedLocked notes that the peer has invalidated a key. It returns false if the peer may not.
func (ws *windows) returnedLocked(key uint32) bool {
	for _, w := range ws.all {
		if w.returnable && w.key == key {
			w.bound, w.returnable = false, false
			return true
		}
	}
	return false
}

// unboundLocked notes that an invalidation has completed.
func (ws *windows) unboundLocked(wc *ibv.WC) {
	if wc.Status != ibv.Success {
		return // the connection has failed
	}
	ws.all[wc.ID&^kindMask].bound = false
	ws.q.watchers.alert()
}

// closeLocked frees the window, bound or not. mu of its queue pair is held.
func (w *window) closeLocked() {
	if w.mw == nil {
		return
	}
	w.mw.Close()
	w.mw = nil
}

// close frees all windows, before the queue pair is destroyed: in the other order the kernel takes a
// minute.
func (ws *windows) close() {
	ws.q.mu.Lock()
	defer ws.q.mu.Unlock()
	for _, w := range ws.all {
		w.closeLocked()
	}
}

// exposeByWindow exposes b to the peer by a window.
func (r *remote) exposeByWindow(b []byte, rights session.Rights) (uint32, exposure, error) {
	access, own := ibv.RemoteRead, regcache.BindWindow
	if rights&session.RemoteWrite != 0 {
		own |= regcache.LocalWrite
		access = ibv.RemoteWrite
		if rights&session.RemoteRead != 0 {
			access |= ibv.RemoteRead
		}
	}
	region, err := r.user.Acquire(b, own)
	switch {
	case errors.Is(err, syscall.EFAULT): // windows need memory that can be written
		return 0, exposure{}, fmt.Errorf("%w: %w", errNoWindow, err)
	case err != nil:
		return 0, exposure{}, err
	}
	w, err := r.windows.bind(region, b, access, rights == session.RemoteRead && r.dev.returns.Load())
	if err != nil {
		region.Release()
		return 0, exposure{}, err
	}
	return w.key, exposure{region: region, window: w}, nil
}
