package shm

import (
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

const stepsVariable = "SAN_SHM_TEST_STEPS"

func init() {
	// Handles messages as it is told, by a letter each: d(rop), k(eep), r(elease).
	roles["step"] = func() error {
		return serveRole(func(p *peer) {
			var ev session.Event
			for _, step := range os.Getenv(stepsVariable) {
				switch {
				case step == 'r':
					p.Release()
				case !p.poll(&ev):
					fmt.Println("error", p.Err())
				case step == 'k':
					p.Keep()
				default:
					p.Drop()
				}
			}
			fmt.Println("done")
			untilStdinEnds()
		})
	}
}

// A process that dies with data in the ring resets the connection, as TCP does. Control
// is not data, and how far the head lags does not matter.
func TestProcessThatDiesBeforeItHasReadAll(t *testing.T) {
	leaks(t)
	for _, tc := range []struct {
		name  string
		sent  string // D(ata), C(ontrol)
		steps string // of the process that dies
		want  error
	}{
		{"nothing", "", "", io.EOF},
		{"data that was dropped", "D", "d", io.EOF},
		{"data that was not seen", "D", "", syscall.ECONNRESET},
		{"data that was kept", "D", "k", syscall.ECONNRESET},
		{"data that was kept and released", "D", "kr", io.EOF},
		{"data of which some was not seen", "DD", "d", syscall.ECONNRESET},
		{"data of which some was kept", "DDD", "kkr", syscall.ECONNRESET},
		{"control that was not seen", "C", "", io.EOF},
		{"control behind data", "DC", "d", io.EOF},
		{"control behind data that was kept", "DC", "kd", syscall.ECONNRESET},
		{"control behind data that was released", "DCC", "kdr", io.EOF},
		{"data behind control", "CD", "d", syscall.ECONNRESET},
		{"data behind control, dropped", "CDC", "dd", io.EOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := spawn(t, "step", nil, stepsVariable+"="+tc.steps)
			p := dialChild(t, c, Config{})
			for _, kind := range tc.sent {
				sent := kind == 'C' && p.control(8) || kind != 'C' && p.send(make([]byte, 8))
				if !sent {
					t.Fatal(p.Err())
				}
			}
			c.line(t, "done")
			c.kill()
			if p.poll(new(session.Event)) {
				t.Error("an event of a peer that sent nothing")
			}
			if !errors.Is(p.Err(), tc.want) {
				t.Errorf("the peer's end shows as %v, not as %v", p.Err(), tc.want)
			}
		})
	}
}

// At every step, through pads, laps, growth and spare cells.
func TestUnreadIsExact(t *testing.T) {
	for seed := range int64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			a, b := pair(t, Config{RingMax: minRingMax})
			const data, control = 1, 2
			outstanding, kept := 0, 0
			r := rand.New(rand.NewSource(seed))
			var ev session.Event
			for step := range 20000 {
				switch op := r.Intn(9); {
				case op < 3:
					n := 1 + r.Intn(1<<r.Intn(17))
					if buf := a.Reserve(1, min(n, messageMax)); buf != nil {
						buf[0] = data
						a.Commit(len(buf))
						outstanding++
					}
				case op == 3:
					if buf := a.ReserveControl(8); buf != nil {
						buf[0] = control
						a.CommitControl(8)
					}
				case op < 8 && b.Poll(&ev): // as a session does: data stays behind what was kept
					switch {
					case ev.Msg[0] == data && (kept > 0 || op == 4):
						b.Keep()
						kept++
					case ev.Msg[0] == data:
						b.Drop()
						outstanding--
					default:
						b.Drop()
					}
				case kept > 0:
					b.Release()
					kept--
					outstanding--
				}
				if got := a.Endpoint.(*endpoint).unread(); got != (outstanding > 0) {
					t.Fatalf("step %d: unread is %v with %d messages outstanding, %d of them kept", step, got, outstanding, kept)
				}
			}
			if err := errors.Join(a.Err(), b.Err()); err != nil {
				t.Error(err)
			}
		})
	}
}

// … and however much control is sent, and nothing else: positions are modulo 2³².
func TestControlAloneIsNeverUnread(t *testing.T) {
	for name, first := range map[string]bool{"control alone": false, "behind a message": true} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, Config{})
			e := a.Endpoint.(*endpoint)
			var ev session.Event
			for data, laps := first, 0; laps < 3; data = false {
				before := uint32(e.send.tail)
				if data {
					a.Commit(len(a.Reserve(24, 24)))
				} else {
					a.control(24)
				}
				sent := e.unread()
				if !b.Poll(&ev) {
					t.Fatal("nothing has come")
				}
				b.Drop()
				if dropped := e.unread(); sent != data || dropped {
					t.Fatalf("unread at %d, with due %d: %v, then %v", e.send.tail, e.send.notes.due, sent, dropped)
				}
				if uint32(e.send.tail) < before {
					laps++
				}
			}
		})
	}
}

// A peer that lies about what it has read chooses how its own connection ends.
func TestPeerThatLiesAboutWhatItHasRead(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	const due = 16 // behind a message of 8 bytes
	for done, want := range map[uint32]error{
		0: syscall.ECONNRESET, 7: syscall.ECONNRESET, 1<<32 - 1: syscall.ECONNRESET,
		due: io.EOF, 1 << 20: io.EOF, 1 << 31: io.EOF, 1<<31 + due: io.EOF,
	} {
		s := visit(t, l)
		s.hello()
		p := newPeer(s.connect(l, asks(tcp, 0), bound))
		if !p.send(make([]byte, 8)) {
			t.Fatal(p.Err())
		}
		p.Endpoint.(*endpoint).control.notes[0].done = done
		s.conn.Close()
		for p.Err() == nil {
			if !p.in.sleep() {
				t.Fatal("the link lives")
			}
		}
		if err := p.Err(); !errors.Is(err, want) {
			t.Errorf("done %#x: %v, want %v", done, err, want)
		}
		end(p)
	}
	stillServes(t, tcp, l)
}
