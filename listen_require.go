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

// required are the connections of a listener with the policy Require: Accept returns those
// that have moved. It does not hold the listener, which the program may forget.
type required struct {
	opening
	tcp        *net.TCPListener
	ready      chan *sanconn.Conn // room for the whole backlog
	failed     chan error         // of TCP's Accept
	places     chan struct{}      // a token for each that moves or is ready
	ctx        context.Context    // ends at Close
	cancel     context.CancelFunc
	background sync.WaitGroup

	mu     sync.Mutex      // guards what follows
	until  context.Context // of ctx; ends at the deadline, or when there is another one
	change context.CancelFunc
	silent []*silent // have a place and are not ready; the oldest first
}

// silent is a connection that has not moved, mostly as nobody has proposed that yet.
type silent struct {
	life    *moving.Life
	since   time.Time
	giveWay context.CancelCauseFunc
}

// patience is how long a connection has its place for itself without a proposal. It is half of what
// its dialer waits, which may have many to move, so that one that finds no place has time left.
const patience = requireTimeout / 2

var errCrowded = &Unavailable{Reason: ReasonResources, Err: errors.New("nobody proposed to move it, and others needed its place")}

// require begins to accept, so that connections move before anybody calls Accept.
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

// place has a place for a connection that has come, and reports whether there is one before Close.
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

// makeRoom has the oldest connection without a proposal give way: clients that never propose to move
// must not keep others out. A young one's dialer may be slow. It returns after how long to look again.
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

// await waits until a connection has moved, and resets it otherwise.
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
		r.ready <- c // never blocks: it has a place
		return
	} else if r.ctx.Err() == nil {
		l.Failed(reason.Of(cmp.Or(context.Cause(ctx), err)))
		moving.Count(func(n *moving.Counters) { n.Refused++ })
	}
	<-r.places
	c.SetLinger(0)
	c.Close()
}

// accept is Accept. It uses l behind its wait, so that l is not taken for forgotten meanwhile.
func (r *required) accept(l *Listener) (net.Conn, error) {
	for {
		r.mu.Lock()
		until := r.until
		r.mu.Unlock()
		switch { // these count before a connection that is ready
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
		return net.ErrClosed // as it is, from net too
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
	r.tcp.Close() // unless Close has
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
