package session_test

import (
	"context"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// FuzzHostilePeer: whatever a peer sends, a session does not panic or hang, keeps to its endpoint's
// contract and to its memory budget, and ends when it is closed or aborted.
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

// TestHostilePeer runs the fuzz test on scripts from fixed seeds, for runs without fuzzing.
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

// script is a fuzzer's input, which is consumed byte by byte. Further bytes are zeros.
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

// number returns small numbers and numbers that overflow.
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
		s := script(input[:min(len(input), 1000)]) // longer ones only take more time
		ea, eb := twin.Pair(hostileConfig(t, &s))
		p := newRaw(t, eb)
		ss := session.New(ea, session.Config{ReceiveBudget: 100_000, CancelTimeout: time.Second, CloseTimeout: time.Second, KeepAlive: time.Minute, OnNote: func([]byte) {}})
		p.sendNegotiate(&s)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		ends := map[string]<-chan error{}
		if ss.Negotiate(ctx) == nil {
			ends["Read"] = until(func() error { _, err := ss.Read(make([]byte, 70_000)); return err })
			ends["Write"] = until(func() error { _, err := ss.Write(make([]byte, 50_000)); return err })
		}
		h := hostilePeer{raw: p, script: &s, exposed: make([]byte, 40_000)}
		h.act()
		if got := ea.Left().Allocated; got > 1<<20 {
			t.Errorf("the session holds %d bytes", got)
		}
		if s.byte()%2 == 0 {
			ss.Close()
		} else {
			ss.Abort()
		}
		ends["Close"] = until(func() error { <-ss.Closed(); return io.EOF })
		limit := time.After(time.Minute)
		for what, ended := range ends {
			select {
			case <-ended:
			case <-limit:
				t.Fatalf("%s hangs\n%s", what, stacks())
			}
		}
		if left := ea.Left(); left.Allocated != 0 || !ea.Retired() {
			t.Errorf("left behind: %+v, retired: %v", left, ea.Retired())
		}
		eb.Abort()
		idle()
	})
}

// hostileConfig is the kind of endpoint that the script selects, at times with faults.
func hostileConfig(t *testing.T, s *script) twin.Config {
	kinds := []twin.Config{ring, byRead, byBuffer, messages, buffered}
	cfg := kinds[int(s.byte())%len(kinds)]
	cfg.MaxLatency = latency
	cfg.AllocBudget = 1 << 20
	if s.byte()%4 == 0 {
		cfg.Faults = twin.Faults{Expose: 0.3, Local: 0.3, Alloc: 0.3, Busy: 0.2, Short: 0.3, Stray: 0.1}
	}
	cfg.Violated = func(v twin.Violation) {
		// Descriptors or credits that the peer has made up harm only the peer.
		if v.End == 0 && v.Kind == twin.Misuse {
			t.Errorf("%v", v)
		}
	}
	return cfg
}

