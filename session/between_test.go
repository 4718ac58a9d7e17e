package session_test

import (
	"io"
	"testing"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// betweenLooks lets the test act right after the completion of an RDMA read that failed
// was handled, before the next look.
type betweenLooks struct {
	*twin.Endpoint
	then    func()
	handled bool
}

func (e *betweenLooks) Poll(ev *session.Event) bool {
	if e.handled {
		e.handled = false
		e.then()
	}
	ok := e.Endpoint.Poll(ev)
	e.handled = ok && ev.Kind == session.ReadDone && ev.Err != nil
	return ok
}

// A Read whose slice got nothing, as the offer was withdrawn, finds what the same look
// has found behind it, though the peer has closed by then.
func TestLastWriteBehindAWithdrawnOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &betweenLooks{}
		s, _, p := negotiatedOn(t, exact, session.Config{KeepAlive: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const last = "the last Write"
		answered := false
		e.then = func() {
			p.expectDone(t, 1, 0)
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
		e.Hold(twin.HoldReads)
		buf := make([]byte, 1<<20)
		r := goRead(s, buf)
		pass(2 * latency)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(2 * latency)
		if n := p.Revoke(d); n != 0 {
			t.Fatalf("the slice has got %d bytes", n)
		}
		p.send(tCancelRead, 0, u64(1)...)
		e.Hold(0)
		if r := within(t, r); string(buf[:r.n]) != last || r.err != nil {
			t.Errorf("%q, %v", buf[:min(r.n, 100)], r.err)
		}
		if n, err := s.Read(buf); n != 0 || err != io.EOF {
			t.Errorf("behind it %d bytes, %v", n, err)
		}
		if !answered {
			t.Error("no RDMA read failed")
		}
	})
}
