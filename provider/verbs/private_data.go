package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sanconn/san/session"
)

// privateData is what the two ends exchange in rdma_cm's private data, in the request, the reply and
// the reject: 12 bytes, little endian.
type privateData struct {
	Magic   uint32
	Version uint16  // of this provider, which determines how messages lie in buffers
	Refusal refusal // in a reject: why; otherwise 0
	Claim   Claim   // in a request; otherwise 0
}

// Claim names the TCP connection that a dialer's request is for: the dialer's port, and the dialer's
// half of the proof that it has that connection. The addresses, and the acceptor's port, are those of
// the request.
type Claim struct{ Port, Proof uint16 }

type refusal uint16

const (
	refusedVersion   refusal = 2
	refusedResources refusal = 3
	refusedSubnet    refusal = 4 // not from this address
	refusedClosed    refusal = 5 // the listener is being closed; another may have its port
	refusedAddress   refusal = 6 // no device of this end has the address that was dialed
	refusedDevice    refusal = 7 // a call of this end's device failed
	refusedUnknown   refusal = 8 // ErrUnknown
	refusedOther     refusal = 9 // ErrOther
)

// Errors of Config.Admit, which the dialer gets within a *session.Unavailable.
var (
	ErrUnknown = errors.New("verbs: the process that listens there does not have the TCP connection's other end, or not yet")
	ErrOther   = errors.New("verbs: the process that listens there takes this end for another one")
)

// refusalFor returns the refusal by which a listener's error is reported to the dialer.
func refusalFor(err error) refusal {
	var u *session.Unavailable
	switch {
	case errors.Is(err, ErrUnknown):
		return refusedUnknown
	case errors.Is(err, ErrOther):
		return refusedOther
	case errors.Is(err, errForeignAddress):
		return refusedSubnet
	case errors.As(callError(err), &u):
		switch u.Reason {
		case session.ReasonUnreachable, session.ReasonNotServed:
			return refusedAddress
		case session.ReasonResources:
			return refusedResources
		case session.ReasonVersion:
			return refusedVersion
		}
	}
	return refusedDevice
}

const (
	privateMagic    = 'S' | 'A'<<8 | 'N'<<16 | 'v'<<24
	protocolVersion = session.Version
)

func (p privateData) bytes() []byte {
	p.Magic = privateMagic
	b, _ := binary.Append(nil, binary.LittleEndian, p) // it cannot fail
	return b
}

// parsePrivateData decodes private data. It returns false if a foreign program has sent it.
func parsePrivateData(b []byte) (p privateData, ok bool) {
	if _, err := binary.Decode(b, binary.LittleEndian, &p); err != nil || p.Magic != privateMagic {
		return privateData{}, false
	}
	return p, true
}

// refusals are the errors that rejects mean to the dialer.
var refusals = map[refusal]error{
	refusedResources: unavailable(session.ReasonResources, errors.New("verbs: the peer has no room, in its RLIMIT_MEMLOCK most likely, or makes too many connections")),
	refusedClosed:    unavailable(session.ReasonNoListener, errors.New("verbs: the peer is closing its listener")),
	refusedAddress:   unavailable(session.ReasonUnreachable, errors.New("verbs: the peer has no RDMA device, or none of its GIDs, for this address")),
	refusedDevice:    unavailable(session.ReasonUnreachable, errors.New("verbs: a call of the peer's RDMA device failed")),
	refusedUnknown:   unavailable(session.ReasonNoListener, ErrUnknown),
	refusedOther:     unavailable(session.ReasonOwner, ErrOther),
	refusedSubnet:    unavailable(session.ReasonPermission, errors.New("verbs: the peer does not serve this address")),
}

// err returns the error that a reject means to the dialer.
func (p privateData) err() error {
	if p.Version != protocolVersion {
		return unavailable(session.ReasonVersion, fmt.Errorf("verbs: the peer has version %d, this end %d", p.Version, protocolVersion))
	}
	if err := refusals[p.Refusal]; err != nil {
		return err
	}
	return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: the peer refuses for a reason that is not known (%d)", p.Refusal))
}
