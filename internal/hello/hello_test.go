package hello

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/sanconn/san/internal/tcpid"
)

// A dialer that does not know of the flag takes an answer with it for what it was before: the
// process does not have the connection yet.
func TestUndecidedAnswer(t *testing.T) {
	for _, a := range []Answer{{Code: Moves, Stamp: 7}, {Code: Unknown}, {Code: Unknown, Stamp: 7, Undecided: true}} {
		b := a.Encode()
		if got, err := ParseAnswer(b); got != a || err != nil {
			t.Errorf("%+v, %v instead of %+v", got, err, a)
		}
		if got, err := ParseAnswer(b[:3]); got.Code != a.Code || got.Undecided || err != nil {
			t.Errorf("without the flag: %+v, %v", got, err)
		}
		if got, err := ParseAnswer(append(b[:3:3], 0xfe)); got.Undecided || err != nil {
			t.Errorf("with other flags: %+v, %v", got, err)
		}
	}
	if !errors.Is(Answer{Code: Unknown, Undecided: true}.Err(), ErrUndecided) {
		t.Error("it is no reason")
	}
}

func TestProposalThereAndBack(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:2"), netip.MustParseAddrPort("[fd00::1]:3")
	for _, o := range []Proposal{
		{Ends: tcpid.Ends{Local: a, Remote: b}, Cookie: 4, PeerCookie: 5},
		{Ends: tcpid.Ends{Local: b, Remote: a}, Stamped: true, Challenge: 6},
	} {
		b := o.Encode()
		if got, err := ParseProposal(append(b, 7)); got != o || err != nil { // what later versions add
			t.Errorf("%+v, %v instead of %+v", got, err, o)
		}
		if _, err := ParseProposal(b[:len(b)-1]); err == nil {
			t.Error("one that is cut short is understood")
		}
	}
}
