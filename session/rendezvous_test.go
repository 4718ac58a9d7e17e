package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D4, D5: small Writes go in messages, and large ones by rendezvous.
func TestLargeWritesAreOffered(t *testing.T) {
	roomy := twin.Config{Limits: withLimits(byRead, func(l *session.Limits) { l.MaxMessage = 64 << 10 })}
	for _, tt := range []struct {
		size, threshold int
		offers          uint64
	}{
		{16<<10 - 1, 0, 0}, {16 << 10, 0, 1}, {1 << 20, 0, 1}, {1 << 20, -1, 0}, {1 << 20, 2 << 20, 0}, {5000, 4000, 1},
	} {
		t.Run(fmt.Sprintf("%d of %d", tt.size, tt.threshold), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, roomy, session.Config{Threshold: tt.threshold})
				data := pattern(tt.size)
				w := goWrite(a, data)
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != len(data) || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
				sa, sb := a.Stats(), b.Stats()
				if sa.OffersSent != tt.offers || sb.OffersReceived != tt.offers {
					t.Errorf("%d offers sent, %d received, want %d", sa.OffersSent, sb.OffersReceived, tt.offers)
				}
				if sa.BytesSent != uint64(tt.size) || sb.BytesReceived != uint64(tt.size) || sa.OfferedBytesSent != sb.OfferedBytesReceived {
					t.Errorf("counted %+v and %+v", sa, sb)
				}
			})
		})
	}
}

// D6, D7: the abilities of both ends decide the form. If neither is possible, or the operator has
// disabled them, nothing is offered.
func TestBothEndsDecideTheForm(t *testing.T) {
	for name, tt := range map[string]struct {
		a, b    session.Limits
		disable session.Feature
		offered bool
	}{
		"reader reads":                  {byRead.Limits, byRead.Limits, 0, true},
		"only the other end can read":   {withLimits(byRead, func(l *session.Limits) { l.CanRead = false }), byRead.Limits, 0, true},
		"only this end can read":        {byRead.Limits, withLimits(byRead, func(l *session.Limits) { l.CanRead = false }), 0, false},
		"neither reads":                 {byBuffer.Limits, byBuffer.Limits, 0, false},
		"nothing to offer":              {withLimits(byRead, func(l *session.Limits) { l.MaxExpose = 0 }), byRead.Limits, 0, false},
		"reading switched off":          {byRead.Limits, byRead.Limits, session.FeatureRDMARead, false},
		"messages of different lengths": {byRead.Limits, withLimits(byRead, func(l *session.Limits) { l.MaxMessage = 300 }), 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, twin.Config{Limits: tt.a, PeerLimits: &tt.b}, session.Config{Disable: tt.disable})
				data := pattern(300_000)
				w := goWrite(a, data)
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != len(data) || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
				if got := a.Stats().OffersSent > 0; got != tt.offered {
					t.Errorf("offered: %v, want %v", got, tt.offered)
				}
			})
		})
	}
}

func withLimits(c twin.Config, f func(*session.Limits)) session.Limits {
	l := c.Limits
	f(&l)
	return l
}

// D9: what cannot be registered is sent in another way.
func TestMemoryThatCannotBeRegisteredIsSentOtherwise(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    twin.Config
		faults twin.Faults
		writes uint64 // Writes that are counted, of one
		reads  bool   // Reads are counted
	}{
		"offered":            {byRead, twin.Faults{Expose: 1}, 1, false},
		"read into":          {byRead, twin.Faults{Local: 1, Alloc: 1}, 0, true},
		"only chunks can be": {byRead, twin.Faults{Local: 1}, 0, true},
		"neither":            {byRead, twin.Faults{}, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				cfg := tt.cfg
				cfg.Faults = tt.faults
				a, b, _, _ := pair(t, cfg, session.Config{})
				data := pattern(100_000)
				w := goWrite(a, data)
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != len(data) || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
				if n, m := a.Stats().Unregistered, b.Stats().Unregistered; n != tt.writes || m > 0 != tt.reads {
					t.Errorf("counted %d Writes, and Reads %d times", n, m)
				}
				if tt.reads {
					lineup(t, b.Debug(), "Reads copied as their memory could not be registered: ")
				}
			})
		})
	}
}

