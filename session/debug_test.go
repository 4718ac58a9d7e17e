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

// lineup fails the test unless lines of text have these parts, in this order.
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

// readerFunc is an io.Reader.
type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Debug says what waits, and Dump has each session until it is closed.
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

// Debug does not wait for who is stuck with a lock, and says the rest.
func TestDebugDoesNotWait(t *testing.T) {
	a, _, _, _ := pair(t, messages, session.Config{})
	release := a.HoldReceiver()
	text := a.Debug()
	release()
	lineup(t, text, "  send    0 bytes", "  receive busy: its lock is held")
	lineup(t, a.Debug(), "  receive 0 bytes")
}
