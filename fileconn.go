package san

import (
	"io"
	"net"
	"os"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
)

// FileConn makes a connection of a copy of a TCP connection's descriptor, such as one that
// another process has passed on (sanconn.Conn.File); see net.FileConn. It goes on by TCP from
// where that has left it, and moves to shared memory when the process that has dialed it tries
// that. If it is the dialed end that was passed on, this one does, but within a network
// namespace only: elsewhere such an end stays on TCP. Closing f does not affect it. What is not
// TCP, or cannot move, is what net.FileConn returns.
//
// Who passed the descriptor on must not use it any more: two processes that read or write by
// turns belong to TCP alone.
func FileConn(f *os.File) (net.Conn, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c, nil
	}
	o, err := new(ListenConfig).opening()
	if err != nil {
		c.Close()
		return nil, &net.OpError{Op: "file", Net: "tcp", Addr: tcp.LocalAddr(), Err: err}
	}
	written, read, err := tcpid.Positions(tcp)
	if o.choice.Without == nil && err != nil {
		o.choice.Without = &Unavailable{Reason: ReasonNotServed, Err: err}
	}
	var held io.Closer
	if o.choice.Without == nil {
		o.choice.Settings.Namespace = tcpid.Namespace(tcp)
		if held, err = o.hold(tcp); err != nil {
			o.choice.Without = reason.Of(err)
		}
	}
	if o.choice.Without != nil {
		return plain(tcp, o.choice.Without, false), nil
	}
	l := &moving.Life{Held: held}
	cfg := newconn.Config{PassedOn: true, BytesWritten: written, BytesRead: read}
	l.Plan, cfg.Threshold = planOfEither(tcp)
	return l.TakeOn(tcp, cfg), nil
}

// planOfEither has a connection that has been used try to move as one that was dialed, as no
// descriptor tells which end it is. For one that was accepted that costs a few microseconds, as
// nobody has a name by its dialer's port: unless that end was passed on as well. So that these two
// seldom try at once, one of them takes twice the use.
func planOfEither(tcp *net.TCPConn) (p *moving.Plan, threshold int64) {
	p, err := (&Dialer{Providers: []string{"shm"}}).plan("tcp")
	if err != nil || p.Without != nil {
		return nil, moving.FirstUse / 2
	}
	threshold = moving.FirstUse
	if ends, err := tcpid.EndsOf(tcp); err == nil && ends.Local.Compare(ends.Remote) > 0 {
		threshold *= 2
	}
	p.Either, p.Settings.Dir = true, "" // whose stamp a connection has depends on which end it is
	return p, threshold
}
