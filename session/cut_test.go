package session_test

import (
	"bytes"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// Where every byte of a process that ended is there, its last message says whether its
// last Write was whole, whichever way that came and whoever took it.
func TestWhatTheLastMessageSays(t *testing.T) {
	const more = 1
	data := func(flags byte) func(*raw) {
		return func(p *raw) { p.send(tData, flags, pattern(100)...) }
	}
	for name, tt := range map[string]struct {
		say []func(*raw)
		end error
	}{
		"whole":                         {[]func(*raw){data(0)}, io.EOF},
		"cut":                           {[]func(*raw){data(0), data(more)}, syscall.ECONNRESET},
		"behind a part of it, the rest": {[]func(*raw){data(more), data(0)}, io.EOF},
	} {
		for who, reads := range map[string]bool{"a Read waits": true, "nobody reads": false} {
			t.Run(name+"/"+who, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, ring, session.Config{})
					end := make(chan error, 1)
					read := func() { _, err := io.ReadAll(readerOf(s)); end <- err }
					if reads {
						go read()
					}
					for _, say := range tt.say {
						pass(time.Second)
						say(p)
					}
					pass(time.Second)
					p.Kill()
					pass(time.Second)
					if !reads {
						go read()
					}
					if err := <-end; tt.end == io.EOF && err != nil {
						t.Errorf("the end: %v", err)
					} else if tt.end != io.EOF {
						wantErr(t, "the end", err, tt.end)
					}
				})
			})
		}
	}
}

// … and of slices that went in one message, with others to follow that found no room.
func TestDeathBehindPackedSlices(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := ring
		cfg.QueueBytes = 6 << 10 // has room for the first three
		a, b, ea, _ := pair(t, cfg, session.Config{})
		v := [][]byte{pattern(1000), pattern(1000), pattern(1000), pattern(100_000)}
		go a.WriteBuffers(v)
		pass(time.Second)
		ea.Kill()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "the end", err, syscall.ECONNRESET)
		if !bytes.Equal(got, bytes.Join(v[:3], nil)) {
			t.Errorf("%d bytes of 3000, or wrong ones", len(got))
		}
	})
}

// … and of an offer of which no more is read when the process has ended.
func TestDeathBehindAnOpenOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, byRead, session.Config{ReceiveBudget: 1})
		goWrite(a, pattern(1<<20))
		pass(time.Second)
		ea.Kill()
		pass(time.Second)
		_, err := io.ReadAll(readerOf(b))
		wantErr(t, "the end", err, syscall.ECONNRESET)
	})
}

// A peer whose endpoint ends in order, and its session without a word, has cut its stream.
func TestEndWithoutAWord(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, cfg, session.Config{})
				p.send(tData, 0, []byte("last")...)
				p.Close()
				got, err := io.ReadAll(readerOf(s))
				wantErr(t, "the end", err, syscall.ECONNRESET)
				if string(got) != "last" {
					t.Errorf("%q", got)
				}
			})
		})
	}
}

// Who has heard that the peer reads no more writes no more, at once, and does not wait
// with what he was writing either.
func TestWriteBehindTheEndOfThePeer(t *testing.T) {
	for name, end := range map[string]byte{"Close": tClose, "Abort": tAbort} {
		for form, tt := range map[string]struct {
			cfg     twin.Config
			disable session.Feature
			offer   byte // 0: none
		}{
			"messages": {messages, 0, 0}, "ring": {ring, 0, 0},
			"by read": {byRead, 0, tOfferRead}, "by write": {byWrite, session.FeatureRDMARead, tOfferWrite},
		} {
			t.Run(name+"/"+form, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, tt.cfg, session.Config{Disable: tt.disable})
					w := goWrite(s, pattern(1<<20))
					if tt.offer != 0 {
						p.expect(tt.offer)
					}
					pass(time.Second)
					began := time.Now()
					p.send(end, 0)
					if tt.offer == tOfferRead {
						p.send(tReadDone, 2, u64(1, 0)...) // as it has asked to be told
					}
					x := within(t, w)
					wantErr(t, "the Write that waits", x.err, syscall.EPIPE)
					if took := time.Since(began); took > time.Millisecond {
						t.Errorf("it waits for %v more", took)
					}
					_, err := s.Write([]byte("x"))
					wantErr(t, "the next", err, syscall.EPIPE)
				})
			})
		}
	}
}

// Urgent data that has come is there, though nobody has looked yet.
func TestUrgentThatHasJustCome(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{})
		p.send(tUrgent, 0, 'u')
		pass(2 * latency)
		b := make([]byte, 10)
		if n, err := s.ReadUrgent(b); n != 1 || b[0] != 'u' || err != nil {
			t.Errorf("ReadUrgent: %d, %v", n, err)
		}
	})
}

// Of what is held back for control, urgent data takes one message, until data has had
// room again.
func TestUrgentLeavesControlItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{})
		goWrite(s, pattern(4<<20))
		pass(time.Second)
		for range 3 {
			first := make(chan result, 1)
			go func() { n, err := s.WriteUrgent([]byte("1")); first <- result{n, err} }()
			second := make(chan result, 1)
			pass(time.Second)
			go func() { n, err := s.WriteUrgent([]byte("2")); second <- result{n, err} }()
			pass(time.Second)
			select {
			case x := <-first:
				if x.err != nil {
					t.Error(x.err)
				}
			default:
				t.Error("there is no room for urgent data")
			}
			select {
			case x := <-second:
				t.Errorf("it takes more of what is control's: %+v", x)
			default:
			}
			for m := p.recv(); m != nil; m = p.recv() { // all that it could send
			}
			p.send(tCredit, 0)
			within(t, second)
			pass(time.Second)
			for m := p.recv(); m != nil; m = p.recv() {
			}
			p.send(tCredit, 0) // so that data has room again
			pass(time.Second)
		}
	})
}

// Where a peer has used up nearly all of its credit, and none of it has been dealt with,
// there is nothing to be said, however often somebody looks.
func TestCreditThatSaysNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = 40
		s, _, p := negotiated(t, cfg, session.Config{})
		for range cfg.Limits.Window - session.ControlReserve - 1 { // Negotiate was one
			p.send(tData, 0, 'x')
		}
		for range 20 {
			pass(time.Second)
			s.ReadUrgent(nil)
		}
		said := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tCredit {
				said++
			}
		}
		if said > 1 {
			t.Errorf("it says so %d times", said)
		}
	})
}

// … and where it has dealt with something, the peer is told, though that is little: it
// could not even close otherwise.
func TestLastCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = 40
		s, _, p := negotiated(t, cfg, session.Config{})
		for range cfg.Limits.Window - session.ControlReserve - 2 {
			p.send(tData, 0, 'x')
		}
		pass(time.Second)
		for m := p.recv(); m != nil; m = p.recv() {
		}
		readFull(t, s, 1)
		p.expect(tCredit)
	})
}
