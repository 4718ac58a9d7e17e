package sanconn_test

import (
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// TCP returns an error only once. If a Read finds it, and reaches its deadline before it is known
// whether the session goes on from there, the next Read returns the error.
func TestAResetBesideAProposalBehindADeadline(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{})
	reset, read := make(chan bool), make(chan bool)
	go connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
		b.SetLinger(0)
		b.Close() // so that it refuses
		close(reset)
		<-read
		return b
	})
	proposed := make(chan error, 1)
	go func() { proposed <- connpair.Propose(t.Context(), a, ea, session.Config{}, nil) }()
	<-reset
	for range 2 {
		a.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // the reset has come by then
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("beside the proposal: %v", err)
		}
	}
	close(read)
	if err := <-proposed; !errors.Is(err, connpair.ErrRefused) {
		t.Error(err)
	}
	a.SetReadDeadline(time.Now().Add(patience))
	for _, want := range []error{syscall.ECONNRESET, io.EOF} {
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
}

// The flush of what came back may find another error than a reset.
func TestATimeoutOfWhatCameBack(t *testing.T) {
	a, b := pipe(t, session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}, nil)
	tcp := newconn.HandleOf(a).TCP()
	tcp.SetWriteBuffer(1)
	newconn.HandleOf(b).TCP().SetReadBuffer(1) // so that TCP does not take everything
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 200)
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	a.SetDeadline(time.Now().Add(patience))
	for _, want := range []error{syscall.ETIMEDOUT, io.EOF} {
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
}
