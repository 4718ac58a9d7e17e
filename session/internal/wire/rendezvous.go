package wire

// OfferRead offers memory to the peer: next in the stream comes the message's payload, and then the
// memory, which the peer is to read.
type OfferRead struct {
	ID     uint32
	Memory Descriptor
}

// OfferReadLen is the length of OfferRead without its payload, in bytes.
const OfferReadLen = HeaderLen + idLen + descriptorLen

// Flags returns the flags of its header that are about the memory.
func (m OfferRead) Flags() uint8 {
	if m.Memory.Returnable {
		return flagReturnable
	}
	return 0
}

// Put writes the message's body; the caller writes the header and the payload.
func (m OfferRead) Put(b []byte) {
	le.PutUint64(b[HeaderLen:], uint64(m.ID))
	m.Memory.put(b[HeaderLen+idLen:])
}

// ParseOfferRead reads an OfferRead.
func ParseOfferRead(b []byte) (OfferRead, error) {
	if len(b) < OfferReadLen {
		return OfferRead{}, tooShort(b)
	}
	m := OfferRead{ID: le.Uint32(b[HeaderLen:]), Memory: parseDescriptor(b[HeaderLen+idLen:])}
	m.Memory.Returnable = HeaderOf(b).Flags&flagReturnable != 0
	return m, nil
}

// ReadDone is the reader's message to the offerer that the offer is over, and that Count bytes of its
// memory were read.
type ReadDone struct {
	ID    uint32
	Flags uint8
	Count uint64
	From  Descriptor // not on the wire: the memory that is given back with the message
}

// Control encodes the message.
func (m ReadDone) Control() Control {
	c := newControl(TypeReadDone, m.Flags, uint64(m.ID), m.Count)
	c.Returns = m.From
	return c
}

// ParseReadDone reads a ReadDone.
func ParseReadDone(b []byte) (ReadDone, error) {
	if len(b) < HeaderLen+idLen+countLen {
		return ReadDone{}, tooShort(b)
	}
	return ReadDone{ID: le.Uint32(b[HeaderLen:]), Flags: b[1], Count: le.Uint64(b[HeaderLen+idLen:])}, nil
}

// Cancel requests the end of an offer. Its type is TypeCancelRead (from the offerer) or TypeRefuse
// (from a reader that has no memory for it).
func Cancel(t Type, id uint32) Control { return newControl(t, 0, uint64(id)) }

// ParseCancel reads a CancelRead or Refuse.
func ParseCancel(b []byte) (id uint32, err error) {
	if len(b) < HeaderLen+idLen {
		return 0, tooShort(b)
	}
	return le.Uint32(b[HeaderLen:]), nil
}
