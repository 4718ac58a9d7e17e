package moving

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// failing is a provider whose moves fail.
type failing struct {
	Provider
	err   error
	tried bool
}

func (f *failing) Move(context.Context, newconn.Handle, Settings) error {
	f.tried = true
	return f.err
}

// The next provider is tried unless the first one may still move the connection. The reason of the first
// provider counts, unless the other end has refused.
func TestWhichProvidersAreTried(t *testing.T) {
	_, _, h, _ := stampedPair(t)
	of := func(r session.Reason) error { return &session.Unavailable{Reason: r, Err: errors.New("so it is")} }
	for _, tt := range []struct {
		first, second error
		next          bool // whether the second is tried
		why           session.Reason
	}{
		{of(session.ReasonNotServed), of(session.ReasonUnreachable), true, session.ReasonNotServed},
		{of(session.ReasonNotServed), of(session.ReasonRefused), true, session.ReasonRefused},
		{of(session.ReasonTimeout), nil, true, session.ReasonNone},
		{nil, nil, false, session.ReasonNone},
		{newconn.ErrNoAnswer, nil, false, session.ReasonTimeout},
		{newconn.ErrNotTaken, nil, false, session.ReasonTimeout},
		{newconn.ErrClaimed, nil, false, session.ReasonStays},
		{hello.Answer{Code: hello.Unknown}.Err(), nil, false, session.ReasonNoListener},
		{&session.Unavailable{Reason: session.ReasonNoListener, Err: hello.ErrNotAccepted}, nil, false, session.ReasonNoListener},
		{hello.Answer{Code: hello.Unknown, Undecided: true}.Err(), nil, false, session.ReasonTimeout},
	} {
		a, b := &failing{err: tt.first}, &failing{err: tt.second}
		why := (&Plan{Choice: Choice{Providers: []Provider{a, b}}}).move(t.Context(), h)
		if b.tried != tt.next || (why == nil) != (tt.why == session.ReasonNone) || why != nil && reason.Of(why).Reason != tt.why {
			t.Errorf("%v, and %v: the second is tried: %v, %v", tt.first, tt.second, b.tried, why)
		}
	}
}

// counting is a handle that records after how much use the next attempt is made.
type counting struct {
	newconn.Handle
	use chan int64
}

func (c counting) CallUse(bytes int64) { c.use <- bytes }

// Each failed move is repeated after more use than the one before. After a successful one the amount
// starts again, as a connection may come back.
func TestAMoveThatFailsIsTriedAgainLater(t *testing.T) {
	_, _, h, _ := stampedPair(t)
	f := &failing{}
	p := &Plan{Choice: Choice{Providers: []Provider{f}, Settings: Settings{Attempt: time.Minute}}}
	c := counting{h, make(chan int64, 1)}
	for i, want := range []int64{4, 16, 0, 4} {
		f.err = nil
		if want > 0 {
			f.err = &session.Unavailable{Reason: session.ReasonTimeout, Err: errors.New("so it is")}
		}
		p.moveLater(c, false, false)
		testenv.Eventually(t, time.Minute, func() error {
			if running, waiting, ok := Queue.Counts(); running+waiting > 0 || !ok {
				return errors.New("it is under way")
			}
			return nil
		})
		got := int64(0)
		select {
		case got = <-c.use:
		default:
		}
		if got != want*FirstUse {
			t.Errorf("move %d: tried again after %d, want %d", i, got, want*FirstUse)
		}
	}
}
