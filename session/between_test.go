package session_test

import (
	"bytes"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// betweenLooks lets the test act right after a CancelRead was handled, before the next
// look. Its RDMA reads find the queue full.
type betweenLooks struct {
	fullQueue
	then    func()
	handled bool
}

func (e *betweenLooks) Poll(ev *session.Event) bool {
	if e.handled {
		e.handled = false
		e.then()
	}
	ok := e.Endpoint.Poll(ev)
	e.handled = ok && ev.Kind == session.Message && ev.Msg[0] == tCancelRead
	return ok
}

// A Read whose slice got nothing, as the offer was withdrawn, finds what the same look
// has found behind it, though the peer has closed by then.
func TestLastWriteBehindAWithdrawnOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &betweenLooks{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const last = "the last Write"
		answered := false
		e.then = func() {
			if n := le.Uint64(p.expectDone(t, 1, 0)); n != 0 {
				t.Errorf("the slice has got %d bytes", n)
			}
			p.send(tData, 0, []byte(last)...)
			p.send(tClose, 0)
			p.Close()
			nap(2 * latency)
			answered = true
		}
		d, err := p.Expose(make([]byte, 1<<20), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 1<<20)
		r := goRead(s, buf)
		pass(2 * latency)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(2 * latency)
		p.send(tCancelRead, 0, u64(1)...)
		if r := within(t, r); string(buf[:r.n]) != last || r.err != nil {
			t.Errorf("%q, %v", buf[:min(r.n, 100)], r.err)
		}
		if n, err := s.Read(buf); n != 0 || err != io.EOF {
			t.Errorf("behind it %d bytes, %v", n, err)
		}
		if !answered {
			t.Error("no offer was withdrawn")
		}
	})
}

// secondErr lets the test act when the endpoint is asked how it is for the second time
// since it was polled: by a Read whose slice is the target of transfers that its look has
// found busy.
type secondErr struct {
	*twin.Endpoint
	act   func()
	asked int
}

func (e *secondErr) Poll(ev *session.Event) bool {
	e.asked = 0
	return e.Endpoint.Poll(ev)
}

func (e *secondErr) Err() error {
	if e.asked++; e.asked == 2 && e.act != nil {
		act := e.act
		e.act = nil
		act()
	}
	return e.Endpoint.Err()
}

// A Read into whose slice the peer has written all by RDMA gets it, though the peer's
// process ends before the Read's next look.
func TestLastWriteDoneOfAProcess(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &secondErr{}
		s, _, p := negotiatedOn(t, byWrite, session.Config{KeepAlive: -1, Spin: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const size = 100_000
		data, into := pattern(size), make([]byte, size)
		r := goRead(s, into)
		pass(time.Second)
		p.send(tOfferWrite, 0, u64(1, size)...)
		d := descriptor(p.expect(tGrant)[8:])
		if d.Len != size {
			t.Fatalf("a grant of %d bytes: not the Read's slice", d.Len)
		}
		if err := p.Write(data, d, 0, 1); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		acted := false
		e.act = func() {
			acted = true
			p.send(tWriteDone, 1, u64(1, size)...)
			p.Kill()
			nap(2 * latency)
		}
		p.send(tPing, 0) // the Read looks once more
		if r := within(t, r); r.n != size || r.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", r)
		}
		n, err := s.Read(into)
		if n != 0 {
			t.Errorf("%d bytes behind it", n)
		}
		wantErr(t, "behind it", err, syscall.ECONNRESET)
		if !acted {
			t.Error("nobody asked the endpoint twice")
		}
	})
}

// … nor is it cut short when somebody else's look has taken the end of its transfers, and
// what came behind them, before the Read finds that the connection has ended.
func TestLastWriteDoneInAnotherLook(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &lateArm{}
		s, _, p := negotiatedOn(t, byWrite, session.Config{KeepAlive: -1, Spin: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const size, last = 100_000, "the last Write"
		data, into := pattern(size), make([]byte, size)
		r := goRead(s, into)
		pass(time.Second)
		p.send(tOfferWrite, 0, u64(1, size)...)
		d := descriptor(p.expect(tGrant)[8:])
		if d.Len != size {
			t.Fatalf("a grant of %d bytes: not the Read's slice", d.Len)
		}
		if err := p.Write(data, d, 0, 1); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		between, goOn := make(chan struct{}), make(chan struct{})
		e.before(func() { close(between); <-goOn })
		p.send(tPing, 0) // the Read looks once more
		<-between
		p.send(tWriteDone, 1, u64(1, size)...)
		p.send(tData, 0, []byte(last)...)
		pass(2 * latency)
		p.Kill()
		pass(2 * latency)
		s.ReadUrgent(nil) // looks
		if n, broken := s.BrokenDirect(); n != 0 || broken {
			t.Errorf("a Read with all its bytes is cut short: %d, %v", n, broken)
		}
		close(goOn)
		if r := within(t, r); r.n != size || r.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", r)
		}
		n, err := s.Read(into)
		if string(into[:n]) != last || err != nil {
			t.Errorf("behind it: %q, %v", into[:n], err)
		}
		_, err = s.Read(into)
		wantErr(t, "the end", err, syscall.ECONNRESET)
	})
}

func descriptor(b []byte) session.Descriptor {
	return session.Descriptor{Addr: le.Uint64(b), Key: le.Uint64(b[8:]), Len: le.Uint64(b[16:])}
}
