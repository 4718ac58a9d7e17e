package verbs

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// Memory windows of type 2. An exposure binds a window onto a registration that
// the cache has and keeps; Revoke invalidates it, which costs a work request
// where deregistering costs a system call and the pages (rules K4, K5). Where
// the device enforces them (probe.go), the window's key is of use to the peer of
// this queue pair alone (R2), in exactly its range and rights.
//
// A window is bound from the posting of the bind until the completion of its
// invalidation. Only the caller that takes its exposure out of the table invalidates
// it: some kernels do not survive a second time. What can no longer be invalidated
// goes with the queue pair.
type windows struct {
	on   bool
	all  []*window // by index; at most maxWindows. Guarded by mu of Endpoint
	free []*window // guarded by mu of Endpoint
	wr   [1]ibv.SendWR
}

type window struct {
	mw    *ibv.MW // nil: closed
	index int
	key   uint32
	bound bool
}

// revokeTime bounds how long Revoke waits for an invalidation. That is in the send
// queue after all that was posted, so if the peer has gone it takes until the retries
// are used up (four seconds), which ends the connection.
const revokeTime = 5 * time.Second

// errNoWindow means that no window can be had for this memory, or at this endpoint.
var errNoWindow = errors.New("verbs: no memory window")

// exposeByWindow gives the peer access to b by a window of its own.
func (e *Endpoint) exposeByWindow(b []byte, rights session.Rights) (uint32, exposure, error) {
	access, own := ibv.RemoteRead, regcache.BindWindow
	if rights&session.RemoteWrite != 0 {
		own |= regcache.LocalWrite
		access = ibv.RemoteWrite
		if rights&session.RemoteRead != 0 {
			access |= ibv.RemoteRead
		}
	}
	r, err := e.dom.cache.Acquire(b, own)
	switch {
	case errors.Is(err, syscall.EFAULT): // windows want memory that can be written
		return 0, exposure{}, fmt.Errorf("%w: %w", errNoWindow, err)
	case err != nil:
		return 0, exposure{}, err
	}
	w, err := e.bind(r, b, access)
	if err != nil {
		r.Release()
		return 0, exposure{}, err
	}
	return w.key, exposure{region: r, window: w}, nil
}

// bind binds a window. The device does so before it sends any message that is
// committed from then on.
func (e *Endpoint) bind(r *regcache.Region, b []byte, access ibv.Access) (*window, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone || e.failing != nil {
		return nil, errEnded
	}
	ws := &e.windows
	if len(ws.free) == 0 {
		if err := e.addWindow(); err != nil {
			return nil, fmt.Errorf("%w: %w", errNoWindow, err)
		}
	}
	last := len(ws.free) - 1
	w := ws.free[last]
	wr := &ws.wr[0]
	*wr = ibv.SendWR{ID: kindBind | uint64(w.index)}
	w.key = w.mw.Bind(wr, r.MR().Ref.(*ibv.MR), addressOf(b), len(b), access)
	n, err := e.qp.PostSend(ws.wr[:])
	if n > 0 {
		ws.free = ws.free[:last]
		w.bound = true
	}
	if err != nil {
		if n > 0 {
			e.fail(deviceError(err)) // the window goes with the queue pair
		}
		return nil, err
	}
	return w, nil
}

// addWindow makes one more window. mu is held.
func (e *Endpoint) addWindow() error {
	ws := &e.windows
	if len(ws.all) == maxWindows {
		return fmt.Errorf("all %d in use: %w", maxWindows, syscall.ENOBUFS)
	}
	mw, err := e.dom.pd.AllocMW()
	if err != nil {
		return err
	}
	w := &window{mw: mw, index: len(ws.all)}
	ws.all = append(ws.all, w)
	ws.free = append(ws.free, w)
	return nil
}

// unbind takes the peer's access away, by an invalidation or, if that cannot be
// had, by the end of the queue pair and of the window.
func (e *Endpoint) unbind(w *window) {
	err := e.invalidate(w)
	if err == nil {
		return
	}
	e.broken(deviceError(fmt.Errorf("verbs: revoke: %w", err)))
	e.mu.Lock()
	w.close()
	e.mu.Unlock()
}

func (e *Endpoint) invalidate(w *window) error {
	if err := e.postInvalidate(w); err != nil {
		return err
	}
	const poll = 20 * time.Microsecond // hardware takes about one
	for began := time.Now(); time.Since(began) < poll; runtime.Gosched() {
		e.mu.Lock()
		e.drain()
		over := e.freed(w)
		e.mu.Unlock()
		if over {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), revokeTime)
	defer cancel()
	return e.await(ctx, func() bool { return e.freed(w) })
}

// freed makes the window available once its invalidation has completed. Only the one
// who waits for that calls it: if the window were freed earlier, another could bind it
// again, and the wait would be for the new binding's end. mu is held.
func (e *Endpoint) freed(w *window) bool {
	if w.bound {
		return false
	}
	e.windows.free = append(e.windows.free, w)
	return true
}

func (e *Endpoint) postInvalidate(w *window) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone || e.failing != nil {
		return errEnded
	}
	wr := &e.windows.wr[0]
	*wr = ibv.SendWR{ID: kindUnbind | uint64(w.index), Flags: ibv.Signaled}
	w.mw.Invalidate(wr, w.key)
	_, err := e.qp.PostSend(e.windows.wr[:])
	return err
}

// unbound notes that an invalidation has completed. mu is held.
func (e *Endpoint) unbound(wc *ibv.WC) {
	if wc.Status != ibv.Success {
		return // the connection has failed
	}
	e.windows.all[wc.ID&^kindMask].bound = false
	e.alert()
}

// close frees the window, bound or not. mu is held.
func (w *window) close() {
	if w.mw == nil {
		return
	}
	w.mw.Close()
	w.mw = nil
}

// closeWindows is called before the queue pair is destroyed: in the other order the
// kernel takes a minute.
func (e *Endpoint) closeWindows() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range e.windows.all {
		w.close()
	}
}
