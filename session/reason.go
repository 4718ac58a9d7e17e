package session

import "fmt"

// Reason is why a connection does not use a SAN, or not the preferred one. The
// values are stable: they are counted and shown to operators.
type Reason uint8

const (
	ReasonNone        Reason = iota // the connection uses a SAN
	ReasonPolicy                    // the policy is Never
	ReasonDisabled                  // switched off by SAN_PROVIDERS or an empty list of providers
	ReasonNoProvider                // this build or this host has no provider for it
	ReasonNetwork                   // the network is not one of tcp, tcp4, tcp6
	ReasonNotServed                 // no provider serves the destination's address
	ReasonNoListener                // no SAN listener is there
	ReasonOwner                     // the process that answered does not own the TCP listener
	ReasonVersion                   // the other end has another version of the protocol
	ReasonTimeout                   // no answer within the bound
	ReasonUnreachable               // the SAN does not reach the destination
	ReasonRemembered                // not used any more
	ReasonPermission                // the system does not permit it
	ReasonResources                 // memory, descriptors or slots are used up
	ReasonProtocol                  // the answer was not understood
	ReasonPeerPlain                 // accepted, and the dialer has not proposed to move
	ReasonUnused                    // it has not been used enough to move
	ReasonStays                     // an end of it stays on TCP
	ReasonCanceled                  // the dialer has given up
	ReasonRefused                   // the acceptor's condition refuses it
)

var reasonText = [...]string{
	"none", "policy", "disabled", "no provider", "network", "not served", "no SAN listener",
	"owner mismatch", "version", "timeout", "unreachable", "remembered failure", "permission",
	"resources", "protocol", "plain TCP peer",
	"not used enough yet", "stays on TCP", "canceled", "refused",
}

func (r Reason) String() string {
	if int(r) < len(reasonText) {
		return reasonText[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// MarshalText returns String's text, so that reasons as keys or values in JSON can be read by
// operators. Its error is always nil.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Unavailable is why a connection does not move to a provider, or not now: it stays on TCP (C4), unless
// the policy is Require.
type Unavailable struct {
	Reason Reason
	Err    error // details, or nil
}

func (e *Unavailable) Error() string {
	if e.Err == nil {
		return e.Reason.String()
	}
	return e.Reason.String() + ": " + e.Err.Error()
}

func (e *Unavailable) Unwrap() error { return e.Err }
