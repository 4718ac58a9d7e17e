package session_test

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/trace"
	"github.com/sanconn/san/session"
)

// lineup fails the test unless the text has lines with these parts, in this order.
func lineup(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, part := range parts {
		_, after, ok := strings.Cut(rest, part)
		if !ok {
			t.Fatalf("no %q behind those before it:\n%s", part, text)
		}
		rest = after
	}
}

// A trace has each step of an offered Write, at both ends, with its place in the stream.
func TestTraceHasEachStep(t *testing.T) {
	var logs [2]bytes.Buffer
	ea, eb := twins(t, byRead)
	var ends [2]*session.Session
	var traces [2]*trace.Log
	for i, ep := range []session.Endpoint{ea, eb} {
		traces[i] = trace.New(&logs[i])
		ends[i] = session.New(ep, session.Config{KeepAlive: -1, Trace: traces[i]})
	}
	for _, s := range ends {
		if err := s.Negotiate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := ends[0].Write([]byte("small"))
		if err == nil {
			_, err = ends[0].Write(make([]byte, 50_000))
		}
		wrote <- err
	}()
	if _, err := io.ReadFull(readerFunc(ends[1].Read), make([]byte, 50_005)); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	for i, s := range ends {
		s.Abort()
		<-s.Closed()
		traces[i].Flush(time.Minute)
	}
	rest := fmt.Sprintf("stream=%d+%d\n", 5+1024, 50_000-1024)
	lineup(t, logs[0].String(), "- begins provider=", "> Negotiate ", "< Negotiate ", "> Data len=13 ", "stream=0+5\n",
		"- expose memory=48976 key=", "rights=read\n", "> OfferRead ", "memory=48976", "stream=5+1024\n",
		"< ReadDone ", "count=48976 "+rest, "- revoke memory=48976", "- revoked ", "- abort\n")
	lineup(t, logs[1].String(), "< Data len=13 ", "stream=0+5\n", "< OfferRead ", "stream=5+1024\n",
		"- read id=", "- read done id=", "> ReadDone ", "count=48976 "+rest)
}

// readerFunc is a function as an io.Reader.
type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Debug describes what waits, and Dump lists each session until it is closed.
func TestDebugSaysWhatWaits(t *testing.T) {
	a, b, _, _ := pair(t, messages, session.Config{})
	read := make(chan error, 1)
	go func() {
		_, err := a.Read(make([]byte, 1))
		read <- err
	}()
	testenv.Eventually(t, time.Minute, func() error {
		if text := a.Debug(); !strings.Contains(text, "  read    waits for messages, for ") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	lineup(t, a.Debug(), " by twin, for ", "  read    waits", "  write   idle", "  send    0 bytes in ", "  receive 0 bytes in ")
	a.Name(nil, nil, func() string { return "it is a\n" })
	var dump bytes.Buffer
	if err := session.Dump(&dump); err != nil {
		t.Fatal(err)
	}
	lineup(t, dump.String(), "it is a\nsession ", "  read    waits", "\nsession ")
	if _, err := b.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if text := a.Debug(); !strings.Contains(text, "  read    idle\n") {
		t.Error(text)
	}
	a.Abort()
	<-a.Closed()
	lineup(t, a.Debug(), "  read    idle; closed", "  endpoint retired")
	testenv.Eventually(t, time.Minute, func() error {
		dump.Reset()
		if session.Dump(&dump); strings.Contains(dump.String(), "it is a") {
			return fmt.Errorf("%s", dump.String())
		}
		return nil
	})
}

// Debug does not wait for an operation that is stuck with a lock, and describes the rest.
func TestDebugDoesNotWait(t *testing.T) {
	a, _, _, _ := pair(t, messages, session.Config{})
	release := a.HoldReceiver()
	text := a.Debug()
	release()
	lineup(t, text, "  send    0 bytes", "  receive busy: its lock is held")
	lineup(t, a.Debug(), "  receive 0 bytes")
}

// Debug shows an offer of this end in each of its states, and that data waits.
func TestDebugHasAnOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{})
		w := goWrite(s, pattern(50_000))
		d := p.expect(tOfferRead)
		pass(time.Second)
		lineup(t, s.Debug(), "  write   waits for messages or room, for ", "  send    0 bytes in 2 messages, credit for 22 more\n",
			"  offer   1 of this end: 48976 bytes, open\n", "  receive 0 bytes in 1 messages, 0 messages unread\n")
		s.InterruptWrite(true)
		p.expect(tCancelRead)
		pass(time.Second / 10)
		lineup(t, s.Debug(), "; interrupted\n", "  offer   1 of this end: 48976 bytes, cancelled\n")
		p.send(tReadDone, 0, u64(uint64(le.Uint32(d)), 1000)...)
		if r := within(t, w); r.n != 2024 {
			t.Errorf("Write: %+v", r)
		}
		s.InterruptWrite(false)
		if text := s.Debug(); strings.Contains(text, "  offer ") || strings.Contains(text, "interrupted") || !strings.Contains(text, "  send    2024 bytes") {
			t.Error(text)
		}
	})
}