// sendNegotiate sends a first message, which is correct in most scripts.
func (p *raw) sendNegotiate(s *script) {
	switch s.byte() % 8 {
	case 0:
		p.send(s.byte(), s.byte(), s.bytes(40)...)
	case 1:
		p.send(tNegotiate, 0, parameters(version, uint32(s.number()), uint32(s.number()), uint32(s.number()))...)
	default:
		credits := max(p.Limits().Window-session.ControlReserve, 0)
		p.send(tNegotiate, 0, parameters(version, uint32(credits), 4096, uint32(s.byte()))...)
	}
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

// hostilePeer is a peer that acts by a script.
type hostilePeer struct {
	*raw
	*script
	exposed []byte
	descs   []session.Descriptor // that it has made or received
	lastID  uint64
}

// act runs the script. Each action has a byte that selects an offer, a byte for its kind, and its
// arguments.
func (p *hostilePeer) act() {
	for len(*p.script) > 0 && p.Err() == nil {
		id := p.lastID
		if p.byte()%4 == 0 {
			id = p.number()
		}
		switch kind := p.byte() % 27; kind {
		case 17:
			if len(p.descs) > 0 && p.byte()%2 == 0 {
				p.Endpoint.Hold(twin.Hold(p.byte() % 8))
			}
		case 18:
			if p.byte()%16 == 0 {
				[]func(){p.Kill, p.Abort, func() { p.Close() }, p.Cut}[p.byte()%4]()
				return
			}
		default:
			p.actStream(kind)
			p.actOffer(kind, id)
			p.actInbox(kind)
		}
	}
}

// actStream runs actions on the stream and the connection.
func (p *hostilePeer) actStream(kind byte) {
	switch kind {
	case 0:
		p.send(p.byte(), p.byte(), p.bytes(int(p.byte()))...)
	case 1, 2:
		p.send(tData, p.byte(), make([]byte, p.byte())...)
	case 12:
		p.send(tUrgent, 0, p.bytes(int(p.byte()%70))...)
	case 13:
		p.send([]byte{tPing, tPong, tCloseAck, tShutdown, tClose, tAbort}[p.byte()%6], 0)
	case 14:
		p.dropped = uint32(p.number())
	case 15:
		nap(time.Duration(p.number() % uint64(time.Minute)))
	case 26:
		p.send(tNote, 0, u64(0, p.number())[:p.byte()%17]...)
	case 19:
		for range p.byte() {
			p.send(tData, 0, 1)
		}
	}
}

// actOffer runs actions on offers.
func (p *hostilePeer) actOffer(kind byte, id uint64) {
	switch kind {
	case 3, 4:
		p.lastID++
		p.send(tOfferRead, p.byte(), append(append(u64(p.lastID|p.number()<<32), p.desc()...), p.bytes(9)...)...)
	case 8:
		p.send(tReadDone, p.byte()%4/3, u64(id, p.number())...)
	case 10:
		p.send([]byte{tCancelRead, tNearDone}[p.byte()%4/3], 0, u64(id)...)
	case 16:
		p.useMemory()
	case 20:
		p.send(tRefuse, 0, u64(id)...)
	case 21: // an offer of memory that exists
		if p.Memory == nil {
			break
		}
		if x, err := p.Expose(p.exposed, session.RemoteRead); err == nil {
			p.lastID++
			p.send(tOfferRead, 0, u64(p.lastID, x.Addr, x.Key, x.Len)...)
		}
	}
}

// actInbox runs actions on inboxes.
func (p *hostilePeer) actInbox(kind byte) {
	switch kind {
	case 22:
		p.send([]byte{tAskInbox, tLeaveInbox}[p.byte()%4/3], 0)
	case 23:
		p.send(tFill, p.byte(), u64(p.number()%70_000)...)
	case 24:
		p.send(tInbox, 0, append(u64(0), p.desc()...)...)
	case 25:
		p.send(tEmptied, 0, u64(0, p.number()%100_000)...)
	}
}

// desc returns a descriptor: made up, seen before, or of memory that exists.
func (p *hostilePeer) desc() []byte {
	d := session.Descriptor{Addr: p.number(), Key: p.number(), Len: p.number()}
	switch p.byte() % 4 {
	case 0:
	case 1:
		if len(p.descs) > 0 {
			d = p.descs[int(p.byte())%len(p.descs)]
		}
	default:
		if p.Memory == nil {
			break
		}
		n := 1 + int(p.number()%uint64(len(p.exposed)))
		if x, err := p.Expose(p.exposed[:n], session.RemoteRead|session.RemoteWrite); err == nil {
			p.descs = append(p.descs, x)
			d = x
		}
	}
	return u64(d.Addr, d.Key, d.Len)
}

// useMemory accesses memory that the session has offered or opened.
func (p *hostilePeer) useMemory() {
	var ev session.Event
	for p.Poll(&ev) {
		if ev.Kind != session.Message {
			continue
		}
		m := ev.Msg
		if len(m) >= header+32 && (m[0] == tInbox || m[0] == tOfferRead) {
			d := descriptor(m[16:])
			p.descs = append(p.descs, d)
			p.lastID = uint64(le.Uint32(m[header:]))
			n := 1 + int(p.number()%20_000)
			if m[0] == tInbox && p.Limits().CanWrite {
				p.Write(make([]byte, n), d, int(p.number()>>1), 1)
			} else if m[0] == tOfferRead && p.Limits().CanRead {
				p.Read(make([]byte, n), d, int(p.number()>>1), 1)
			}
		}
		if m[0] != tCredit {
			p.dropped++
		}
		p.Drop()
	}
}
