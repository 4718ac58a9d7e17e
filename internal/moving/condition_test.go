package moving

import (
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// A condition's decision applies to one proposal: the next one, by the same provider or another, is
// decided again.
func TestEachProposalIsDecided(t *testing.T) {
	var calls atomic.Int32
	l := &Life{Condition: func(tcpid.Ends, string, int64) error { calls.Add(1); return nil }}
	for i, provider := range []string{"shm", "shm", "verbs"} {
		proposal := taker{Came: Came{Provider: provider}}
		if decided, err := proposal.condition(l); !decided || err != nil {
			t.Errorf("decided: %v, %v", decided, err)
		}
		if n := int(calls.Load()); n != i+1 {
			t.Errorf("%d proposals, %d calls", i+1, n)
		}
	}
	if len(l.decisions) > 0 {
		t.Error("a decision is held")
	}
}

// A condition that ends its goroutine, as T.FailNow does, counts as a refusal.
func TestConditionThatDoesNotReturn(t *testing.T) {
	l := &Life{Condition: func(tcpid.Ends, string, int64) error { runtime.Goexit(); return nil }}
	if decided, err := new(taker).condition(l); !decided || err == nil {
		t.Errorf("decided: %v, %v", decided, err)
	}
	if why := l.why.Load(); why == nil || why.Reason != session.ReasonRefused {
		t.Errorf("the connection's reason is %v", why)
	}
	if len(l.decisions) > 0 {
		t.Error("a decision is held")
	}
}

// All proposals that wait for a decision get it, even if it came too late for an earlier one.
func TestProposalsWaitForOneDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		decide := make(chan error)
		l := &Life{Condition: func(tcpid.Ends, string, int64) error { return <-decide }}
		if decided, _ := new(taker).condition(l); decided {
			t.Error("it is decided before it is")
		}
		results := make(chan bool)
		for range 2 {
			go func() {
				decided, err := new(taker).condition(l)
				results <- decided && err == nil
			}()
		}
		synctest.Wait()
		decide <- nil // a single decision
		for range 2 {
			if !<-results {
				t.Error("a proposal does not get it")
			}
		}
	})
}
