package session_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// FuzzHostilePeer: whatever a peer says, a session does not panic, does not
// hang, keeps to its endpoint's contract and to its memory, and ends when it
// is told to.
func FuzzHostilePeer(f *testing.F) {
	for seed := range uint64(30) {
		script := make([]byte, 20+10*seed)
		r := rand.NewPCG(seed, 7)
		for i := range script {
			script[i] = byte(r.Uint64())
		}
		f.Add(script)
	}
	f.Fuzz(hostile)
}

// TestHostilePeer is the fuzz test on scripts of a seed, for those who have no
// time for fuzzing.
func TestHostilePeer(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 8))
		script := make([]byte, 1+r.IntN(400))
		for i := range script {
			script[i] = byte(r.Uint32())
		}
		if hostile(t, script); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// script hands out a fuzzer's bytes; zeros when there are none left.
type script []byte

func (s *script) byte() (b byte) {
	if len(*s) > 0 {
		b, *s = (*s)[0], (*s)[1:]
	}
	return b
}

func (s *script) bytes(n int) []byte {
	n = min(n, len(*s))
	b := (*s)[:n]
	*s = (*s)[n:]
	return b
}

// number is at times small, at times what overflows.
func (s *script) number() uint64 {
	b := s.byte()
	switch b % 8 {
	case 0:
		return 0
	case 1, 2, 3:
		return uint64(s.byte())
	case 4:
		return uint64(s.byte())<<8 | uint64(s.byte())
	case 5:
		return 1 << (s.byte() % 64)
	case 6:
		return ^uint64(0) - uint64(s.byte())
	}
	return ^uint64(0) >> (s.byte() % 64)
}