// A Write whose memory is known not to be registrable is counted too: it goes another way without an
// attempt. One whose connection has ended is not counted.
func TestMemoryThatIsNeverRegisteredIsCounted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiatedOn(t, buffered, session.Config{KeepAlive: -1}, withMemory(func(m session.Memory) session.Memory {
			return unregistrable{m}
		}))
		in := p.open(s, 1<<20)
		data := pattern(100_000)
		writeAll(t, s, data, len(data))
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if st := s.Stats(); st.Unregistered != 1 || st.OffersSent != 0 {
			t.Errorf("counted %d Writes, %d offers", st.Unregistered, st.OffersSent)
		}
		lineup(t, s.Debug(), "Writes copied as their memory could not be registered: 1")
	})
	inBubble(t, func(t *testing.T) {
		a, _, _, eb := pair(t, byRead, session.Config{KeepAlive: -1})
		eb.Kill()
		pass(time.Second)
		if _, err := a.Write(pattern(100_000)); err == nil {
			t.Error("a Write has succeeded")
		}
		if n := a.Stats().Unregistered; n != 0 {
			t.Errorf("counted %d Writes", n)
		}
	})
}

// RDMA reads go into a Read's slice if that pays, which is decided for each Read of an offer (here one for
// each Write) until one does not pay, and otherwise into chunks, from which the Read copies. A threshold in the Config decides alone.
func TestAReadsSliceIsReadIntoWhereThatPays(t *testing.T) {
	const size, writes = 300_000, 3
	for _, tt := range []struct {
		pays      bool
		unknown   error
		threshold int
		direct    bool
	}{
		{pays: true, direct: true},
		{pays: false},
		{unknown: errors.New("memory of unknown kind")},
		{pays: false, threshold: 64 << 10, direct: true},
	} {
		t.Run(fmt.Sprint(tt.pays, " ", tt.unknown, " ", tt.threshold), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				mem := &filled{pays: tt.pays, err: tt.unknown}
				a, b, _, _ := pairOn(t, byRead, session.Config{Threshold: tt.threshold}, withMemory(func(m session.Memory) session.Memory {
					mem.Memory = m
					return mem
				}))
				data := pattern(size)
				for range writes {
					written := make(chan result, 1)
					go func() {
						pass(time.Second) // b's Read waits
						written <- within(t, goWrite(a, data))
					}()
					if got := readFull(t, b, size); !bytes.Equal(got, data) {
						t.Fatal("wrong bytes")
					}
					if r := within(t, written); r.n != size || r.err != nil {
						t.Fatalf("Write: %+v", r)
					}
				}
				st := b.Stats()
				if st.OffersReceived != writes || st.DirectBytesReceived > 0 != tt.direct || st.DirectBytesReceived == st.OfferedBytesReceived != tt.direct {
					t.Errorf("%d offers; %d bytes of %d to the Reads' slices", st.OffersReceived, st.DirectBytesReceived, st.OfferedBytesReceived)
				}
				looks, unregistered := writes, 0
				if tt.threshold > 0 {
					looks = 0
				}
				if tt.unknown != nil {
					unregistered = writes
				}
				if mem.looks != looks || st.Unregistered != uint64(unregistered) {
					t.Errorf("looked %d times, %d counted as unregistered", mem.looks, st.Unregistered)
				}
			})
		})
	}
}

// filled is memory for which the test decides whether it pays to be read into.
type filled struct {
	session.Memory
	pays  bool
	err   error
	looks int // only the reader's goroutine uses it
}

func (f *filled) PaysToFill([]byte) (bool, error) {
	f.looks++
	return f.pays, f.err
}

