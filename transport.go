package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// transport is a connected endpoint with its addresses.
type transport struct {
	endpoint      session.Endpoint
	session       *session.Session // nil: none has begun on the endpoint
	local, remote *net.TCPAddr
	hold          io.Closer // closed after the endpoint; may be nil
	user          string    // to whom an accepted one is charged: a user of this host, or another host
}

// release closes what the transport holds besides its endpoint.
func (t transport) release() {
	if t.hold != nil {
		t.hold.Close()
	}
}

// errListenerLeft: the listener ended the connection in order before it was negotiated.
var errListenerLeft = errors.New("the listener is being closed, or accepts nothing")

// negotiate starts the session, unless it has begun. If it fails it releases the transport.
func negotiate(ctx context.Context, t transport, config session.Config) (*session.Session, error) {
	s := t.session
	if s == nil {
		s = session.New(t.endpoint, config)
	}
	err := s.Negotiate(ctx)
	if err == nil {
		return s, nil
	}
	switch {
	case errors.Is(err, session.ErrNotAdmitted), errors.Is(context.Cause(ctx), backlog.ErrLost):
		s.Refuse()
		count(func(n *Counters) { n.Refused++ })
	case ctx.Err() != nil:
		s.Close() // not a reset, which would mean "refused": the listener is being closed
	}
	s.Abort()
	t.release()
	if !t.endpoint.Limits().Ring() || errors.As(err, new(*Unavailable)) {
		return nil, err
	}
	// There is no wire that could have failed, so the listener has ended the connection.
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		return nil, syscall.ECONNREFUSED // a full backlog (C7, C8)
	case errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		// The listener is being closed, or was handed to another process. If nobody
		// listens any more, TCP's attempt will fail.
		return nil, &Unavailable{Reason: ReasonNoListener, Err: fmt.Errorf("%w: %w", errListenerLeft, err)}
	}
	return nil, err
}

// newConn makes a connection for the application of a negotiated session.
func newConn(provider string, s *session.Session, t transport) *sanconn.Conn {
	count(func(n *Counters) { n.Open[provider]++ })
	c := newconn.New(s, t.local, t.remote, func() {
		t.release()
		count(func(n *Counters) { n.Open[provider]-- })
	})
	return c.(*sanconn.Conn)
}
