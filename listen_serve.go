package san

import (
	"errors"
	"net"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/session"
)

const (
	// negotiateTimeout bounds how long a dialer may take to negotiate, even with busy
	// processors at both ends. Meanwhile it holds a place in the backlog, for less time
	// if that is full (see backlog.Begin).
	negotiateTimeout = 10 * time.Second

	// If a provider's accept fails, most likely for lack of resources, it is called again
	// after a delay that doubles within these bounds, as in net/http.
	minAcceptDelay = 5 * time.Millisecond
	maxAcceptDelay = time.Second
)

// serveTCP hands TCP's connections and errors to Accept, one at a time: the others stay in
// the kernel's backlog.
func (l *Listener) serveTCP() {
	for {
		c, err := l.tcp.Accept()
		if err != nil {
			if l.closing.Load() {
				return
			}
			select {
			case l.failed <- err:
				continue
			case <-l.closed:
				return
			}
		}
		if l.policy == Require {
			reset(c)
			count(func(n *Counters) { n.Refused++ })
			continue
		}
		select {
		case l.plain <- c:
		case <-l.closed:
			l.left <- c // never blocks: it is the only one
			return
		}
	}
}

// reset resets a TCP connection that nobody accepts, as the kernel does with those in its
// backlog: the dialer must not take an orderly end for an answer.
func reset(c net.Conn) {
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// serve accepts a provider's connections and has them negotiated in the
// background, so that a slow dialer delays no other.
func (l *Listener) serve(provider string, a acceptor, config session.Config) {
	config.Accepting = true
	if d, ok := a.(direct); ok {
		d.serve(func(t transport) { l.take(provider, t, config) })
		return
	}
	delay := minAcceptDelay
	for {
		t, err := a.accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			select {
			case <-time.After(delay):
			case <-l.closed:
				return
			}
			delay = min(2*delay, maxAcceptDelay)
			continue
		}
		delay = minAcceptDelay
		l.take(provider, t, config)
	}
}

// take has a connection negotiated: in the background, unless the dialer's part of it is
// there already.
func (l *Listener) take(provider string, t transport, config session.Config) {
	if l.handed.Load() && !l.accepting.Load() {
		turnAway(t)
		return
	}
	p, err := l.backlog.Begin(l.ctx, t.user, negotiateTimeout)
	switch {
	case errors.Is(err, backlog.ErrFull):
		refuse(t) // C7
		return
	case err != nil:
		sendToTCP(t, config)
		return
	}
	admitted := false // it has a place until Leave
	config.Admit = func() bool {
		admitted = p.End(true)
		return admitted
	}
	t.session = session.New(t.endpoint, config)
	end := func(err error) {
		switch {
		case err == nil:
			l.ready <- newConn(provider, t.session, t) // never blocks: it has a place in the backlog
		case admitted:
			l.backlog.Leave()
		default:
			p.End(false)
		}
	}
	done, err := t.session.NegotiateNow()
	switch {
	case !done:
		l.background.Go(func() {
			_, err := negotiate(p.Context(), t, config)
			end(err)
		})
		return
	case errors.Is(err, session.ErrNotAdmitted):
		sendAway(t)
	case err != nil:
		t.session.Abort()
		t.release()
	}
	end(err)
}

// refuse ends a connection before it is negotiated: its dialer sees
// ECONNREFUSED.
func refuse(t transport) {
	t.endpoint.Abort()
	t.endpoint.Retire()
	t.release()
	count(func(n *Counters) { n.Refused++ })
}

// sendToTCP ends a connection before it is negotiated, for which there is no room though
// TCP's backlog may have some: its dialer falls back.
func sendToTCP(t transport, config session.Config) {
	t.session = session.New(t.endpoint, config)
	sendAway(t)
}

// sendAway is sendToTCP once a session has begun.
func sendAway(t transport) {
	t.session.Refuse()
	t.release()
	count(func(n *Counters) { n.Refused++ })
}

// turnAway ends a connection before it is negotiated, so that its dialer falls back to TCP,
// where another process may still listen. On a ring a reset would mean that
// it is refused (see negotiate), and Close does not wait, so they close it instead.
func turnAway(t transport) {
	if t.endpoint.Limits().Ring() {
		t.endpoint.Close()
	} else {
		t.endpoint.Abort()
	}
	t.endpoint.Retire()
	t.release()
}