// unregistrable is memory that is never registered, because it may change its pages unnoticed.
type unregistrable struct{ session.Memory }

func (unregistrable) PaysToOffer([]byte) (bool, error) {
	return false, errors.New("memory of unknown kind")
}

// An offer that the peer refuses ends short. The rest goes as payload, in order.
func TestARefusedOfferEndsShort(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1})
		data := pattern(20_000)
		w := goWrite(s, data)
		b := p.expect(tOfferRead)
		id, first := uint64(le.Uint32(b)), bytes.Clone(b[32:])
		p.send(tRefuse, 0, u64(id)...)
		if b := p.expect(tCancelRead); uint64(le.Uint32(b)) != id {
			t.Fatalf("it takes %d back instead of %d", le.Uint32(b), id)
		}
		behind := goWrite(s, []byte("behind")) // no message of it may come before the reply
		if m := p.recv(); m != nil && m[0] != tCredit {
			t.Fatalf("a message of type %d", m[0])
		}
		p.send(tReadDone, 0, u64(id, 5000)...)
		rest := data[len(first)+5000:]
		if got := p.data(len(rest) + 6); !bytes.Equal(got, append(bytes.Clone(rest), "behind"...)) {
			t.Error("wrong bytes")
		}
		for _, r := range []result{within(t, w), within(t, behind)} {
			if r.err != nil {
				t.Errorf("Write: %+v", r)
			}
		}
	})
}

// An offer is cancelled once, however often the waiting Write polls.
func TestAnOfferIsCancelledOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{})
		w := goWrite(s, pattern(50_000))
		id := uint64(le.Uint32(p.expect(tOfferRead)))
		s.InterruptWrite(true)
		p.expect(tCancelRead)
		for range 5 {
			p.send(tUrgent, 0, 'u')
			pass(time.Millisecond)
		}
		p.send(tReadDone, 0, u64(id, 0)...)
		wantErr(t, "Write", within(t, w).err, session.ErrInterrupted)
		if m := p.recv(); m != nil {
			t.Errorf("a message of type %d", m[0])
		}
	})
}

// An offer follows what the send buffer could not send yet.
func TestAnOfferStaysBehindTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 10_000)
		writeAll(t, s, pattern(20_000), 20_000)
		goWrite(s, pattern(100_000))
		in.read(10_000)
		if m := p.recv(); m != nil {
			t.Fatalf("a message of type %d before the sendBuffer is empty", m[0])
		}
		in.emptied()
		in.read(10_000)
		p.expect(tOfferRead)
	})
}

// However a Write ends, the peer has no access to its memory any more when it returns.
func TestAWriteRevokesItsMemory(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, byRead, session.Config{})
		for _, read := range []uint64{19_000, 500} { // all but what is in the offer's message, and a part
			w := goWrite(s, pattern(19_000+offeredInline))
			id := uint64(le.Uint32(p.expect(tOfferRead)))
			if got := e.Left().Exposed; got != 1 {
				t.Fatalf("%d pieces of memory are exposed", got)
			}
			if read < 19_000 {
				pass(time.Millisecond)
				s.InterruptWrite(true)
				p.expect(tCancelRead)
			}
			p.send(tReadDone, 0, u64(id, read)...)
			if x := within(t, w); x.n != int(read)+offeredInline {
				t.Errorf("Write: %+v", x)
			}
			if got := e.Left().Exposed; got != 0 {
				t.Errorf("%d pieces of memory are exposed behind a Write", got)
			}
		}
	})
}

// An offer that ends because the peer reads no more is a reset, without a further message of the peer.
func TestAnOfferThatNobodyReadsIsAReset(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{})
		w := goWrite(s, pattern(100_000))
		m := p.expect(tOfferRead)
		p.send(tReadDone, 2, u64(uint64(le.Uint32(m[header:])), 0)...)
		wantErr(t, "Write", within(t, w).err, syscall.ECONNRESET)
	})
}
