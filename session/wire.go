package session

import (
	"encoding/binary"
	"fmt"
)

// The wire format; docs/PROTOCOL.md says the same for readers. Every message
// starts with a header of headerLen bytes, little endian:
//
//	0  type    u8
//	1  flags   u8
//	2  zero    u16
//	4  credit  u32  how many of the peer's messages, Credit aside, have been dealt with,
//	               modulo 2³²: that many receive buffers have been posted again
//
// and goes on with a body that the type determines.
type msgType uint8

const (
	msgNegotiate   msgType = 1  // params
	msgData        msgType = 2  // payload
	msgCredit      msgType = 3  // nothing: the header says it
	msgOfferRead   msgType = 4  // id, descriptor, payload: the bytes behind it are in my memory, read them
	msgOfferWrite  msgType = 5  // id, length, payload: the bytes behind it are here, grant me memory to write them to
	msgGrant       msgType = 6  // id, descriptor (length 0: send them as payload)
	msgReadDone    msgType = 7  // id, count: reader → offerer, the offer is over
	msgWriteDone   msgType = 8  // id, count: offerer → granter, the grant is over
	msgCancelRead  msgType = 9  // id: offerer → reader: stop
	msgCancelWrite msgType = 10 // id: granter → offerer: stop
	msgShutdown    msgType = 11 // nothing: end of the stream
	msgClose       msgType = 12 // nothing: end of the stream, and I do not read any more
	msgCloseAck    msgType = 13 // nothing: I have all up to your Close (or Abort)
	msgAbort       msgType = 14 // nothing: the stream is cut here; I do not read any more
	msgPing        msgType = 15 // nothing
	msgPong        msgType = 16 // nothing
	msgUrgent      msgType = 17 // payload, out of band
	msgRefuse      msgType = 18 // id: reader → offerer: I have no memory for it, take the offer back
	msgAskInbox    msgType = 19 // nothing: open an inbox for me
	msgInbox       msgType = 20 // id 0, descriptor (length 0: no memory): write what you like to it
	msgFill        msgType = 21 // length: I put that many more bytes into your inbox
	msgEmptied     msgType = 22 // id 0, count: I have read that many bytes of the inbox since it was opened
	msgLeaveInbox  msgType = 23 // nothing: I write no more to your inbox
)

const (
	// flagMore on Data, Fill and offers: the Write goes on after this message. If
	// the peer dies after it, the stream was cut.
	flagMore = 1 << 0
	// flagLast on WriteDone: the whole offer is over, not just this grant.
	flagLast = 1 << 0
	// flagTaken on Grant of length 0: the offer is over, as if all had been read.
	flagTaken = 1 << 0
	// flagGone on ReadDone, and on Grant of length 0: nobody reads any more. Close
	// or Abort says so too, but may have to wait for what was written before it.
	flagGone = 1 << 1
)

const (
	headerLen     = 8
	idLen         = 8                           // id u32, zero u32
	descLen       = 24                          // addr, key, len u64
	offerReadLen  = headerLen + idLen + descLen // payload follows
	offerWriteLen = headerLen + idLen + 8       // length u64; payload follows
	fillLen       = headerLen + 8               // length u32, zero u32
	paramsLen     = 40
)

var le = binary.LittleEndian

func putHeader(b []byte, t msgType, flags byte, credit uint32) {
	_ = b[headerLen-1]
	le.PutUint32(b, uint32(t)|uint32(flags)<<8)
	le.PutUint32(b[4:], credit)
}

func putDesc(b []byte, d Descriptor) {
	le.PutUint64(b, d.Addr)
	le.PutUint64(b[8:], d.Key)
	le.PutUint64(b[16:], d.Len)
}

func getDesc(b []byte) Descriptor {
	return Descriptor{Addr: le.Uint64(b), Key: le.Uint64(b[8:]), Len: le.Uint64(b[16:])}
}

// params is what the two ends tell each other once, in the body of Negotiate:
//
//	 0  magic    u32
//	 4  version  u16  raised when an old end would not understand a new one
//	 6  zero     u16
//	 8  credits  u32  messages other than Credit that the peer may send at first; 0: no limit
//	12  maxMsg   u32  largest message that fits a buffer here
//	16  caps     u32  bits; unknown ones are ignored
//	20  zero     20 bytes, room for later; ignored
type params struct {
	version uint16
	credits uint32
	maxMsg  uint32
	caps    uint32
}

const (
	magic   = 'S' | 'A'<<8 | 'N'<<16 | 'c'<<24
	version = 1

	capRead  = 1 << 0 // I can RDMA-read what you offer
	capGrant = 1 << 1 // I can grant memory for you to RDMA-write
)

func (p params) put(b []byte) {
	clear(b[:paramsLen])
	le.PutUint32(b, magic)
	le.PutUint16(b[4:], p.version)
	le.PutUint32(b[8:], p.credits)
	le.PutUint32(b[12:], p.maxMsg)
	le.PutUint32(b[16:], p.caps)
}

func getParams(b []byte) (params, error) {
	if len(b) < paramsLen || le.Uint32(b) != magic {
		return params{}, &Unavailable{ReasonProtocol, fmt.Errorf("session: the peer's first message (%d bytes) is no negotiation", len(b))}
	}
	p := params{version: le.Uint16(b[4:]), credits: le.Uint32(b[8:]), maxMsg: le.Uint32(b[12:]), caps: le.Uint32(b[16:])}
	if p.version != version {
		return p, &Unavailable{ReasonVersion, fmt.Errorf("session: the peer speaks version %d, this end %d", p.version, version)}
	}
	if p.maxMsg < MaxControl || p.credits != 0 && p.credits < MinWindow-creditBuffers || p.credits > maxWindow {
		return p, &Unavailable{ReasonProtocol, fmt.Errorf("session: the peer's credits %d or message size %d is out of range", p.credits, p.maxMsg)}
	}
	return p, nil
}
