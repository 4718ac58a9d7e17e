package wire

// OfferRead offers memory for the peer to read: the payload behind it comes next in the
// stream, and then the memory.
type OfferRead struct {
	ID     uint32
	Memory Descriptor
}

// OfferReadLen is the length of OfferRead without its payload, in bytes.
const OfferReadLen = HeaderLen + idLen + descriptorLen

// Put writes the message's body; its header and its payload are the caller's.
func (m OfferRead) Put(b []byte) {
	le.PutUint64(b[HeaderLen:], uint64(m.ID))
	m.Memory.put(b[HeaderLen+idLen:])
}

// ParseOfferRead reads an OfferRead.
func ParseOfferRead(b []byte) (OfferRead, error) {
	if len(b) < OfferReadLen {
		return OfferRead{}, tooShort(b)
	}
	return OfferRead{ID: le.Uint32(b[HeaderLen:]), Memory: parseDescriptor(b[HeaderLen+idLen:])}, nil
}

// OfferWrite offers Length bytes that the sender of the offer writes to memory that the
// peer grants; the payload behind it comes before them.
type OfferWrite struct {
	ID     uint32
	Length uint64
}

// OfferWriteLen is the length of OfferWrite without its payload, in bytes.
const OfferWriteLen = HeaderLen + idLen + countLen

// Put writes the message's body; its header and its payload are the caller's.
func (m OfferWrite) Put(b []byte) {
	le.PutUint64(b[HeaderLen:], uint64(m.ID))
	le.PutUint64(b[HeaderLen+idLen:], m.Length)
}

// ParseOfferWrite reads an OfferWrite.
func ParseOfferWrite(b []byte) (OfferWrite, error) {
	if len(b) < OfferWriteLen {
		return OfferWrite{}, tooShort(b)
	}
	return OfferWrite{ID: le.Uint32(b[HeaderLen:]), Length: le.Uint64(b[HeaderLen+idLen:])}, nil
}

// Grant answers OfferWrite with memory for the offer's next bytes. Length 0: they are to
// be sent as Data, or the offer is over (FlagTaken, FlagGone).
type Grant struct {
	ID     uint32
	Flags  uint8
	Memory Descriptor
}

// Control encodes the message.
func (m Grant) Control() Control {
	c := newControl(TypeGrant, m.Flags, idLen+descriptorLen)
	le.PutUint64(c.body(), uint64(m.ID))
	m.Memory.put(c.body()[idLen:])
	return c
}

// ParseGrant reads a Grant.
func ParseGrant(b []byte) (Grant, error) {
	if len(b) < HeaderLen+idLen+descriptorLen {
		return Grant{}, tooShort(b)
	}
	return Grant{ID: le.Uint32(b[HeaderLen:]), Flags: b[1], Memory: parseDescriptor(b[HeaderLen+idLen:])}, nil
}

// Done ends the use of memory of a rendezvous. As ReadDone it goes from the reader to the
// offerer: the offer is over, Count bytes of its memory were read. As WriteDone it goes
// from the offerer to the granter: nothing more is written to the grant, and Count bytes
// were.
type Done struct {
	Type  Type // TypeReadDone or TypeWriteDone
	ID    uint32
	Flags uint8
	Count uint64
}

// Control encodes the message.
func (m Done) Control() Control {
	c := newControl(m.Type, m.Flags, idLen+countLen)
	le.PutUint64(c.body(), uint64(m.ID))
	le.PutUint64(c.body()[idLen:], m.Count)
	return c
}

// ParseDone reads a ReadDone or WriteDone.
func ParseDone(b []byte) (Done, error) {
	if len(b) < HeaderLen+idLen+countLen {
		return Done{}, tooShort(b)
	}
	return Done{Type: Type(b[0]), ID: le.Uint32(b[HeaderLen:]), Flags: b[1], Count: le.Uint64(b[HeaderLen+idLen:])}, nil
}

// Cancel asks for the end of a transfer that is named by its offer. Its type is
// TypeCancelRead (from the offerer), TypeCancelWrite (from the granter) or TypeRefuse
// (from a reader that has no memory for the offer).
type Cancel struct {
	Type Type
	ID   uint32
}

// Control encodes the message.
func (m Cancel) Control() Control {
	c := newControl(m.Type, 0, idLen)
	le.PutUint64(c.body(), uint64(m.ID))
	return c
}

// ParseCancel reads a CancelRead, CancelWrite or Refuse.
func ParseCancel(b []byte) (Cancel, error) {
	if len(b) < HeaderLen+idLen {
		return Cancel{}, tooShort(b)
	}
	return Cancel{Type: Type(b[0]), ID: le.Uint32(b[HeaderLen:])}, nil
}
