package moving

import (
	"context"
	"testing"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// A proposal that is being taken when the time for it ends, as in a process that was stopped
// meanwhile, is not taken back: the connection would be lost.
func TestTimeEndsWhileAProposalIsTaken(t *testing.T) {
	tcp, stamp, accepted, l := stampedPair(t)
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		t.Fatal(err)
	}
	conn, dialed := newconn.New(tcp, newconn.Config{Life: &Life{dialed: true}})
	t.Cleanup(func() { conn.Close() })
	ours, theirs := twin.Pair(twin.Config{})
	r := &taker{over: make(chan struct{})}
	r.session = session.New(theirs, session.Config{Accepting: true, OnNote: r.note})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	l.Condition = func(tcpid.Ends, string, int64) error {
		r.run(over)
		return nil
	}
	go r.session.Negotiate(t.Context())
	if err := proposeStamped(t.Context(), ours, Settings{}, dialed, ends, stamp); err != nil {
		t.Fatal(err)
	}
	for _, h := range []newconn.Handle{dialed, accepted} {
		if err := h.Moved(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
