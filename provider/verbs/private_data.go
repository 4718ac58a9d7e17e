package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sanconn/san/session"
)

// privateData is what the two ends exchange in rdma_cm's private data, in the request,
// the reply and the reject: 12 bytes, little endian:
//
//	0  magic    u32
//	4  version  u16  of this provider: how messages lie in buffers
//	6  refusal  u16  in a reject: why; otherwise 0
//	8  flags    u32  0
type privateData struct {
	version uint16
	refusal refusal
}

type refusal uint16

const (
	refusedVersion   refusal = 2
	refusedResources refusal = 3
	refusedSubnet    refusal = 4 // not from this address
	refusedClosed    refusal = 5 // the listener is being closed; another may have its port
	refusedAddress   refusal = 6 // no device of this end has the address that was dialed
	refusedDevice    refusal = 7 // a call of this end's device failed
)

// refusalFor is how a listener's error is reported to the dialer.
func refusalFor(err error) refusal {
	var u *session.Unavailable
	if errors.As(callError(err), &u) {
		switch u.Reason {
		case session.ReasonUnreachable, session.ReasonNotServed:
			return refusedAddress
		case session.ReasonResources:
			return refusedResources
		}
	}
	return refusedDevice
}

const (
	privateMagic    = 'S' | 'A'<<8 | 'N'<<16 | 'v'<<24
	protocolVersion = 2
	privateLen      = 12
)

func (p privateData) bytes() []byte {
	b := make([]byte, privateLen)
	binary.LittleEndian.PutUint32(b, privateMagic)
	binary.LittleEndian.PutUint16(b[4:], p.version)
	binary.LittleEndian.PutUint16(b[6:], uint16(p.refusal))
	return b
}

// parsePrivateData reads private data; false: it is a foreign program's.
func parsePrivateData(b []byte) (p privateData, ok bool) {
	if len(b) < privateLen || binary.LittleEndian.Uint32(b) != privateMagic {
		return p, false
	}
	return privateData{binary.LittleEndian.Uint16(b[4:]), refusal(binary.LittleEndian.Uint16(b[6:]))}, true
}

// err is what a reject means to the dialer.
func (p privateData) err() error {
	switch {
	case p.version != protocolVersion:
		return unavailable(session.ReasonVersion, fmt.Errorf("verbs: the peer has version %d, this end %d", p.version, protocolVersion))
	case p.refusal == refusedResources:
		return unavailable(session.ReasonResources, errors.New("verbs: the peer has no room, in its RLIMIT_MEMLOCK most likely, or makes too many connections"))
	case p.refusal == refusedClosed:
		return unavailable(session.ReasonNoListener, errors.New("verbs: the peer is closing its listener"))
	case p.refusal == refusedAddress:
		return unavailable(session.ReasonUnreachable, errors.New("verbs: the peer has no RDMA device, or none of its GIDs, for this address"))
	case p.refusal == refusedDevice:
		return unavailable(session.ReasonUnreachable, errors.New("verbs: a call of the peer's RDMA device failed"))
	case p.refusal == refusedSubnet:
		return unavailable(session.ReasonPermission, errors.New("verbs: the peer does not serve this address"))
	}
	return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: the peer refuses for a reason that is not known (%d)", p.refusal))
}
