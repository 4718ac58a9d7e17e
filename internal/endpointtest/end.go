package endpointtest

import (
	"bytes"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/sanconn/san/session"
)

// ways are the ways in which an endpoint ends its connection, and what its peer finds then.
var ways = []struct {
	name string
	end  func(*end)
	want error
}{
	{"Close", (*end).close, syscall.EPIPE},
	{"Abort", (*end).abort, syscall.ECONNRESET},
}

func (e *end) close() { e.Close() }
func (e *end) abort() { e.Abort() }

// What was committed before Close arrives, followed by EPIPE.
func testClose(t *testing.T, mk Maker) {
	for _, count := range []int{0, 1, 20} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			a, b := pair(t, mk)
			together(t,
				func() error {
					for seq := range uint64(count) {
						if err := a.post(seq, 300); err != nil {
							return err
						}
					}
					if err := a.Close(); err != nil {
						return err
					}
					return nil
				},
				func() error {
					if err := b.expectAll(count); err != nil {
						return err
					}
					n, err := b.endOf()
					if n != 0 || !errors.Is(err, syscall.EPIPE) {
						return fmt.Errorf("after the last message: %d messages, %v; want 0, EPIPE", n, err)
					}
					if b.Reserve(minMessage, minMessage) != nil || b.ReserveControl(minMessage) != nil {
						return errors.New("there is room on a connection that ended")
					}
					return nil
				})
			for range 2 {
				if err := a.Close(); err != nil {
					t.Errorf("Close once more: %v", err)
				}
				a.Abort()
			}
			if err := b.Close(); err != nil {
				t.Errorf("Close of the second end: %v", err)
			}
		})
	}
}

// Close waits neither for a peer that does not poll nor for messages that are kept here.
func testCloseDoesNotWait(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	must(t, b.postControl(0, session.MaxControl))
	_, err := a.message()
	must(t, err)
	a.Keep()
	must(t, b.postControl(1, session.MaxControl))
	_, err = a.message() // neither dropped nor kept
	must(t, err)
	must(t, a.postControl(0, session.MaxControl))
	closed := make(chan struct{}, 1)
	go func() { a.Close(); signal(closed) }()
	must(t, wait(closed, "Close"))
	must(t, b.expect(0))
	if _, err := b.endOf(); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("the peer finds %v, want EPIPE", err)
	}
}

// The peer of Abort finds ECONNRESET, whatever it is doing.
func testAbort(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	together(t,
		func() error {
			for seq := range uint64(30) {
				if err := a.post(seq, 300); err != nil {
					return err
				}
			}
			a.Abort()
			a.Abort()
			return a.Close()
		},
		func() error {
			for seq := uint64(0); ; seq++ {
				if err := b.expect(seq); err != nil {
					if !errors.Is(err, syscall.ECONNRESET) {
						return fmt.Errorf("want ECONNRESET: %w", err)
					}
					return nil
				}
			}
		})
	var ev session.Event
	if b.Poll(&ev) {
		t.Errorf("Poll gives %+v after it said that this was all", ev)
	}
}

// After the end, Alloc and Free still work, Expose fails, and Revoke, Arm, Disarm, Close and Abort have
// no effect.
func testAfterTheEnd(t *testing.T, mk Maker) {
	for _, tt := range ways {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, mk)
			var exposed session.Descriptor
			var piece []byte
			canExpose := a.lim.MaxExpose > 0
			memory := make([]byte, minMessage)
			if canExpose {
				var err error
				exposed, err = a.mem.Expose(memory, session.RemoteRead)
				must(t, err)
			}
			if a.mem != nil {
				piece = a.mem.Alloc(minMessage)
			}
			tt.end(a)
			if a.mem != nil {
				if p := a.mem.Alloc(minMessage); p != nil {
					a.mem.Free(p)
				}
				if _, err := a.mem.Expose(memory, session.RemoteRead); err == nil {
					t.Error("memory was exposed on a connection that has ended")
				}
			}
			if piece != nil {
				a.mem.Free(piece)
			}
			if canExpose {
				a.mem.Revoke(exposed)
			}
			a.Arm(session.RecvReady | session.SendReady)
			a.Disarm(session.RecvReady | session.SendReady)
			a.Abort()
			if err := a.Close(); err != nil {
				t.Errorf("Close once more: %v", err)
			}
			if l := a.Limits(); l != a.lim {
				t.Errorf("limits changed from %+v to %+v", a.lim, l)
			}
			a.Err()
			if _, err := b.endOf(); !errors.Is(err, tt.want) {
				t.Errorf("the peer finds %v, want %v", err, tt.want)
			}
		})
	}
}

// Until Retire, reserved room and kept messages stay in place and are not reused, even though the peer
// finds the end at once.
func testRetire(t *testing.T, mk Maker) {
	const written = 0xC3
	for _, tt := range ways {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, mk)
			var kept [][]byte
			for seq := range uint64(2) {
				must(t, b.post(seq, 300))
				m, err := a.message()
				must(t, err)
				kept = append(kept, m)
				a.Keep()
			}
			must(t, a.credit(false))
			data, err := a.reserve(minMessage, a.maxMessage())
			must(t, err)
			control, err := a.reserveControl(session.MaxControl)
			must(t, err)
			fill(data, written)
			fill(control, written)
			// During the end, other goroutines write the second half of the room, and read.
			together(t,
				func() error { tt.end(a); return nil },
				func() error { fill(data[len(data)/2:], written); return nil },
				func() error { fill(control[len(control)/2:], written); return nil },
				func() error { return verify(kept[0], 0) })
			if n, err := b.endOf(); n != 0 || !errors.Is(err, tt.want) {
				t.Fatalf("the peer finds %d messages, %v; want 0, %v", n, err, tt.want)
			}
			b.retire()
			useMemory(t, mk)
			for seq, m := range kept {
				if err := verify(m, uint64(seq)); err != nil {
					t.Errorf("what was kept, before Retire: %v", err)
				}
			}
			for _, room := range [][]byte{data, control} {
				if i := bytes.Count(room, []byte{written}); i != len(room) {
					t.Errorf("of %d bytes that were reserved, %d have changed before Retire", len(room), len(room)-i)
				}
			}
			a.retire()
		})
	}
}

// useMemory makes other connections use whatever memory is free.
func useMemory(t *testing.T, mk Maker) {
	t.Helper()
	const connections, messages = 3, 100
	for range connections {
		a, b := pair(t, mk)
		exchange := func(from, to *end) func() error {
			return func() error {
				for seq := range uint64(messages) {
					if err := from.post(seq, from.maxMessage()); err != nil {
						return err
					}
					if err := to.expect(seq); err != nil {
						return err
					}
				}
				return nil
			}
		}
		together(t, exchange(a, b), exchange(b, a))
	}
}
