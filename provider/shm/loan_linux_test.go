package shm

import (
	"bytes"
	"errors"
	"io"
	"syscall"
	"testing"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// lent is an endpoint of which the application uses memory: room in one ring, and a kept message in the
// other.
type lent struct {
	*peer
	room, msg []byte
}

// keep makes an endpoint keep messages from its peer, so many that the ring grows.
func keep(t *testing.T, p, from *peer) {
	t.Helper()
	var ev session.Event
	for range 100 {
		if !from.send(bytes.Repeat([]byte{1}, 4096)) || !p.poll(&ev) {
			t.Fatal(from.Err(), p.Err())
		}
		p.Keep()
	}
}

// lend makes an endpoint that has kept messages lend memory.
func lend(t *testing.T, p *peer) lent {
	t.Helper()
	l := lent{p, p.reserve(ring.MaxMessage, ring.MaxMessage), p.Front()}
	if l.room == nil || l.msg == nil {
		t.Fatal(p.Err())
	}
	l.use(t)
	return l
}

// use writes to the room, as a source does, and reads the message, as a sink does.
func (l lent) use(t *testing.T) {
	t.Helper()
	for i := range l.room {
		l.room[i] = 2
	}
	if n := bytes.Count(l.msg, []byte{1}); n != len(l.msg) {
		t.Fatalf("of a kept message of %d bytes, %d are left", len(l.msg), n)
	}
}

// check does what use does, after others have had time to use the memory.
func (l lent) check(t *testing.T) {
	t.Helper()
	if n := bytes.Count(l.room, []byte{2}); n != len(l.room) {
		t.Errorf("of %d bytes that were reserved, %d have changed", len(l.room), len(l.room)-n)
	}
	l.use(t)
}

// An endpoint is closed while its memory is lent: the peer learns of the end at once, but until Retire
// no other connection gets the slot, and the reclaimer does not touch it. Then it is free. This holds
// for either end.
func TestLentMemoryOutlivesTheConnection(t *testing.T) {
	for name, dialer := range map[string]bool{"dialer": true, "acceptor": false} {
		for way, want := range map[string]error{"Close": syscall.EPIPE, "Abort": syscall.ECONNRESET} {
			t.Run(name+" "+way, func(t *testing.T) {
				leaks(t)
				l := listen(t, Config{})
				first, firstHere := meet(t, l) // keep the link
				defer end(first)
				defer end(firstHere)
				x, y := meet(t, l)
				near, place := x.(*endpoint).link, x.(*endpoint).slot
				if !dialer {
					x, y = y, x
				}
				a, b := newPeer(x), newPeer(y)
				keep(t, a, b)
				keep(t, b, a)
				m := lend(t, a)
				if way == "Close" {
					a.Close()
				} else {
					a.Abort()
				}
				if b.poll(new(session.Event)) || !errors.Is(b.Err(), want) {
					t.Errorf("the peer finds %v, want %v", b.Err(), want)
				}
				end(b)
				defer withoutReclaimer(x.(*endpoint).link, y.(*endpoint).link)() // this test takes the reclaimer's place
				for range cacheTicks + 1 {
					x.(*endpoint).link.sweep()
					y.(*endpoint).link.sweep()
				}
				for range 2 * firstSlots {
					c, d := meet(t, l)
					if c.(*endpoint).slot == place {
						t.Error("the slot has another connection")
					}
					newPeer(c).send(make([]byte, ring.MaxMessage))
					newPeer(d).send(make([]byte, ring.MaxMessage))
					end(c)
					end(d)
				}
				m.check(t)
				a.Retire()
				awaitFree(t, near, place)
			})
		}
	}
}

// Memory that is lent stays mapped after the end of the link, and after that of the listener.
func TestLentMemoryOutlivesTheLink(t *testing.T) {
	for name, dies := range map[string]func(p *peer, l *served){
		"the link dies":       func(p *peer, _ *served) { p.Endpoint.(*endpoint).link.die(errPeerGone) },
		"the listener closes": func(_ *peer, l *served) { l.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			l := listen(t, Config{})
			x, y := meet(t, l)
			a, b := newPeer(x), newPeer(y)
			defer withoutReclaimer(x.(*endpoint).link, y.(*endpoint).link)() // this test takes the reclaimer's place
			keep(t, a, b)
			keep(t, b, a)
			ends := []lent{lend(t, a), lend(t, b)}
			defer func() {
				for _, e := range ends {
					e.Retire()
				}
			}()
			dies(b, l)
			for _, e := range ends {
				e.Abort()
			}
			for range 2 * cacheTicks {
				for _, e := range ends {
					e.Endpoint.(*endpoint).link.sweep()
					e.check(t)
				}
			}
		})
	}
}

// Memory that is lent does not change when the peer's process dies.
func TestLentMemoryOutlivesThePeer(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	p := dialChild(t, c, Config{})
	var ev session.Event
	if !p.send(bytes.Repeat([]byte{1}, 4096)) || !p.poll(&ev) {
		t.Fatal(p.Err())
	}
	p.Keep()
	m := lent{p, p.reserve(4096, 4096), p.Front()}
	m.use(t)
	c.kill()
	if p.poll(&ev) || !errors.Is(p.Err(), io.EOF) {
		t.Errorf("the peer's end shows as %v", p.Err())
	}
	m.check(t)
	p.Close()
	m.check(t)
	p.Retire()
}

// A dialing process gets no second connection on a slot whose memory is lent here, whatever it writes
// there.
func TestSlotThatIsLentIsNotConnectedAgain(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.handshake()
	p := newPeer(s.connect(l, 3))
	room := p.reserve(100, 100)
	p.Close()
	p.Endpoint.(*endpoint).local.v.Store(stateClosed) // the peer claims that the slot is free
	s.send(connectTo(3))
	s.awaitHangUp()
	copy(room, "still mapped")
	p.Retire()
	servesOthers(t, l)
}
