package san

import (
	"context"
	"errors"
	"net"
)

// requireError is an Unavailable under the policy Require, which forbids TCP.
type requireError struct{ why *Unavailable }

func (e requireError) Error() string { return "no SAN connection: " + e.why.Error() }
func (e requireError) Unwrap() error { return e.why }
func (e requireError) Timeout() bool {
	return e.why.Reason == ReasonTimeout || errors.Is(e.why, context.DeadlineExceeded)
}

// dialError is err as net.Dial would return it. A nil dst: the address is not known.
func dialError(network string, source, dst net.Addr, err error) error {
	return &net.OpError{Op: "dial", Net: network, Source: source, Addr: dst, Err: err}
}

// serverError is err as net.Listen, or a listener's Accept, would return it.
func serverError(op, network string, addr net.Addr, err error) error {
	return &net.OpError{Op: op, Net: network, Addr: addr, Err: err}
}