func hostile(t *testing.T, input []byte) {
	bubble(t, "the script above", func(t *testing.T) {
		s := script(input[:min(len(input), 1000)]) // longer ones only take longer
		kinds := []twin.Config{ring, byRead, byWrite, messages, boxed}
		cfg := kinds[int(s.byte())%len(kinds)]
		cfg.MaxLatency = latency
		cfg.AllocBudget = 1 << 20
		if s.byte()%4 == 0 {
			cfg.Faults = twin.Faults{Expose: 0.3, Local: 0.3, Alloc: 0.3, Busy: 0.2, Short: 0.3, Stray: 0.1}
		}
		cfg.Violated = func(v twin.Violation) {
			// A descriptor or a credit that the peer made up is its own loss.
			if v.End == 0 && v.Kind == twin.Misuse {
				t.Errorf("%v", v)
			}
		}
		ea, eb := twin.Pair(cfg)
		p := newRaw(t, eb)
		ss := session.New(ea, session.Config{ReceiveBudget: 100_000, CancelTimeout: time.Second, CloseTimeout: time.Second, KeepAlive: time.Minute})

		var readers [2]<-chan error
		switch s.byte() % 8 {
		case 0: // garbage first
			p.send(s.byte(), s.byte(), s.bytes(40)...)
		case 1:
			p.send(tNegotiate, 0, parameters(1, uint32(s.number()), uint32(s.number()), uint32(s.number()))...)
		default:
			credits := uint32(0)
			if w := cfg.Limits.Window; w > 0 {
				credits = uint32(w - session.ControlReserve)
			}
			p.send(tNegotiate, 0, parameters(1, credits, 4096, uint32(s.byte()))...)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if ss.Negotiate(ctx) == nil {
			readers = [2]<-chan error{
				until(func() error { _, err := ss.Read(make([]byte, 70_000)); return err }),
				until(func() error { _, err := ss.Write(make([]byte, 50_000)); return err }),
			}
		}
		p.say(&s)
		if got := ea.Left().Allocated; got > 1<<20 {
			t.Errorf("the session holds %d bytes", got)
		}
		if s.byte()%2 == 0 {
			ss.Close()
		} else {
			ss.Abort()
		}
		limit := time.After(time.Minute)
		wait := func(what string, c <-chan error) {
			if c == nil {
				return
			}
			select {
			case <-c:
			case <-limit:
				t.Fatalf("%s hangs\n%s", what, stacks())
			}
		}
		wait("Read", readers[0])
		wait("Write", readers[1])
		select {
		case <-ss.Closed():
		case <-limit:
			t.Fatalf("Close hangs\n%s", stacks())
		}
		if left := ea.Left(); left.Allocated != 0 || !ea.Retired() {
			t.Errorf("left behind: %+v, retired: %v", left, ea.Retired())
		}
		eb.Abort()
		idle()
	})
}

// until calls f until it fails.
func until(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() {
		for {
			if err := f(); err != nil {
				c <- err
				return
			}
		}
	}()
	return c
}

// say does what the script says.
func (p *raw) say(s *script) {
	exposed := make([]byte, 40_000)
	var descs []session.Descriptor
	lastID := uint64(0)
	for len(*s) > 0 && p.Err() == nil {
		id := lastID
		if s.byte()%4 == 0 {
			id = s.number()
		}
		desc := func() []byte {
			d := session.Descriptor{Addr: s.number(), Key: s.number(), Len: s.number()}
			switch s.byte() % 4 {
			case 0:
			case 1:
				if len(descs) > 0 {
					d = descs[int(s.byte())%len(descs)]
				}
			default:
				if p.Memory == nil {
					break
				}
				n := 1 + int(s.number()%uint64(len(exposed)))
				if x, err := p.Expose(exposed[:n], session.RemoteRead|session.RemoteWrite); err == nil {
					descs = append(descs, x)
					d = x
				}
			}
			return u64(d.Addr, d.Key, d.Len)
		}
		switch s.byte() % 26 {
		case 0:
			p.send(s.byte(), s.byte(), s.bytes(int(s.byte()))...)
		case 1, 2:
			p.send(tData, s.byte(), make([]byte, s.byte())...)
		case 3, 4:
			lastID++
			p.send(tOfferRead, s.byte(), append(append(u64(lastID|s.number()<<32), desc()...), s.bytes(9)...)...)
		case 5, 6:
			lastID++
			p.send(tOfferWrite, s.byte(), append(u64(lastID, s.number()), s.bytes(9)...)...)
		case 7:
			p.send(tGrant, s.byte()%2, append(u64(id), desc()...)...)
		case 8:
			p.send(tReadDone, s.byte()%4/3, u64(id, s.number())...)
		case 9:
			p.send(tWriteDone, s.byte(), u64(id, s.number())...)
		case 10:
			p.send(tCancelRead, 0, u64(id)...)
		case 11:
			p.send(tCancelWrite, 0, u64(id)...)
		case 12:
			p.send(tUrgent, 0, s.bytes(int(s.byte()%70))...)
		case 13:
			p.send([]byte{tPing, tPong, tCloseAck, tShutdown, tClose, tAbort}[s.byte()%6], 0)
		case 14:
			p.dropped = uint32(s.number())
		case 15:
			nap(time.Duration(s.number() % uint64(time.Minute)))
		case 16: // the grant or the offer that the session has made
			var ev session.Event
			for p.Poll(&ev) {
				if ev.Kind != session.Message {
					continue
				}
				m := ev.Msg
				if len(m) >= header+32 && (m[0] == tGrant || m[0] == tInbox || m[0] == tOfferRead) {
					d := session.Descriptor{Addr: le.Uint64(m[16:]), Key: le.Uint64(m[24:]), Len: le.Uint64(m[32:])}
					descs = append(descs, d)
					lastID = uint64(le.Uint32(m[header:]))
					n := 1 + int(s.number()%20_000)
					if m[0] != tOfferRead && p.Limits().CanWrite {
						p.Write(make([]byte, n), d, int(s.number()>>1), 1)
					} else if m[0] == tOfferRead && p.Limits().CanRead {
						p.Read(make([]byte, n), d, int(s.number()>>1), 1)
					}
				}
				if m[0] != tCredit {
					p.dropped++
				}
				p.Drop()
			}
		case 17:
			if len(descs) > 0 && s.byte()%2 == 0 {
				p.Endpoint.Hold(twin.Hold(s.byte() % 8))
			}
		case 18:
			if s.byte()%16 == 0 {
				[]func(){p.Kill, p.Abort, func() { p.Close() }, p.Cut}[s.byte()%4]()
				return
			}
		case 20:
			p.send(tRefuse, 0, u64(id)...)
		case 22:
			p.send([]byte{tAskInbox, tLeaveInbox}[s.byte()%4/3], 0)
		case 23:
			p.send(tFill, s.byte(), u64(s.number()%70_000)...)
		case 24:
			p.send(tInbox, 0, append(u64(0), desc()...)...)
		case 25:
			p.send(tEmptied, 0, u64(0, s.number()%100_000)...)
		case 21: // an offer that it can read
			if p.Memory == nil {
				break
			}
			if x, err := p.Expose(exposed, session.RemoteRead); err == nil {
				lastID++
				p.send(tOfferRead, 0, u64(lastID, x.Addr, x.Key, x.Len)...)
			}
		case 19:
			for range s.byte() {
				p.send(tData, 0, 1)
			}
		}
	}
}
