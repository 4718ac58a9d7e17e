package hello

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// A dialer that does not know the flag undecided understands the answer in its older meaning: the
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
		if got, err := ParseProposal(append(b, 7)); got != o || err != nil { // later versions may add bytes
			t.Errorf("%+v, %v instead of %+v", got, err, o)
		}
		if _, err := ParseProposal(b[:len(b)-1]); err == nil {
			t.Error("one that is cut short is understood")
		}
		b[0], b[1] = 9, b[1]|0xfe
		if got, err := ParseProposal(b); got != o || err != nil {
			t.Errorf("with other flags, and the zero byte another: %+v, %v instead of %+v", got, err, o)
		}
	}
}

// Only an answer with code Moves moves the connection: a truncated one, or one with an unknown code,
// does not.
func TestNoOtherAnswerMoves(t *testing.T) {
	whole := Answer{Code: Moves, Stamp: 7}.Encode()
	for n := range whole {
		if a, err := ParseAnswer(whole[:n]); err == nil {
			t.Errorf("%d bytes are %+v", n, a)
		}
	}
	reasons := map[Code]session.Reason{
		Unknown: session.ReasonNoListener, Other: session.ReasonOwner,
		Stays: session.ReasonStays, Refused: session.ReasonRefused,
	}
	for code := range 256 {
		a, err := ParseAnswer([]byte{byte(code), 7, 0, answerUndecided}) // the flag has a meaning only with Unknown
		if err != nil || a.Undecided != (a.Code == Unknown) {
			t.Errorf("code %d: %+v, %v", code, a, err)
		}
		a.Undecided = false
		want, known := reasons[a.Code]
		if !known {
			want = session.ReasonProtocol
		}
		var why *session.Unavailable
		if err := a.Err(); a.Code == Moves && err != nil || a.Code != Moves && (!errors.As(err, &why) || why.Reason != want) {
			t.Errorf("code %d: %v", code, err)
		}
	}
}
