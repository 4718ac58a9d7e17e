package shm

import (
	"context"
	"errors"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// FuzzHostileLink lets a peer send any messages with any descriptors to either end of a link, from the
// handshake on. Neither end panics or waits for ever, and both release everything.
func FuzzHostileLink(f *testing.F) {
	netWarm()
	l := listen(f, Config{})
	f.Fuzz(func(t *testing.T, script []byte) {
		p := &hostilePeer{t: t, script: script, closed: make(chan struct{})}
		before := count(t).fds
		p.run(l)
		for end := time.Now().Add(patience); count(t).fds > before; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("%d descriptors, were %d", count(t).fds, before)
			}
		}
	})
}

// hostilePeer plays a script, whose first byte chooses the end that it plays. The rest is what it sends:
// see next.
type hostilePeer struct {
	t      *testing.T
	script []byte

	conn   *net.UnixConn
	fds    []int         // that it may pass
	closed chan struct{} // closed when the attacked link has ended
}

// mostPackets is less than a socket's queue holds, so that no end waits until the other reads.
const mostPackets = 64

func (p *hostilePeer) run(l *served) {
	conns, err := unixPair()
	if err != nil {
		p.t.Fatal(err)
	}
	p.conn = conns[0]
	defer p.conn.Close()
	p.conn.SetDeadline(time.Now().Add(patience))
	defer p.descriptors()()
	if p.byte()%2 == 0 {
		p.dials(conns[1], l)
	} else {
		p.accepts(conns[1])
	}
}

// descriptors creates the descriptors that the peer may pass. close closes them.
func (p *hostilePeer) descriptors() (close func()) {
	m, half, err := newHalf(firstSlots, ownAccount(), false)
	if err != nil {
		p.t.Fatal(err)
	}
	m.unmap()
	at, door, err := newEventfd()
	if err != nil {
		p.t.Fatal(err)
	}
	plain, err := unix.MemfdCreate("plain", unix.MFD_CLOEXEC)
	if err != nil {
		p.t.Fatal(err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		p.t.Fatal(err)
	}
	p.fds = []int{half, door, event, plain}
	return func() { closeAll([]int{half, at, door, event, plain}) }
}

// dials attacks an accepting end.
func (p *hostilePeer) dials(conn *net.UnixConn, l *served) {
	done := make(chan bool, 1)
	go func() {
		k, err := acceptLink(conn, l.cfg, l.Listener.accept)
		done <- p.starts(k, err)
	}()
	p.sendAll(mostPackets)
	begun := p.await(done)
	for len(l.taken) > 0 {
		end(<-l.taken)
	}
	p.awaitEnd(begun)
}

// accepts attacks a dialing end. It first reads the request for a link and, if then there is a link, a
// connect.
func (p *hostilePeer) accepts(conn *net.UnixConn) {
	done := make(chan bool, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		k, err := dialLink(ctx, conn, uint32(os.Geteuid()), Config{}.withDefaults())
		begun := p.starts(k, err)
		if begun {
			if e, err := k.dial(ctx); err == nil {
				end(e)
			}
		}
		done <- begun
	}()
	if p.receive() {
		p.sendOne()
		if len(p.script) > 0 && p.receive() {
			p.sendAll(mostPackets)
		}
	}
	p.conn.CloseWrite()
	p.awaitEnd(p.await(done))
}

// starts starts a link, and reports whether there is one.
func (p *hostilePeer) starts(k *link, err error) bool {
	if err == nil {
		k.start(func() { close(p.closed) })
	}
	return err == nil
}

func (p *hostilePeer) await(done <-chan bool) (begun bool) {
	for p.receive() {
	}
	select {
	case begun := <-done:
		return begun
	case <-time.After(patience):
		p.t.Fatal("it hangs")
		return false
	}
}

// awaitEnd waits for the end of the link, if there is one.
func (p *hostilePeer) awaitEnd(begun bool) {
	if !begun {
		return
	}
	select {
	case <-p.closed:
	case <-time.After(patience):
		p.t.Fatal("the link does not end")
	}
}

// receive receives a message, and reports whether the other end is still connected.
func (p *hostilePeer) receive() bool {
	var m message
	fds, err := receive(p.conn, &m)
	closeAll(fds)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatal("it neither sends nor hangs up")
	}
	return err == nil
}

// sendAll sends the rest of the script, and ends its direction.
func (p *hostilePeer) sendAll(most int) {
	for ; len(p.script) > 0 && most > 0; most-- {
		p.sendOne()
	}
	p.conn.CloseWrite()
}

func (p *hostilePeer) sendOne() {
	b, fds := p.next()
	p.conn.WriteMsgUnix(b, rightsOf(fds), nil)
}

// next takes a packet from the script. A byte describes its descriptors: two bits for each kind, from
// plain (3) to half a segment (0), and how many. Then comes either a message, as kind, code, number,
// difference of the version and an ignored byte, or plain bytes.
func (p *hostilePeer) next() (b []byte, fds []int) {
	how := p.byte()
	for n := int(p.byte()) % 4; n > 0; n-- {
		fds = append(fds, p.fds[how%4])
		how /= 4
	}
	kind := p.byte()
	if kind >= 0xf0 {
		n := min(int(p.byte()), len(p.script))
		b, p.script = p.script[:n], p.script[n:]
		return b, fds
	}
	m := &message{kind: kind, code: p.byte(), number: uint32(int8(p.byte())), version: version + uint32(p.byte())}
	p.byte() // ignored: it had a meaning once
	return m.encode(), fds
}

// byte takes a byte of the script, or 0 at its end.
func (p *hostilePeer) byte() (b byte) {
	if len(p.script) > 0 {
		b, p.script = p.script[0], p.script[1:]
	}
	return b
}
