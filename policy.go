package san

import (
	"fmt"

	"github.com/sanconn/san/session"
)

// Policy is how to choose between SAN and TCP.
type Policy int

const (
	// Prefer uses a SAN if there is one, and TCP otherwise.
	Prefer Policy = iota
	// Require uses a SAN or fails. A listener with it resets connections that have not moved within 10
	// s, or have had bytes on TCP before. Require is for Dial and Accept: if a program at either end
	// uses the descriptor later (File, SyscallConn), the connection goes back to TCP.
	Require
	// Never uses only TCP: no SAN is tried or offered.
	Never
)

func (p Policy) String() string {
	if names := [...]string{"prefer", "require", "never"}; 0 <= p && int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("policy %d", int(p))
}

// Reason is why a connection is not on a SAN: a uint8 with the methods String and MarshalText, which
// return its text.
type Reason = session.Reason

// The reasons. Their values do not change; operators see their String.
const (
	ReasonNone        = session.ReasonNone        // the connection uses a SAN
	ReasonPolicy      = session.ReasonPolicy      // the policy is Never
	ReasonDisabled    = session.ReasonDisabled    // switched off by SAN_PROVIDERS or an empty Providers
	ReasonNoProvider  = session.ReasonNoProvider  // this build or this host has no provider
	ReasonNetwork     = session.ReasonNetwork     // the network is not one of tcp, tcp4, tcp6
	ReasonNotServed   = session.ReasonNotServed   // no provider serves the address
	ReasonNoListener  = session.ReasonNoListener  // no SAN listener is there
	ReasonOwner       = session.ReasonOwner       // the answer is not from the TCP listener's owner
	ReasonVersion     = session.ReasonVersion     // the other end has another version of the protocol
	ReasonTimeout     = session.ReasonTimeout     // no answer within the bound
	ReasonUnreachable = session.ReasonUnreachable // the SAN does not reach the destination
	ReasonRemembered  = session.ReasonRemembered  // not used any more
	ReasonPermission  = session.ReasonPermission  // the system does not permit it
	ReasonResources   = session.ReasonResources   // memory, descriptors or slots are used up
	ReasonProtocol    = session.ReasonProtocol    // the answer was not understood
	ReasonPeerPlain   = session.ReasonPeerPlain   // accepted, and the dialer has not proposed to move
	ReasonUnused      = session.ReasonUnused      // dialed, passed on or come back to TCP, and not used enough yet to move
	ReasonStays       = session.ReasonStays       // an end of it stays on TCP
	ReasonCanceled    = session.ReasonCanceled    // the dialer's context was canceled
	ReasonRefused     = session.ReasonRefused     // the listener's Condition refuses it
)

// Unavailable is why a connection is not on a SAN. With the policy Require, errors.As finds an
// *Unavailable in the error. Its fields are Reason, of the type Reason, and Err, an error with the
// details, or nil. Its methods are Error and Unwrap, which returns Err.
type Unavailable = session.Unavailable

// isTCP reports whether connections of the network can move to a SAN.
func isTCP(network string) bool {
	return network == "tcp" || network == "tcp4" || network == "tcp6"
}

// notTCP returns why connections of a network are left to net.
func notTCP(network string) *Unavailable {
	return &Unavailable{Reason: ReasonNetwork, Err: fmt.Errorf("%q is not one of tcp, tcp4, tcp6", network)}
}
