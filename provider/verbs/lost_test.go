package verbs

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
)

// Whoever asks for the errno of an error that ended a connection gets ECONNRESET,
// whatever the device said.
func TestLostIsAReset(t *testing.T) {
	err := deviceError(fmt.Errorf("ibv_post_send: %w", syscall.ENOTCONN))
	var errno syscall.Errno
	if !errors.As(err, &errno) || errno != syscall.ECONNRESET {
		t.Errorf("%v: %v", err, errno)
	}
}
