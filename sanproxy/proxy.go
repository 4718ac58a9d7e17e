package sanproxy

import (
	"cmp"
	"context"
	"errors"
	"log"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
)

// defaultDialTimeout is long enough for a TCP connection whose first two packets are lost.
const defaultDialTimeout = 10 * time.Second

// acceptPause is the wait after Accept has failed, most likely for lack of descriptors.
const acceptPause = 100 * time.Millisecond

// A Proxy forwards each connection that it accepts over one that it dials. Its methods may be
// called concurrently; its fields must not be changed after the first call.
type Proxy struct {
	// Dial makes the connection to which a client's is forwarded. It has to return an error when ctx
	// ends, which is after DialTimeout at the latest. It may write to the new connection first, for
	// example a PROXY header. Of client it may use only the addresses. If Dial fails, client is reset.
	Dial func(ctx context.Context, client net.Conn) (net.Conn, error)

	// DialTimeout bounds Dial. Default 10 s.
	DialTimeout time.Duration

	// MaxConns is how many clients may be connected at the same time; further ones are reset at once. 0:
	// no limit.
	MaxConns int

	// ErrorLog gets a line when Accept begins to fail, and when Dial begins to fail or works again. Nil:
	// the log package's standard logger.
	ErrorLog *log.Logger

	start  sync.Once
	ctx    context.Context // for Dial; ends at Close
	cancel context.CancelFunc

	mu        sync.Mutex             // guards the rest
	closing   chan struct{}          // closed when no more are accepted
	drained   chan struct{}          // closed once closing is and no connection is left
	listeners map[*net.Listener]bool // pointers, because a listener's type may not be comparable
	pairs     map[*pair]bool
	stats     Stats  // without Open, and without the bytes of open connections
	failures  uint64 // of Dial, since it last succeeded
}

// Stats counts the connections of a Proxy since its start.
type Stats struct {
	Accepted uint64 `json:"accepted"`
	Open     int    `json:"open"`
	Refused  uint64 `json:"refused"`  // reset because of MaxConns, or because the Proxy was being closed
	Failed   uint64 `json:"failed"`   // reset because Dial failed
	Finished uint64 `json:"finished"` // both directions ended in order
	Reset    uint64 `json:"reset"`    // an end was reset or vanished, or the Proxy was closed

	// Bytes from clients and back to them. If neither end is a *sanconn.Conn, the bytes of a direction
	// are counted when it has ended.
	BytesUp   uint64 `json:"bytes_up"`
	BytesDown uint64 `json:"bytes_down"`
}

func (p *Proxy) init() {
	p.start.Do(func() {
		p.ctx, p.cancel = context.WithCancel(context.Background())
		p.closing, p.drained = make(chan struct{}), make(chan struct{})
		p.listeners, p.pairs = make(map[*net.Listener]bool), make(map[*pair]bool)
	})
}

// Serve accepts connections from l and forwards them, until Shutdown or Close; then it returns nil. If l
// is closed by other code, so that Accept's error matches net.ErrClosed, it returns that error; after
// other errors it goes on. It closes l. It may be called for several listeners.
func (p *Proxy) Serve(l net.Listener) error {
	p.init()
	defer l.Close()
	if !p.serves(&l) {
		return nil
	}
	defer p.forget(&l)
	failed := false // Accept's previous call failed
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			failed = false
			p.accepted(c)
			continue
		case p.isClosing():
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		}
		if !failed {
			p.logf("accept: %v", err)
		}
		failed = true
		select {
		case <-time.After(acceptPause):
		case <-p.closing:
		}
	}
}

