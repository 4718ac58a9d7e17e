package session_test

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// Close behind CloseWrite still says that nothing is read any more.
func TestCloseBehindCloseWrite(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, cfg, session.Config{})
				if err := s.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				p.expect(tShutdown)
				go s.Close()
				p.expect(tClose)
			})
		})
	}
}

// A session that is closed ends with its peer, and does not wait for CloseTimeout.
func TestCloseEndsWithThePeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, messages, session.Config{CloseTimeout: time.Hour})
		s.Close() // the peer does not answer
		if e.Closed() {
			t.Fatal("it did not wait")
		}
		p.Kill()
		select {
		case <-s.Closed():
		case <-time.After(time.Second):
			t.Error("it waits for a peer that has died")
		}
	})
}

// A session is closed when those who work for it are through.
func TestClosedBehindItsWorkers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		began := make(chan struct{}, 10)
		s, _, p := negotiatedOn(t, boxed, session.Config{}, withMemory(func(m session.Memory) session.Memory {
			return slowRevoke{m, began}
		}))
		p.ask()
		p.send(tLeaveInbox, 0)
		<-began
		at := time.Now()
		s.Abort()
		<-s.Closed()
		if took := time.Since(at); took < time.Second {
			t.Errorf("closed after %v, while its inbox is revoked", took)
		}
	})
}

// An interrupted direction writes nothing, several small slices neither.
func TestInterruptedWriteBuffers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		a.InterruptWrite(true)
		n, err := a.WriteBuffers([][]byte{[]byte("one"), []byte("two")})
		wantErr(t, "WriteBuffers", err, session.ErrInterrupted)
		pass(time.Second)
		if n != 0 || b.Stats().MessagesReceived != 1 { // Negotiate
			t.Errorf("%d bytes were taken", n)
		}
	})
}

// CloseWrite says that the peer has reset the connection, or that it has died, and not
// that it has closed.
func TestCloseWriteBehindThePeersEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(p *raw)
		want error
	}{
		"closed":  {func(p *raw) { p.send(tClose, 0); p.recv(); p.Close() }, nil},
		"reset":   {func(p *raw) { p.send(tAbort, 0) }, syscall.ECONNRESET},
		"aborted": {func(p *raw) { p.Abort() }, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			for form, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, cfg, session.Config{})
					tt.end(p)
					pass(time.Second)
					if err := s.CloseWrite(); !errors.Is(err, tt.want) {
						t.Errorf("%s: %v instead of %v", form, err, tt.want)
					}
				})
			}
		})
	}
}

// A session that has given its endpoint back calls nothing of it any more, whatever is
// called.
func TestCallsBehindClosed(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for name, end := range map[string]func(*session.Session){
			"Close": func(s *session.Session) { s.Close() },
			"Abort": (*session.Session).Abort,
		} {
			a, b, _, _ := pair(t, cfg, session.Config{})
			writeAll(t, a, []byte("x"), 1)
			readFull(t, b, 1)
			end(a)
			b.Close()
			<-a.Closed()
			p := make([]byte, 10)
			for what, call := range map[string]func() error{
				"Read":         func() error { _, err := a.Read(p); return err },
				"Write":        func() error { _, err := a.Write(p); return err },
				"WriteBuffers": func() error { _, err := a.WriteBuffers([][]byte{p, p}); return err },
				"WriteUrgent":  func() error { _, err := a.WriteUrgent(p); return err },
				"CloseRead":    a.CloseRead,
				"CloseWrite":   a.CloseWrite,
				"Close":        a.Close,
			} {
				wantErr(t, what+" behind "+name, call(), session.ErrClosed)
			}
			_, err := a.ReadUrgent(p)
			wantErr(t, "ReadUrgent", err, session.ErrNoUrgent)
			a.SetKeepAlivePeriod(time.Second)
			a.SetKeepAlive(true)
			a.InterruptRead(true)
			a.InterruptWrite(true)
			a.Abort()
			pass(time.Minute)
		}
	})
}
