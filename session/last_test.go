package session_test

import (
	"testing"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// counted says Last of all its messages, or of none, and counts the looks.
type counted struct {
	*twin.Endpoint
	last  bool
	looks int
}

func (c *counted) Poll(ev *session.Event) bool {
	c.looks++
	ok := c.Endpoint.Poll(ev)
	ev.Last = ok && ev.Kind == session.Message && c.last
	return ok
}

// A Read that has something does not look behind a message behind which nothing was.
func TestReadStopsAtTheLast(t *testing.T) {
	for _, last := range []bool{false, true} {
		inBubble(t, func(t *testing.T) {
			ea, eb := twins(t, messages)
			c := &counted{Endpoint: eb, last: last}
			a, b := session.New(ea, session.Config{}), session.New(c, session.Config{})
			defer idle()
			defer a.Abort()
			defer b.Abort()
			negotiate(t, a)
			negotiate(t, b)
			if _, err := a.Write([]byte("one")); err != nil {
				t.Fatal(err)
			}
			pass(2 * latency)
			before := c.looks
			p := make([]byte, 100)
			if n, err := b.Read(p); n != 3 || err != nil {
				t.Fatalf("%q, %v", p[:n], err)
			}
			want := 2
			if last {
				want = 1
			}
			if got := c.looks - before; got != want {
				t.Errorf("Last is %v: %d looks, want %d", last, got, want)
			}
		})
	}
}