// Shutdown stops accepting, and waits until all connections have ended. If ctx ends first, it resets
// those that are left, and returns ctx's error.
func (p *Proxy) Shutdown(ctx context.Context) error {
	p.init()
	p.stop()
	select {
	case <-p.drained:
		return nil
	case <-ctx.Done():
	}
	p.cancel()
	p.mu.Lock()
	left := slices.Collect(maps.Keys(p.pairs))
	p.mu.Unlock()
	if len(left) == 0 {
		return nil // both channels were ready, and select chose ctx's
	}
	var aborting sync.WaitGroup // in parallel: on verbs, one abort may take seconds
	for _, c := range left {
		aborting.Go(c.abort)
	}
	aborting.Wait()
	<-p.drained // soon, as nothing is left that they wait for
	return ctx.Err()
}

// Close stops accepting, and resets all connections.
func (p *Proxy) Close() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p.Shutdown(ctx)
	return nil
}

// Stats returns a snapshot of the counters.
func (p *Proxy) Stats() Stats {
	p.init()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Open = len(p.pairs)
	for c := range p.pairs {
		up, down := c.moved()
		s.BytesUp += up
		s.BytesDown += down
	}
	return s
}

// serves registers the listener. It returns false if no more connections are to be accepted.
func (p *Proxy) serves(l *net.Listener) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isClosing() {
		return false
	}
	p.listeners[l] = true
	return true
}

func (p *Proxy) forget(l *net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.listeners, l)
}

func (p *Proxy) isClosing() bool {
	select {
	case <-p.closing:
		return true
	default:
		return false
	}
}

// stop ends the listeners.
func (p *Proxy) stop() {
	p.mu.Lock()
	if !p.isClosing() {
		close(p.closing)
		p.noteDrainedLocked()
	}
	listeners := slices.Collect(maps.Keys(p.listeners))
	p.mu.Unlock()
	for _, l := range listeners {
		(*l).Close()
	}
}

func (p *Proxy) noteDrainedLocked() {
	if p.isClosing() && len(p.pairs) == 0 {
		close(p.drained)
	}
}

// accepted forwards a client's connection in the background. If there are too many, or the Proxy is
// being closed, it resets the connection.
func (p *Proxy) accepted(client net.Conn) {
	c := newPair(client)
	p.mu.Lock()
	p.stats.Accepted++
	ok := !p.isClosing() && (p.MaxConns == 0 || len(p.pairs) < p.MaxConns)
	if ok {
		p.pairs[c] = true
	} else {
		p.stats.Refused++
	}
	p.mu.Unlock()
	if !ok {
		c.abort()
		return
	}
	go p.forward(c) // Shutdown and Close wait for it by drained
}

// forward serves a client's connection to its end.
func (p *Proxy) forward(c *pair) {
	err := p.dial(c)
	dialed := err == nil
	if dialed {
		err = c.run()
	} else {
		c.abort()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pairs, c)
	up, down := c.moved()
	p.stats.BytesUp += up
	p.stats.BytesDown += down
	switch {
	case err == nil:
		p.stats.Finished++
	case dialed:
		p.stats.Reset++
	default:
		p.stats.Failed++
	}
	p.noteDrainedLocked()
}

func (p *Proxy) dial(c *pair) error {
	ctx, cancel := context.WithTimeout(p.ctx, cmp.Or(p.DialTimeout, defaultDialTimeout))
	defer cancel()
	to, err := p.Dial(ctx, c.client.Conn)
	p.noteDial(err)
	if err == nil && !c.connected(to) {
		err = net.ErrClosed
	}
	return err
}

// noteDial logs the first of several failures, and the end of them.
func (p *Proxy) noteDial(err error) {
	if p.ctx.Err() != nil {
		return // Dial may have failed because of that
	}
	p.mu.Lock()
	failed := p.failures
	if err != nil {
		p.failures++
	} else {
		p.failures = 0
	}
	p.mu.Unlock()
	switch {
	case err != nil && failed == 0:
		p.logf("cannot connect, clients are reset: %v", err)
	case err == nil && failed > 0:
		p.logf("connects again; clients that were reset: %d", failed)
	}
}

func (p *Proxy) logf(format string, args ...any) {
	if p.ErrorLog != nil {
		p.ErrorLog.Printf(format, args...)
		return
	}
	log.Printf("sanproxy: "+format, args...)
}
