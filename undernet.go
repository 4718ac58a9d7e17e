package san

import (
	"net"
	"sync"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/undernet"
)

// Programs that cmd/san has built call these functions by way of package net, with the settings of the
// environment.
func init() {
	undernet.Dialed = dialedByNet
	undernet.Listened = listenedByNet
	undernet.NoMPTCP = func() bool {
		o, err := new(ListenConfig).opening()
		return err == nil && o.stamps()
	}
}

// planOfNet is how connections move that package net has dialed.
var planOfNet = sync.OnceValues(func() (*moving.Plan, error) { return new(Dialer).plan("tcp") })

// dialedByNet is undernet.Dialed.
func dialedByNet(tcp *net.TCPConn) (net.Conn, error) {
	p, err := planOfNet()
	switch {
	case err != nil:
		return nil, err
	case p.Without != nil:
		plain(tcp, p.Without, true)
		return nil, nil
	}
	conn := p.Begin(tcp, time.Time{})
	p.MoveAtOnce(conn)
	return conn, nil
}

// listenedByNet is undernet.Listened.
func listenedByNet(tcp *net.TCPListener, network string) (undernet.Listener, error) {
	o, err := new(ListenConfig).opening()
	if err != nil {
		return nil, err
	}
	o.choice.Settings.V6Only = network == "tcp6"
	l, err := o.around(tcp)
	if err != nil {
		return nil, err
	}
	return netListener{l}, nil
}

// netListener is undernet.Listener.
type netListener struct{ l *Listener }

func (n netListener) Accepted(tcp *net.TCPConn) net.Conn {
	if c := n.l.accepted(tcp); c != net.Conn(tcp) {
		return c
	}
	return nil
}

func (n netListener) Close() error { return n.l.parts.close() }
