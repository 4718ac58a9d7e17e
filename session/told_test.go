package session_test

import (
	"errors"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// told has what each of a sequence of calls returns after the peer has ended as peer describes, measured
// with TCP of Linux 6.18, with some milliseconds between calls. w is a Write, 0 one of no bytes, r a
// Read, u a WriteUrgent, B a Write that is too large for a send buffer, b a WriteBuffers, l Reserve and
// Commit, S CloseWrite. There are two differences. After a reset that a call has returned, a Read on TCP
// returns EOF; on a session it returns the reset again: see streamEndLocked. CloseWrite after a reset
// returns the reset, and not ENOTCONN.
var told = []struct{ peer, calls, want string }{
	{"close", "w w r r", "nil EPIPE EOF EOF"},
	{"close", "0 w 0 w 0", "nil nil EPIPE EPIPE EPIPE"},
	{"close", "r w w r", "EOF nil EPIPE EOF"},
	{"close", "0 0 w r", "nil nil nil EOF"},
	{"close", "u u w", "nil EPIPE EPIPE"},
	{"close", "b b w", "nil EPIPE EPIPE"},
	{"close", "l l w", "nil EPIPE EPIPE"},
	{"close", "w l", "nil EPIPE"},
	{"close", "B w", "EPIPE EPIPE"},
	{"close", "S w 0 r", "nil closed closed EOF"},
	{"close data", "w w w r r", "nil EPIPE EPIPE data EOF"},
	{"close data", "r r w r w", "data EOF nil EOF EPIPE"},
	{"shut close", "r w w r", "EOF nil EPIPE EOF"},
	{"unread close", "w w 0 r", "RESET EPIPE EPIPE RESET"},
	{"unread close", "0 w 0", "RESET EPIPE EPIPE"},
	{"unread close", "r w 0", "RESET EPIPE EPIPE"},
	{"unread close", "u w", "RESET EPIPE"},
	{"unread close", "b w", "RESET EPIPE"},
	{"unread close", "l w", "RESET EPIPE"},
	{"unread close", "S w 0", "RESET RESET EPIPE"},
	{"unread close data", "w r r w", "RESET data RESET EPIPE"},
	{"closeunread", "w w r", "RESET EPIPE RESET"},
	{"shut unread close", "w r 0", "EPIPE EOF EPIPE"},
	{"shut unread close", "0 w", "EPIPE EPIPE"},
	{"reset", "w w 0 r", "RESET EPIPE EPIPE RESET"},
	{"reset", "0 0 w", "RESET EPIPE EPIPE"},
	{"reset", "r w", "RESET EPIPE"},
	{"reset", "S w w", "RESET RESET EPIPE"},
}

// The calls of a writer whose peer has ended return the same as on TCP.
func TestAWriterIsToldAsByTCP(t *testing.T) {
	for _, tt := range told {
		t.Run(tt.peer+"/"+tt.calls, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				a, b, _, _ := pair(t, cfg, session.Config{})
				ends(t, a, b, strings.Fields(tt.peer))
				pass(5 * time.Millisecond)
				var got []string
				for _, call := range strings.Fields(tt.calls) {
					got = append(got, calls(t, a, call))
					pass(5 * time.Millisecond)
				}
				if got := strings.Join(got, " "); got != tt.want {
					t.Errorf("%s, want %s", got, tt.want)
				}
			})
		})
	}
}

// ends makes b end as how describes. The end arrives at a, which does not poll.
func ends(t *testing.T, a, b *session.Session, how []string) {
	t.Helper()
	data := slices.Contains(how, "data")
	for _, what := range how {
		switch what {
		case "unread":
			writeAll(t, a, pattern(6), 6)
			pass(time.Millisecond)
		case "shut":
			b.CloseWrite()
		case "reset":
			b.Abort()
		case "close", "closeunread":
			if data {
				writeAll(t, b, []byte("data"), 4)
			}
			if what == "close" {
				go b.Close()
			} else {
				go b.CloseUnread()
			}
		}
	}
}

// calls makes one call, and returns its result as text.
func calls(t *testing.T, s *session.Session, what string) string {
	p, n := pattern(10), 10
	var err error
	switch what {
	case "0":
		n, err = s.Write(nil)
	case "w":
		n, err = s.Write(p)
	case "B":
		n, err = s.Write(make([]byte, 16<<20))
	case "u":
		n, err = s.WriteUrgent(p)
	case "b":
		k := int64(0)
		k, err = s.WriteBuffers([][]byte{p[:3], nil, p[3:]})
		n = int(k)
	case "l":
		var room []byte
		if room, err = s.Reserve(10); err == nil {
			n, err = len(room), s.Commit(len(room))
		}
	case "S":
		err = s.CloseWrite()
	case "r":
		if n, err = s.Read(p); n > 0 {
			return string(p[:n])
		}
	}
	switch {
	case err == nil:
		if (n == 10) != (what != "0") {
			t.Errorf("%s took %d bytes", what, n)
		}
		return "nil"
	case err == io.EOF:
		return "EOF"
	case errors.Is(err, session.ErrClosed):
		return "closed" // EPIPE on TCP
	case errors.Is(err, syscall.EPIPE):
		return "EPIPE"
	case errors.Is(err, syscall.ECONNRESET):
		return "RESET"
	}
	return err.Error()
}

// A Write that waits when the peer closes fails, with a reset if the peer left bytes unread.
func TestAWriteThatWaitsIsToldAsByTCP(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for end, want := range map[byte]error{tAbort: syscall.ECONNRESET, tClose: syscall.EPIPE} {
			s, _, p := negotiated(t, cfg, session.Config{SendBudget: 1})
			w := goWrite(s, pattern(8<<20))
			pass(time.Second)
			p.send(end, 0)
			r := within(t, w)
			wantErr(t, "the Write that waits", r.err, want)
			_, err := s.Write(nil)
			wantErr(t, "the next", err, syscall.EPIPE)
			if sent := s.Stats().BytesSent; sent != uint64(r.n) {
				t.Errorf("it took %d bytes, the position is %d", r.n, sent)
			}
		}
	})
}

// A Write whose bytes cross the peer's Close succeeds; only the next one fails, as on TCP.
func TestAWriteThatCrossesTheClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		go b.Close()
		writeAll(t, a, []byte("HELO"), 4)
		pass(time.Second)
		_, err := a.Write([]byte("HELO"))
		wantErr(t, "the second Write", err, syscall.EPIPE)
	})
}

// Bytes that wait in the send buffer when the peer's Close comes count as having crossed it.
func TestWhatIsInTheSendBufferCrossesTheClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		p.open(s, 10_000)
		writeAll(t, s, pattern(20_000), 20_000)
		for m := p.recv(); m != nil; m = p.recv() {
		}
		p.send(tClose, 0) // with credit for everything that was sent
		pass(time.Second)
		_, err := s.Write([]byte("x"))
		wantErr(t, "Write", err, syscall.EPIPE)
	})
}

// A Write that finds that the endpoint has ended first handles what the peer sent before that.
func TestAWriteLooksWhyTheEndpointHasEnded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &secondErr{}
		s, _, p := negotiatedOn(t, ring, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		w := goWrite(s, pattern(4<<20))
		pass(time.Second)
		act := func() { // between its poll for messages and its look at the endpoint
			p.send(tAbort, 0)
			p.Close()
			nap(2 * latency)
		}
		e.act.Store(&act)
		p.send(tPing, 0) // makes the Write look
		wantErr(t, "Write", within(t, w).err, syscall.ECONNRESET)
	})
}
