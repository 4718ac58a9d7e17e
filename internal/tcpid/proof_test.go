package tcpid

import (
	"errors"
	"sync"
	"testing"
)

// If a connection's stamp is not available, no challenge is answered.
func TestNothingToProve(t *testing.T) {
	var p Proof
	p.once(func() ([]Stamp, error) { return nil, errors.New("too late") })
	if half, ok := p.Answer(nil, 0); ok {
		t.Errorf("it is answered by %d", half)
	}
}

// However many guesses come at the same time, no more than MostGuesses are compared.
func TestGuessesAtOnce(t *testing.T) {
	for range 2000 {
		var p Proof
		p.once(func() ([]Stamp, error) { return make([]Stamp, 1), nil })
		var all sync.WaitGroup
		begin := make(chan struct{})
		for range 64 {
			all.Go(func() {
				<-begin
				p.Answer(nil, 1<<15)
			})
		}
		close(begin)
		all.Wait()
		if n := p.wrong.Load(); n != MostGuesses {
			t.Fatalf("%d were", n)
		}
	}
}

// The dialer counts wrong answers as the acceptor counts wrong challenges, and does not count right
// ones.
func TestWrongAnswersCount(t *testing.T) {
	var p Proof
	const stamp = Stamp(0x12345678)
	for range 2 * MostGuesses {
		if !p.Confirm(stamp, 0x1234) || p.Guessed() {
			t.Fatal("the right answer counts as a guess")
		}
	}
	for n := range MostGuesses {
		if p.Guessed() {
			t.Errorf("after %d it takes no more", n)
		}
		if p.Confirm(stamp, 0x5678) {
			t.Error("a wrong answer is taken for the acceptor's")
		}
	}
	if !p.Guessed() {
		t.Errorf("after %d wrong answers it takes another", MostGuesses)
	}
}
