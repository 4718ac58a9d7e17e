package ibv

import (
	"errors"
	"fmt"
	"syscall"
)

// ErrNotAvailable is wrapped by the error of [Available], and by that of every
// constructor when the libraries cannot be used in this program.
var ErrNotAvailable = errors.New("RDMA verbs are not available")

// Error is the error of a verb that failed. It wraps its errno, for errors.Is.
type Error struct {
	Verb  string        // as in C: "ibv_reg_mr", "rdma_connect"
	On    string        // the device, address or object, where known
	Errno syscall.Errno // always positive, however the library reported it
}

func (e *Error) Error() string {
	hint := ""
	if e.Errno == syscall.ENOMEM && (e.Verb == "ibv_reg_mr" || e.Verb == "ibv_create_qp" || e.Verb == "ibv_create_cq") {
		hint = " (pinned memory counts against RLIMIT_MEMLOCK, see ulimit -l)"
	}
	if e.On == "" {
		return fmt.Sprintf("%s: %v%s", e.Verb, e.Errno, hint)
	}
	return fmt.Sprintf("%s %s: %v%s", e.Verb, e.On, e.Errno, hint)
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// Timeout reports whether the errno means that time ran out.
func (e *Error) Timeout() bool { return e.Errno.Timeout() }

func verbError(verb, on string, errno int) error {
	if errno == 0 {
		return nil
	}
	return &Error{Verb: verb, On: on, Errno: syscall.Errno(errno)}
}
