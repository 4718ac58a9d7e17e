package twin_test

import (
	"errors"
	"io"
	"math"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/endpointtest"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// kinds are the kinds of provider that exist, and others that could exist.
var kinds = map[string]twin.Config{
	"ring": {},
	"queue pair": {
		Limits: session.Limits{Window: 64, CanRead: true, CanWrite: true, MaxExpose: math.MaxInt},
	},
	"smallest": {
		Limits: session.Limits{Window: session.MinWindow, MaxMessage: session.MaxControl, CanWrite: true, MaxExpose: 1 << 20, MaxRDMA: 4096},
	},
	"messages only": {
		Limits: session.Limits{Window: session.MinWindow},
	},
	"tight ring": {
		QueueBytes: 8 << 10,
	},
}

func TestEndpoint(t *testing.T) {
	for name, cfg := range kinds {
		if !testing.Short() {
			t.Run(name, func(t *testing.T) { run(t, cfg) })
		}
		cfg.MaxLatency = 20 * time.Microsecond
		cfg.Faults = twin.Faults{Busy: 0.1, Short: 0.3, Stray: 0.1, Late: 0.01}
		t.Run(name+" with faults", func(t *testing.T) { run(t, cfg) })
	}
}

func run(t *testing.T, cfg twin.Config) {
	// Package endpointtest makes accesses on purpose that a NIC refuses.
	cfg.Violated = func(v twin.Violation) {
		switch v.Kind {
		case twin.BadAccess, twin.RevokedAccess:
		default:
			t.Error(v)
		}
	}
	seed := uint64(0)
	endpointtest.Run(t, func() (a, b session.Endpoint, stop func(), err error) {
		seed++
		cfg.Seed = seed
		ea, eb := twin.Pair(cfg)
		return ea, eb, func() {}, nil
	})
}

// A process that ends in the middle of a connection on a ring has ended in order if it has taken all
// data. Otherwise its end is a reset. What it has sent arrives first.
func TestDeathOnARing(t *testing.T) {
	for name, tt := range map[string]struct {
		send func(e *twin.Endpoint) // to the process that ends
		want error
	}{
		"nothing unread": {func(*twin.Endpoint) {}, io.EOF},
		"unread control": {func(e *twin.Endpoint) { e.ReserveControl(1); e.CommitControl(1) }, io.EOF},
		"unread data":    {func(e *twin.Endpoint) { e.Reserve(1, 1); e.Commit(1) }, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := twin.Pair(twin.Config{MaxLatency: time.Millisecond})
				a.Start(deaf{})
				b.Start(deaf{})
				tt.send(a)
				b.Reserve(1, 1)
				b.Commit(1)
				time.Sleep(time.Second)
				b.Kill()
				time.Sleep(time.Second)
				var ev session.Event
				if !a.Poll(&ev) || ev.Kind != session.Message {
					t.Fatal("what it had sent is lost")
				}
				a.Drop()
				if err := a.Err(); a.Poll(&ev) || !errors.Is(err, tt.want) {
					t.Errorf("the end: %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// A message that was sent after an RDMA write does not arrive if the write does not take place.
func TestDeathBetweenAWriteAndItsMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := kinds["queue pair"]
		cfg.MinLatency, cfg.MaxLatency = time.Millisecond, time.Millisecond
		a, b := twin.Pair(cfg)
		a.Start(deaf{})
		b.Start(deaf{})
		send := func() {
			b.Reserve(1, 1)
			b.Commit(1)
		}
		into := make([]byte, 100)
		d, err := a.Memory().Expose(into, session.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		send()
		if err := b.Memory().Write(make([]byte, 100), d, 0, 1); err != nil {
			t.Fatal(err)
		}
		send()
		b.Kill()
		time.Sleep(time.Second)
		n := 0
		for ev := (session.Event{}); a.Poll(&ev); n++ {
			a.Drop()
		}
		if n > 1 {
			t.Error("a message has overtaken the write before it")
		}
	})
}

type deaf struct{}

func (deaf) Wake(session.Events) {}

// Whatever the contract forbids is a violation, which names the end at fault.
func TestMisuse(t *testing.T) {
	buf := make([]byte, 100)
	for name, misuse := range map[string]func(e *twin.Endpoint){
		"Reserve twice":                 func(e *twin.Endpoint) { e.Reserve(1, 1); e.Reserve(1, 1) },
		"Reserve of nothing":            func(e *twin.Endpoint) { e.Reserve(0, 1) },
		"Commit of more":                func(e *twin.Endpoint) { e.Reserve(1, 1); e.Commit(2) },
		"Commit without Reserve":        func(e *twin.Endpoint) { e.Commit(0) },
		"CommitControl of less":         func(e *twin.Endpoint) { e.ReserveControl(2); e.CommitControl(1) },
		"ReserveControl of too much":    func(e *twin.Endpoint) { e.ReserveControl(session.MaxControl + 1) },
		"CommitControl without Reserve": func(e *twin.Endpoint) { e.Reserve(1, 1); e.CommitControl(1) },
		"Drop of nothing":               func(e *twin.Endpoint) { e.Drop() },
		"Keep of nothing":               func(e *twin.Endpoint) { e.Keep() },
		"Release of nothing":            func(e *twin.Endpoint) { e.Release() },
		"Poll after Close":              func(e *twin.Endpoint) { e.Close(); e.Poll(&session.Event{}) },
		"Retire before the end":         func(e *twin.Endpoint) { e.Retire() },
		"Retire twice":                  func(e *twin.Endpoint) { e.Close(); e.Retire(); e.Retire() },
		"Front after Retire":            func(e *twin.Endpoint) { e.Abort(); e.Retire(); e.Front() },
		"Err after Retire":              func(e *twin.Endpoint) { e.Abort(); e.Retire(); e.Err() },
		"Arm after Retire":              func(e *twin.Endpoint) { e.Abort(); e.Retire(); e.Arm(session.RecvReady) },
		"Abort after Retire":            func(e *twin.Endpoint) { e.Close(); e.Retire(); e.Abort() },
		"Alloc after Retire":            func(e *twin.Endpoint) { e.Close(); e.Retire(); e.Memory().Alloc(1) },
		"Free of what is not allocated": func(e *twin.Endpoint) { e.Memory().Free(buf) },
		"Revoke of what is not exposed": func(e *twin.Endpoint) { e.Memory().Revoke(session.Descriptor{}) },
		"Read where it cannot":          func(e *twin.Endpoint) { e.Memory().Read(buf, session.Descriptor{}, 0, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := kinds["queue pair"]
			cfg.Limits.CanRead = false
			var got []twin.Violation
			cfg.Violated = func(v twin.Violation) { got = append(got, v) }
			a, b := twin.Pair(cfg)
			a.Start(deaf{})
			b.Start(deaf{})
			if misuse(b); len(got) != 1 || got[0].Kind != twin.Misuse || got[0].End != 1 {
				t.Errorf("violations %v, want one misuse by end 1", got)
			}
		})
	}
}
