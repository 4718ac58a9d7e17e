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

// FileConn makes a connection from a copy of a TCP connection's descriptor, such as one that another
// process has passed on (sanconn.Conn.File); see net.FileConn. The connection goes on by TCP where the
// other process has left it. It moves to shared memory when the process that has dialed it tries that.
// If the dialing end was passed on, this process tries it, but only within a network namespace;
// otherwise such an end stays on TCP. Closing f does not affect the connection. For a descriptor that
// is not TCP, or that cannot move, FileConn returns what net.FileConn returns.
//
// The process that has passed the descriptor on must not use it any more. If two processes read or
// write in turns, use net.FileConn.
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

// planOfEither makes a used connection try to move as if it was dialed, because a descriptor does not
// tell which end it is. For an accepted end that costs a few microseconds, as no process has a name for
// its dialer's port, unless the dialing end was passed on as well. So that two such ends seldom try at
// once, the threshold of one of them is twice the other's.
func planOfEither(tcp *net.TCPConn) (p *moving.Plan, threshold int64) {
	p, err := (&Dialer{Providers: []string{"shm"}}).plan("tcp")
	if err != nil || p.Without != nil {
		return nil, moving.FirstUse / 2
	}
	threshold = moving.FirstUse
	if ends, err := tcpid.EndsOf(tcp); err == nil && ends.Local.Compare(ends.Remote) > 0 {
		threshold *= 2
	}
	p.Either, p.Settings.Dir = true, "" // the stamp of a connection depends on which end it is, so no directory is used
	return p, threshold
}
