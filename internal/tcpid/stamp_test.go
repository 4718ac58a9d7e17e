package tcpid

import "testing"

// proven runs the whole exchange.
func proven(dialer, acceptor Stamp) bool {
	answer, ok := acceptor.answer(dialer.Challenge())
	return ok && dialer.Confirm(answer)
}

// Only the difference of the stamps matters, wherever they are relative to multiples of 2^16 and 2^32.
func TestStampsWithinSlackProve(t *testing.T) {
	for _, base := range []Stamp{0, 1, 0x7fff, 0x8000, 0xfff0, 0x10000, 0x12345678, 0x7fffffff, 0x80000000, 0xffff0000, 0xffffffff} {
		for around := Stamp(0); around < 4*stampSlack; around++ {
			acceptor := base + around - 2*stampSlack
			for off := -4 * stampSlack; off <= 4*stampSlack; off++ {
				want := off >= -stampSlack && off <= stampSlack
				if got := proven(acceptor+Stamp(off), acceptor); got != want {
					t.Errorf("dialer %#x, acceptor %#x: %t", acceptor+Stamp(off), acceptor, got)
				}
			}
		}
	}
}

func TestStampsFarApartProveNothing(t *testing.T) {
	for _, tt := range []struct {
		name             string
		dialer, acceptor Stamp
	}{
		{"the dialer has the other half wrong", 0x00015678, 0x12345678},
		{"… by one", 0x12355678, 0x12345678},
		{"the acceptor has the other half wrong, beside the carry", 0x1234ffff, 0x12340000},
		{"the dialer's half is wrong", 0x12345600, 0x12345678},
		{"… by half of all", 0x1234d678, 0x12345678},
	} {
		if proven(tt.dialer, tt.acceptor) {
			t.Errorf("%s: %#x and %#x", tt.name, tt.dialer, tt.acceptor)
		}
	}
}

// The number of right guesses is that in the comment of Stamp.
func TestGuessesOfAStamp(t *testing.T) {
	for _, s := range []Stamp{0x12345678, 3, 0xfffffffe} {
		challenges, answers := 0, 0
		for guess := range 1 << 16 {
			if _, ok := s.answer(uint16(guess)); ok {
				challenges++
			}
			if s.Confirm(uint16(guess)) {
				answers++
			}
		}
		if challenges != 65 || answers != 1 {
			t.Errorf("%#x: %d challenges and %d answers are right", s, challenges, answers)
		}
	}
}
