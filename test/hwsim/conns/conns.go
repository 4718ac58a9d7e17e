// Package conns makes connections over the simulated device as package san makes them, but with settings
// of package verbs and of sessions that package san does not have. Only tests and benchmarks/hwsim
// import it.
package conns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// patience bounds a negotiation.
const patience = 20 * time.Second

// Config is the configuration of a listener and its connections, or of a dialer.
type Config struct {
	Verbs   verbs.Config
	Session session.Config
}

// Listen listens on a free port of 127.0.0.1.
func Listen(cfg Config) (net.Listener, error) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	taken := make(chan *verbs.Endpoint, mostTaken)
	l, err := verbs.Listen(tcp.Addr().(*net.TCPAddr).AddrPort(), cfg.Verbs, func(e *verbs.Endpoint) { taken <- e })
	if err != nil {
		tcp.Close()
		return nil, err
	}
	return &listener{tcp, l, taken, cfg, make(map[string]*sanconn.Conn)}, nil
}

// mostTaken is how many connections may wait for Accept.
const mostTaken = 1024

// listener accepts connections that move at once. Its Accept must not be called concurrently.
type listener struct {
	net.Listener
	verbs *verbs.Listener
	taken chan *verbs.Endpoint // endpoints; closed when no more come
	cfg   Config
	came  map[string]*sanconn.Conn // accepted TCP connections, by the dialer's address
}

// Accept returns a connection that has moved. A dialer that does not move delays the others.
func (l *listener) Accept() (net.Conn, error) {
	for e := range l.taken {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		var c *sanconn.Conn
		err := connpair.Accept(ctx, e, l.cfg.Session, func(hello []byte) *sanconn.Conn {
			c = l.find(string(hello))
			return c
		})
		if err == nil {
			err = newconn.HandleOf(c).Moved(ctx)
		}
		cancel()
		if err == nil {
			return c, nil
		}
	}
	return nil, net.ErrClosed
}

// find returns the TCP connection of a dialer. The dialer has made it before it sends its proposal.
func (l *listener) find(dialer string) *sanconn.Conn {
	for l.came[dialer] == nil {
		tcp, err := l.Listener.Accept()
		if err != nil {
			return nil
		}
		c := newconn.New(tcp.(*net.TCPConn), newconn.Config{Life: connpair.Nobody{}})
		l.came[tcp.RemoteAddr().String()] = c.(*sanconn.Conn)
	}
	c := l.came[dialer]
	delete(l.came, dialer)
	return c
}

// Close implements net.Listener.
func (l *listener) Close() error {
	err := l.verbs.Close()
	if err == nil { // the first endpoint
		close(l.taken)
		for e := range l.taken {
			e.Abort()
			e.Retire()
		}
	}
	return errors.Join(err, l.Listener.Close())
}

// Dial connects to a listener.
func Dial(ctx context.Context, cfg Config, address netip.AddrPort) (*sanconn.Conn, error) {
	tcp, err := net.Dial("tcp", address.String())
	if err != nil {
		return nil, err
	}
	conn := newconn.New(tcp.(*net.TCPConn), newconn.Config{Life: connpair.Nobody{}})
	h := newconn.HandleOf(conn)
	c := conn.(*sanconn.Conn)
	e, err := verbs.Dial(ctx, netip.Addr{}, address, cfg.Verbs)
	if err == nil {
		negotiate, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err = connpair.Propose(negotiate, c, e, cfg.Session, []byte(tcp.LocalAddr().String())); err == nil {
			err = h.Moved(negotiate)
		}
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// FreePort returns a port of 127.0.0.1 that nobody uses.
func FreePort() (uint16, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), nil
}
