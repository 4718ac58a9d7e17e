package session_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// A wait that has polled is counted out again, whichever way it ended: one that is not
// keeps all others from polling for good.
func TestPollersAreCounted(t *testing.T) {
	if n := session.Polling(); n != 0 {
		t.Fatalf("%d poll before it", n)
	}
	cfg := twin.Config{Limits: messages.Limits, MinLatency: time.Microsecond, MaxLatency: time.Microsecond}
	ea, eb := twin.Pair(cfg)
	scfg := session.Config{Spin: 5 * time.Millisecond, KeepAlive: -1}
	a, b := session.New(ea, scfg), session.New(eb, scfg)
	negotiate(t, a)
	negotiate(t, b)
	for _, others := range []int{0, runtime.GOMAXPROCS(0)} {
		session.OthersPoll(others)
		for range 200 {
			r := goRead(a, make([]byte, 1))
			if _, err := b.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if x := within(t, r); x.n != 1 || x.err != nil {
				t.Fatalf("Read: %+v", x)
			}
		}
		before := a.Stats().Sleeps
		r := goRead(a, make([]byte, 1))
		for a.Stats().Sleeps == before {
			runtime.Gosched()
		}
		if _, err := b.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		within(t, r)
		session.OthersPoll(-others)
	}
	go a.Close()
	b.Close()
	<-a.Closed()
	<-b.Closed()
	if n := session.Polling(); n != 0 {
		t.Errorf("%d poll behind it", n)
	}
}
