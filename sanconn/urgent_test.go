package sanconn_test

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
)

// On TCP a WriteUrgent waits for the connection to move until the write deadline at most, and
// without one for a second.
func TestUrgentDeadlineOnTCP(t *testing.T) {
	a, _, _ := onTCPPair(t, newconn.Config{})
	if a.Provider() != "tcp" {
		t.Fatalf("it is on %s", a.Provider())
	}
	a.SetWriteDeadline(time.Time{})
	if n, err := a.WriteUrgent([]byte("!")); n != 0 || !errors.Is(err, errors.ErrUnsupported) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("without a deadline: %d, %v", n, err)
	}
	for _, within := range []time.Duration{-time.Second, time.Millisecond} {
		a.SetWriteDeadline(time.Now().Add(within))
		n, err := a.WriteUrgent([]byte("!"))
		var oe *net.OpError
		if n != 0 || !errors.As(err, &oe) || oe.Op != "write" || !oe.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("deadline within %v: %d, %v", within, n, err)
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := sanconn.AwaitUrgent(over, a); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("its own time is over as well: %v", err)
	}
}