// Debug shows an offer of the peer, and how much of it is fetched ahead.
func TestDebugHasAnOfferOfThePeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{ReceiveBudget: 20_000})
		d, err := p.Expose(pattern(50_000), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, make([]byte, 1))
		pass(time.Second)
		p.send(tOfferRead, 0, u64(7, d.Addr, d.Key, d.Len)...)
		pass(latency * 3 / 2)
		lineup(t, s.Debug(), "  offer   7 of the peer: 50000 bytes, asked for 20000, got 0, RDMA reads under way: 1\n")
		if x := within(t, r); x.n != 1 || x.err != nil {
			t.Fatalf("Read: %+v", x)
		}
		pass(time.Second)
		lineup(t, s.Debug(), "  offer   7 of the peer: 50000 bytes, asked for 20000, got 20000, RDMA reads under way: 0\n",
			"  ahead   20000 bytes of 20000 that may be fetched before a Read\n")
		p.send(tCancelRead, 0, u64(7)...)
		p.expectDone(t, 7, 0)
		if text := s.Debug(); strings.Contains(text, "  offer ") {
			t.Error(text)
		}
	})
}

// Debug shows the positions of an inbox, and those of a send buffer and the peer's inbox.
func TestDebugHasTheBuffers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{ReceiveBudget: 40_000})
		d := p.ask()
		p.fill(d, 0, pattern(30_000))
		readFull(t, s, 10_000)
		p.expect(tEmptied)
		readFull(t, s, 5000)
		lineup(t, s.Debug(), "  inbox   40000 bytes: filled to 30000, read to 15000, of which the peer knows 10000\n")
		p.send(tLeaveInbox, 0)
		pass(time.Second)
		lineup(t, s.Debug(), " knows 10000; the peer has left it\n")
	})
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 20_000)
		w := goWrite(s, pattern(30_000))
		pass(latency / 2)
		lineup(t, s.Debug(), " bytes: filled to 30000, sent to 20000, free to 0; RDMA writes under way: 1\n")
		in.read(20_000)
		pass(time.Second / 10)
		lineup(t, s.Debug(), "  buffer  ", " bytes: filled to 30000, sent to 20000, free to 20000; RDMA writes under way: 0\n",
			"          the peer's inbox: 20000 bytes, filled to 20000, read to 0\n")
		if r := within(t, w); r.err != nil {
			t.Errorf("Write: %+v", r)
		}
		in.at = 5000
		in.emptied()
		pass(time.Second / 10)
		lineup(t, s.Debug(), " bytes: filled to 30000, sent to 25000, free to 25000", " filled to 25000, read to 5000\n")
	})
}

// Debug shows which ends have been sent and received.
func TestDebugHasTheEnds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{CloseTimeout: time.Minute})
		s.CloseWrite()
		p.expect(tShutdown)
		lineup(t, s.Debug(), "  read    idle\n", "  write   idle; shut\n", "last message: Shutdown, sent: true\n")
		p.send(tClose, 0)
		pass(time.Second)
		lineup(t, s.Debug(), "  write   idle; shut; the peer has closed\n", "the stream has ended; the peer has closed\n")
	})
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{CloseTimeout: time.Minute})
		go s.Close()
		p.expect(tClose)
		lineup(t, s.Debug(), "  read    idle; closed\n", "last message: Close, sent: true\n", "; thrown away\n")
	})
}
