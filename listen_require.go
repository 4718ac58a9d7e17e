package san

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/sanconn"
)

// required are the connections of a listener with the policy Require, of which Accept returns those
// that have moved. It does not refer to the listener, so that a listener can be collected without
// Close.
type required struct {
	opening
	tcp        *net.TCPListener
	ready      chan *sanconn.Conn // has room for the whole backlog
	failed     chan error         // errors of TCP's Accept
	places     chan struct{}      // a token for each connection that is moving or ready
	ctx        context.Context    // ends at Close
	cancel     context.CancelFunc
	background sync.WaitGroup

	mu     sync.Mutex      // guards the fields below
	until  context.Context // derived from ctx; ends at the deadline, or when the deadline is changed
	change context.CancelFunc
	silent []*silent // connections that have a place and are not ready; the oldest first
}

// silent is a connection that has not moved, mostly because no dialer has proposed it.
type silent struct {
	life    *moving.Life
	since   time.Time
	giveWay context.CancelCauseFunc
}

// patience is how long a connection keeps its place without a proposal. It is half of the dialer's time:
// a dialer may have many connections to move, and one that finds no place must have time left.
const patience = requireTimeout / 2

var errCrowded = &Unavailable{Reason: ReasonResources, Err: errors.New("nobody proposed to move it, and others needed its place")}

// require begins to accept, so that connections move before Accept is called.
func require(tcp *net.TCPListener, o opening) *required {
	r := &required{
		opening: o,
		tcp:     tcp,
		ready:   make(chan *sanconn.Conn, o.backlog),
		failed:  make(chan error),
		places:  make(chan struct{}, o.backlog),
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.until, r.change = context.WithCancel(r.ctx)
	r.background.Go(r.serve)
	return r
}

func (r *required) serve() {
	for {
		tcp, err := r.tcp.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case r.failed <- err:
				continue
			case <-r.ctx.Done():
				return
			}
		}
		if !r.place() {
			tcp.SetLinger(0)
			tcp.Close()
			return
		}
		r.background.Go(func() { r.await(tcp) })
	}
}

// place waits for a place for a new connection. It returns false after Close.
func (r *required) place() bool {
	select {
	case r.places <- struct{}{}:
		return true
	default:
	}
	for {
		select {
		case r.places <- struct{}{}:
			return true
		case <-r.ctx.Done():
			return false
		case <-time.After(r.makeRoom()):
		}
	}
}

// makeRoom resets the oldest connection without a proposal, if it is older than patience: clients that
// never propose a move must not keep others out, but the dialer of a younger one may be slow. It returns
// the time until it should be called again.
func (r *required) makeRoom() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.silent {
		if left := patience - time.Since(c.since); left > 0 {
			return left
		}
		if c.life.GiveUp() {
			c.giveWay(errCrowded)
			break
		}
	}
	return patience
}

// await waits until a connection has moved. If it does not move, await resets it.
func (r *required) await(tcp *net.TCPConn) {
	c := r.takeOn(tcp)
	l := moving.LifeOf(c)
	ctx, cancel := context.WithTimeout(r.ctx, requireTimeout)
	defer cancel()
	ctx, giveWay := context.WithCancelCause(ctx)
	defer giveWay(nil)
	its := &silent{l, time.Now(), giveWay}
	r.mu.Lock()
	r.silent = append(r.silent, its)
	r.mu.Unlock()
	err := newconn.HandleOf(c).Moved(ctx)
	r.mu.Lock()
	i := slices.Index(r.silent, its)
	r.silent = slices.Delete(r.silent, i, i+1)
	r.mu.Unlock()
	if err == nil {
		r.ready <- c // never blocks, as the connection has a place
		return
	} else if r.ctx.Err() == nil {
		l.Failed(reason.Of(cmp.Or(context.Cause(ctx), err)))
		moving.Count(func(n *moving.Counters) { n.Refused++ })
	}
	<-r.places
	c.SetLinger(0)
	c.Close()
}

// accept is Accept. It uses l after its wait, so that l is not collected meanwhile.
func (r *required) accept(l *Listener) (net.Conn, error) {
	for {
		r.mu.Lock()
		until := r.until
		r.mu.Unlock()
		switch { // errors and deadlines come before ready connections
		case r.ctx.Err() != nil:
			return nil, serverError("accept", l.Addr().Network(), l.Addr(), net.ErrClosed)
		case until.Err() == context.DeadlineExceeded:
			return nil, serverError("accept", l.Addr().Network(), l.Addr(), os.ErrDeadlineExceeded)
		}
		select {
		case c := <-r.ready:
			<-r.places
			return c, nil
		case err := <-r.failed:
			return nil, err
		case <-until.Done():
		}
	}
}

func (r *required) setDeadline(t time.Time) error {
	if r.ctx.Err() != nil {
		return net.ErrClosed // not wrapped, as from net
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.change()
	if t.IsZero() {
		r.until, r.change = context.WithCancel(r.ctx)
	} else {
		r.until, r.change = context.WithDeadline(r.ctx, t)
	}
	return nil
}

func (r *required) close() {
	r.tcp.Close() // no effect after Close
	r.cancel()
	r.background.Wait()
	for {
		select {
		case c := <-r.ready:
			c.SetLinger(0)
			c.Close()
		default:
			return
		}
	}
}
