package sanproxy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/sanconn"
)

// An end is one of the two connections of a pair.
type end struct {
	net.Conn
	shut   atomic.Bool // its peer was sent the end of the stream
	broken atomic.Bool // a Write to it has failed
}

// pair is a client's connection and the one over which its bytes are forwarded. One goroutine moves the
// bytes of each direction, with no other buffer than io.Copy's.
type pair struct {
	client   end
	server   end           // its Conn is guarded by mu until run
	up, down atomic.Uint64 // bytes moved by the directions that have ended
	over     atomic.Bool   // both ended in order: later errors mean nothing

	mu     sync.Mutex
	closed bool // guarded by mu
}

// newPair takes over the client's connection. From now on the connection ends by a reset unless both
// directions have ended in order, even if this process is killed.
func newPair(client net.Conn) *pair {
	p := &pair{client: end{Conn: client}}
	linger(client, 0)
	return p
}

// connected adds the server's connection. If the pair was aborted in the meantime, it closes the
// connection and returns false.
func (p *pair) connected(server net.Conn) (ok bool) {
	linger(server, 0)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		bottom(server).Close()
		return false
	}
	p.server.Conn = server
	return true
}

// run forwards both ways until both directions have ended. If both ended in order, it closes the
// connections; otherwise it resets them.
func (p *pair) run() error {
	back := make(chan error, 1)
	go func() { back <- p.direction(&p.client, &p.server, &p.down) }()
	err := p.direction(&p.server, &p.client, &p.up)
	err = errors.Join(err, <-back)
	if err != nil && !p.over.Load() {
		p.abort()
		return err
	}
	p.finish()
	return nil
}

// direction forwards what src sends to dst, and then the end of src's stream.
func (p *pair) direction(dst, src *end, moved *atomic.Uint64) error {
	n, err := io.Copy(dst.Conn, src.Conn)
	moved.Store(uint64(n))
	switch {
	case p.over.Load():
		return nil
	case err == nil && (src.broken.Load() || wasReset(src.Conn) && !src.shut.Load()):
		// A failed Write of the other direction has consumed the socket's error, so that Read found an
		// end of file. A socket whose directions have both ended is closed, too, but then shut is set.
		err = os.NewSyscallError("read", syscall.ECONNRESET)
	case err == nil:
		err = p.passEnd(dst, src)
	case ofWrite(err):
		// dst takes no more bytes, but what it has sent has still to be forwarded.
		dst.broken.Store(true)
		return err
	}
	if err != nil {
		p.abort()
	}
	return err
}

// passEnd passes the end of src's stream to dst. If one of the two connections cannot end one direction
// alone, both directions end.
func (p *pair) passEnd(dst, src *end) error {
	half, ok := dst.Conn.(halfCloser)
	if _, too := src.Conn.(halfCloser); !ok || !too {
		p.over.Store(true)
		p.finish()
		return nil
	}
	dst.shut.Store(true)
	return half.CloseWrite()
}

type halfCloser interface{ CloseWrite() error }

// abort resets both connections, at once.
func (p *pair) abort() {
	for _, c := range p.close() {
		bottom(c).Close()
	}
}

// finish closes both connections; what was written is still delivered.
func (p *pair) finish() {
	for _, c := range p.close() {
		linger(c, -1)
		c.Close()
	}
}

// close returns the connections that have to be closed. A second call returns none.
func (p *pair) close() []net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	if p.server.Conn == nil {
		return []net.Conn{p.client.Conn}
	}
	return []net.Conn{p.client.Conn, p.server.Conn}
}

// moved returns how many bytes went from the client and back to it.
func (p *pair) moved() (up, down uint64) {
	if c, ok := p.client.Conn.(*sanconn.Conn); ok {
		s := c.Stats()
		return s.BytesReceived, s.BytesSent
	}
	p.mu.Lock()
	server := p.server.Conn
	p.mu.Unlock()
	if c, ok := server.(*sanconn.Conn); ok {
		s := c.Stats()
		return s.BytesSent, s.BytesReceived
	}
	return p.up.Load(), p.down.Load()
}

// linger sets whether Close, or the end of the process, resets the connection (0) or not (-1), if the
// connection has SetLinger.
func linger(c net.Conn, sec int) {
	if l, ok := bottom(c).(interface{ SetLinger(int) error }); ok {
		l.SetLinger(sec) // fails only if it is closed
	}
}

// bottom returns the connection that carries c. For a *tls.Conn that is the one beneath: the Close of a
// *tls.Conn would send an end in order.
func bottom(c net.Conn) net.Conn {
	for range 16 { // in case they form a cycle
		w, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = w.NetConn()
	}
	return c
}

// ofWrite reports whether an error of io.Copy came from a Write. If that is not known, as after splice,
// the error counts as one of a Read.
func ofWrite(err error) bool {
	if errors.Is(err, syscall.EPIPE) {
		return true
	}
	var op *net.OpError
	for errors.As(err, &op) {
		if op.Op == "write" {
			return true
		}
		err = op.Err
	}
	return false
}
