//go:build linux && cgo

package ibv

import (
	"errors"
	"os"
	"testing"
	"time"
)

func TestAnArmedQueueMakesOneEvent(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	b.cq.Owner = "owner"
	b.postRecv(t, 1, 0, 64)
	check(t, b.cq.Notify())

	got := make(chan *CQ)
	ended := make(chan error)
	go func() {
		for {
			var cqs [4]*CQ
			n, err := b.ch.Events(cqs[:])
			if err != nil {
				ended <- err
				return
			}
			for _, cq := range cqs[:n] {
				got <- cq
			}
		}
	}()
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 32)})
	select {
	case cq := <-got:
		if cq != b.cq || cq.Owner != "owner" {
			t.Errorf("event of %+v", cq)
		}
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(patience):
		t.Fatal("no event")
	}
	b.succeed(t, 1)
	a.succeed(t, 2)

	// The queue is not armed, so there is no event. The deadline ends the wait.
	b.postRecv(t, 3, 0, 64)
	a.postSend(t, SendWR{ID: 4, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 32)})
	b.succeed(t, 3)
	a.succeed(t, 4)
	check(t, b.ch.poller.setDeadline(time.Now()))
	select {
	case cq := <-got:
		t.Errorf("event of %+v, which was not armed", cq)
	case err := <-ended:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Events after its deadline: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the deadline did not end Events")
	}
}

func TestCloseWakesWaiters(t *testing.T) {
	s := onSite(t)
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	async := must(ctx.AsyncChannel())(t)
	comp := must(ctx.CreateCompChannel())(t)
	cm := must(NewEventChannel())(t)
	for _, c := range []struct {
		what  string
		wait  func() error
		close func() error
	}{
		{"Events", func() error { _, err := comp.Events(make([]*CQ, 1)); return err }, comp.Close},
		{"Event", func() error { _, err := cm.Event(); return err }, cm.Close},
		{"async Event", func() error { _, err := async.Event(); return err }, async.Close},
	} {
		ended := make(chan error, 1)
		go func() { ended <- c.wait() }()
		select {
		case err := <-ended:
			t.Errorf("%s did not wait: %v", c.what, err)
		case <-time.After(20 * time.Millisecond): // most likely it sleeps by now; the test is right in either case
		}
		check(t, c.close())
		select {
		case err := <-ended:
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s after Close: %v", c.what, err)
			}
		case <-time.After(patience):
			t.Fatalf("%s is not woken by Close", c.what)
		}
	}
}
