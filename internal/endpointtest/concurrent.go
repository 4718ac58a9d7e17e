package endpointtest

import (
	"runtime"
	"testing"

	"github.com/sanconn/san/session"
)

// testAllAtOnce calls all groups of methods at the same time, and then ends both ends at the same time.
func testAllAtOnce(t *testing.T, mk Maker) {
	const count = 400
	for round := range 5 {
		a, b := pair(t, mk)
		var calls []func() error
		for _, e := range []*end{a, b} {
			calls = append(calls,
				func() error { return e.postBothKinds(count) },
				func() error { return e.expectAll(count) },
				func() error { return e.useMemory(100) },
				func() error { return e.lookOn(count) })
		}
		together(t, calls...)
		// Both ends end at the same time, one of them in any of the ways.
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

// postBothKinds posts messages, every fifth as control.
func (e *end) postBothKinds(count int) error {
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

// useMemory calls the methods of Memory, if the endpoint has it.
func (e *end) useMemory(count int) error {
	if e.mem == nil {
		return nil
	}
	buf := make([]byte, 8192)
	for range count {
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

// lookOn calls the methods that may be called at any time.
func (e *end) lookOn(count int) error {
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
