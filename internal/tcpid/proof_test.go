package tcpid

import (
	"errors"
	"testing"
)

// A connection whose stamp cannot be had has none for an offer, either.
func TestNothingToProve(t *testing.T) {
	var p Proof
	p.once(func() ([]Stamp, error) { return nil, errors.New("too late") })
	if half, ok := p.Answer(nil, 0); ok {
		t.Errorf("it is answered by %d", half)
	}
}
