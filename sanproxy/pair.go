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

// pair is a client's connection and the one over which it goes on. The bytes of each direction
// are moved by one goroutine, and nothing lies in between but what io.Copy uses.
type pair struct {
	client   end
	server   end           // its Conn is guarded by mu until run
	up, down atomic.Uint64 // bytes moved by the directions that have ended
	over     atomic.Bool   // ended in order: errors mean nothing any more

	mu     sync.Mutex
	closed bool // guarded by mu
}

// newPair takes the client's connection. From now on it ends by a reset unless it has ended
// in order, even if this process is killed.
func newPair(client net.Conn) *pair {
	p := &pair{client: end{Conn: client}}
	linger(client, 0)
	return p
}

// connected adds the server's connection, which it closes if the pair was aborted meanwhile.
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

// run forwards both ways until both directions have ended. If both ended in order the
// connections are closed, and otherwise reset.
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

// direction forwards what src sends to dst, and then the end of it.
func (p *pair) direction(dst, src *end, moved *atomic.Uint64) error {
	n, err := io.Copy(dst.Conn, src.Conn)
	moved.Store(uint64(n))
	switch {
	case p.over.Load():
		return nil
	case err == nil && (src.broken.Load() || wasReset(src.Conn) && !src.shut.Load()):
		// The Write that failed has taken the socket's error, and left an end of file to Read.
		// A socket is closed in order when both directions have ended, and shut is set by then.
		err = os.NewSyscallError("read", syscall.ECONNRESET)
	case err == nil:
		err = p.passEnd(dst, src)
	case ofWrite(err):
		// It takes no more, but what it has sent still has to travel.
		dst.broken.Store(true)
		return err
	}
	if err != nil {
		p.abort()
	}
	return err
}

// passEnd passes the end of src's stream to dst. Where either of them cannot end one direction
// alone, that is the end of both.
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

// close returns the connections that are to be closed: once.
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

// linger sets whether Close, or the end of the process, is a reset (0) or not (-1), where the
// connection has that.
func linger(c net.Conn, sec int) {
	if l, ok := bottom(c).(interface{ SetLinger(int) error }); ok {
		l.SetLinger(sec) // fails only if it is closed
	}
}

// bottom returns the connection that carries c: of a *tls.Conn, whose Close would send an end in
// order.
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

// ofWrite reports whether an error of io.Copy is that of a Write. If that is unknown, as after
// splice, it is taken for that of a Read.
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
