package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/trace"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// tracedTwins lets f use two sessions that have negotiated. It returns their traces once the first
// session is closed, and then the other.
func tracedTwins(t *testing.T, cfg twin.Config, f func(a, b *session.Session)) (texts [2]string) {
	t.Helper()
	var logs [2]bytes.Buffer
	var ends [2]*session.Session
	var traces [2]*trace.Log
	ea, eb := twins(t, cfg)
	for i, ep := range []session.Endpoint{ea, eb} {
		traces[i] = trace.New(&logs[i])
		ends[i] = session.New(ep, session.Config{KeepAlive: -1, Trace: traces[i]})
	}
	for _, s := range ends {
		negotiate(t, s)
	}
	f(ends[0], ends[1])
	for i, s := range ends {
		s.Close()
		<-s.Closed()
		traces[i].Flush(time.Minute)
		texts[i] = logs[i].String()
	}
	return texts
}

// transfer makes a write p, and b read it.
func transfer(t *testing.T, a, b *session.Session, p []byte) {
	t.Helper()
	w := goWrite(a, p)
	if _, err := io.ReadFull(readerFunc(b.Read), make([]byte, len(p))); err != nil {
		t.Fatal(err)
	}
	if r := within(t, w); r.n != len(p) || r.err != nil {
		t.Fatalf("Write: %+v", r)
	}
}

// lastBuffer returns a trace from its last RDMA write on.
func lastBuffer(text string) string { return text[strings.LastIndex(text, "- write id="):] }

// The traces of both ends have the way through the send buffer, with the same key. Each stream has its
// own position, even if both ends write.
func TestTraceHasTheSendBuffer(t *testing.T) {
	last := ""
	texts := tracedTwins(t, byBuffer, func(a, b *session.Session) {
		transfer(t, b, a, []byte("the other stream"))
		testenv.Eventually(t, time.Minute, func() error {
			before := a.Stats()
			transfer(t, a, b, pattern(10_000))
			if a.Stats().OfferedBytesSent-before.OfferedBytesSent == 10_000 {
				last = fmt.Sprintf("stream=%d+10000\n", before.BytesSent)
				return nil
			}
			return errors.New("there is no inbox yet")
		})
		testenv.Eventually(t, time.Minute, func() error { // until its completion has been taken
			if text := a.Debug(); !strings.Contains(text, "RDMA writes under way: 0") {
				return errors.New(text)
			}
			return nil
		})
	})
	key := regexp.MustCompile(`- expose memory=\d+ key=(0x[0-9a-f]+) rights=write\n`).FindStringSubmatch(texts[1])
	if key == nil {
		t.Fatalf("no inbox:\n%s", texts[1])
	}
	lineup(t, texts[0], "> AskInbox ", "< Inbox len=40 ", " key="+key[1]+"\n", "- write id=0 bytes=")
	lineup(t, lastBuffer(texts[0]), "bytes=10000 at=", " key="+key[1]+"\n", "> Fill len=16 ", "bytes=10000 "+last)
	lineup(t, lastBuffer(texts[0]), "> Close ")
	open, _, _ := strings.Cut(texts[0], "> Close ") // another goroutine may have taken the completion before
	if posted, done := strings.Count(open, "- write id=0 "), strings.Count(open, "- write done id=0\n"); posted == 0 || done != posted {
		t.Errorf("%d RDMA writes, of which %d completed:\n%s", posted, done, open)
	}
	lineup(t, texts[1], "> Data ", "stream=0+16\n", "< AskInbox ", "> Inbox ", "< Fill ", "bytes=10000 "+last,
		"< Close ", "- revoke memory=", " key="+key[1]+"\n", "- revoked key="+key[1]+"\n")
	lineup(t, texts[0], "< Data ", "stream=0+16\n", "stream=0+")
}

// A trace has the end of the connection once, with who ended it and why.
func TestTraceHasTheEnd(t *testing.T) {
	texts := tracedTwins(t, messages, func(*session.Session, *session.Session) {})
	lineup(t, texts[0], "> Close ", "< CloseAck ", "- close\n")
	lineup(t, texts[1], "< Close ", "> CloseAck ")
	texts = tracedTwins(t, messages, func(a, b *session.Session) {
		a.Abort()
		for range 2 {
			if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("Read: %v", err)
			}
		}
	})
	lineup(t, texts[0], "- abort\n")
	lineup(t, texts[1], "- over: ", "connection reset by peer\n", "- abort\n")
	if n := strings.Count(texts[1], "- over: "); n != 1 {
		t.Errorf("it is over %d times:\n%s", n, texts[1])
	}
}

// A trace has the reasons why memory could not be exposed or read into. It has no line for a full queue,
// at which a session that waits for room looks often.
func TestTraceHasFailures(t *testing.T) {
	for _, tt := range []struct {
		faults twin.Faults
		end    int
		want   string // empty: no error
	}{
		{twin.Faults{Expose: 1}, 0, `- expose memory=48976 key=0x0 rights=read error: .*cannot allocate memory`},
		{twin.Faults{Local: 1, Evicted: 1}, 1, `- read id=1 bytes=\d+ at=0 key=0x[0-9a-f]+ error: `},
		{twin.Faults{Busy: 0.9}, 1, ""},
	} {
		cfg := inPieces(byRead)
		cfg.Faults, cfg.RDMAQueue = tt.faults, 1
		text := tracedTwins(t, cfg, func(a, b *session.Session) { transfer(t, a, b, pattern(50_000)) })[tt.end]
		switch {
		case tt.want != "" && !regexp.MustCompile(tt.want).MatchString(text):
			t.Errorf("%+v: no %q in\n%s", tt.faults, tt.want, text)
		case tt.want == "" && strings.Contains(text, "error"):
			t.Errorf("%+v: %s", tt.faults, text)
		}
	}
}
