package endpointtest

import (
	"runtime"
	"testing"

	"github.com/sanconn/san/session"
)

// All groups of methods at the same time, and an end in the middle of it.
func testAllAtOnce(t *testing.T, mk Maker) {
	for round := range 5 {
		a, b := pair(t, mk)
		const count = 400
		sender := func(e *end) func() error {
			return func() error {
				for seq := range uint64(count) {
					post := e.post
					if seq%5 == 0 {
						post = e.postControl
					}
					if err := post(seq, minMessage+int(seq)%200); err != nil {
						return err
					}
				}
				return nil
			}
		}
		receiver := func(e *end) func() error {
			return func() error {
				for seq := range uint64(count) {
					if err := e.expect(seq); err != nil {
						return err
					}
				}
				return nil
			}
		}
		memory := func(e *end) func() error {
			return func() error {
				if e.mem == nil {
					return nil
				}
				buf := make([]byte, 8192)
				for range 100 {
					if e.lim.MaxExpose > 0 {
						d, err := e.mem.Expose(buf, session.RemoteRead)
						if err != nil {
							return err
						}
						e.mem.Revoke(d)
					}
					if p := e.mem.Alloc(4096); p != nil {
						fill(p, 1)
						e.mem.Free(p)
					}
				}
				return nil
			}
		}
		bystander := func(e *end) func() error {
			return func() error {
				for range count {
					if err := e.Err(); err != nil {
						return err
					}
					e.Arm(session.RecvReady)
					e.Limits()
					runtime.Gosched()
				}
				return nil
			}
		}
		together(t, sender(a), sender(b), receiver(a), receiver(b), memory(a), memory(b), bystander(a), bystander(b))
		// Both ends at once, one of them in whichever way.
		together(t,
			func() error { return a.Close() },
			func() error {
				if round%2 == 0 {
					return b.Close()
				}
				b.Abort()
				return nil
			})
	}
}
