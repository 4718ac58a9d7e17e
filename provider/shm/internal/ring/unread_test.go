package ring

import (
	"fmt"
	"math/rand"
	"testing"
)

// Unread is exact after each step, with pads, laps, growth and cells.
func TestUnreadIsExact(t *testing.T) {
	for seed := range int64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			p := newPipe(t, minMax)
			const data, control = 1, 2
			outstanding, kept := 0, 0
			r := rand.New(rand.NewSource(seed))
			for step := range 20000 {
				switch op := r.Intn(10); {
				case op < 3:
					if room, _ := p.Reserve(1, min(1+r.Intn(1<<r.Intn(17)), MaxMessage)); room != nil {
						room[0] = data
						p.Commit(len(room))
						outstanding++
					}
				case op == 3:
					if room, _ := p.ReserveControl(8); room != nil {
						room[0] = control
						p.CommitControl(8)
					}
				case op == 4:
					p.Reserve(1, 1000)
					p.Commit(0)
				case op < 9: // as in a session: data stays after kept data
					msg, do := p.Poll()
					p.unbroken(do)
					switch {
					case msg == nil:
					case msg[0] == data && (kept > 0 || op == 5):
						p.Keep()
						kept++
					case msg[0] == data:
						p.Drop()
						outstanding--
					default:
						p.Drop()
					}
				case kept > 0:
					p.Release()
					kept--
					outstanding--
				}
				if got := p.out.Unread(&p.back); got != (outstanding > 0) {
					t.Fatalf("step %d: unread is %v with %d messages outstanding, %d of them kept", step, got, outstanding, kept)
				}
			}
		})
	}
}

// Control messages never count as unread, however many are sent, with positions that wrap modulo 2³².
func TestControlAloneIsNeverUnread(t *testing.T) {
	for name, first := range map[string]bool{"control alone": false, "behind a message": true} {
		t.Run(name, func(t *testing.T) {
			p := newPipe(t, Size)
			for data, laps := first, 0; laps < 3; data = false {
				before := uint32(p.Writer.tail)
				if data {
					p.send(24, 0)
				} else {
					p.sendControl(24, 0)
				}
				sent := p.out.Unread(&p.back)
				p.poll()
				p.Drop()
				if dropped := p.out.Unread(&p.back); sent != data || dropped {
					t.Fatalf("unread at %d, with due %d: %v, then %v", p.Writer.tail, p.out.due, sent, dropped)
				}
				if uint32(p.Writer.tail) < before {
					laps++
				}
			}
		})
	}
}

// A process that has lied about what it has read affects only how its own connection ends.
func TestUnreadByLies(t *testing.T) {
	const due = 16 // after a message of 8 bytes
	for done, want := range map[uint32]bool{
		0: true, 7: true, 1<<32 - 1: true,
		due: false, 1 << 20: false, 1 << 31: false, 1<<31 + due: false,
	} {
		p := newPipe(t, minMax)
		p.send(8, 0)
		if p.back.done = done; p.out.Unread(&p.back) != want {
			t.Errorf("done %#x: unread is %v", done, !want)
		}
	}
}
