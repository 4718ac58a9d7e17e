package san

import (
	"context"
	"errors"
	"net"
)

// requireError is an Unavailable with the policy Require, which forbids TCP.
type requireError struct{ why *Unavailable }

func (e requireError) Error() string { return "no SAN connection: " + e.why.Error() }
func (e requireError) Unwrap() error { return e.why }
func (e requireError) Timeout() bool {
	return e.why.Reason == ReasonTimeout || errors.Is(e.why, context.DeadlineExceeded)
}

// dialError returns err as net.Dial would. A nil dst means that the address is not known.
func dialError(network string, source, dst net.Addr, err error) error {
	return &net.OpError{Op: "dial", Net: network, Source: source, Addr: dst, Err: err}
}

// serverError returns err as net.Listen, or a listener's Accept, would.
func serverError(op, network string, addr net.Addr, err error) error {
	return &net.OpError{Op: op, Net: network, Addr: addr, Err: err}
}
