package wire

// Inbox answers AskInbox with memory that the peer may write to; length 0: there is none.
type Inbox struct{ Memory Descriptor }

// Control encodes the message.
func (m Inbox) Control() Control {
	return newControl(TypeInbox, 0, 0, m.Memory.Addr, m.Memory.Key, m.Memory.Len)
}

// ParseInbox reads an Inbox.
func ParseInbox(b []byte) (Inbox, error) {
	if len(b) < HeaderLen+idLen+descriptorLen {
		return Inbox{}, tooShort(b)
	}
	return Inbox{Memory: parseDescriptor(b[HeaderLen+idLen:])}, nil
}

// Fill announces that the next Length bytes of the stream are in the peer's inbox.
type Fill struct{ Length uint32 }

// FillLen is the length of Fill in bytes.
const FillLen = HeaderLen + 8

// Put writes the message's body; its header is the caller's.
func (m Fill) Put(b []byte) { le.PutUint64(b[HeaderLen:], uint64(m.Length)) }

// ParseFill reads a Fill.
func ParseFill(b []byte) (Fill, error) {
	if len(b) < FillLen {
		return Fill{}, tooShort(b)
	}
	return Fill{Length: le.Uint32(b[HeaderLen:])}, nil
}

// Emptied reports that Count bytes of the inbox have been read since it was opened.
type Emptied struct{ Count uint64 }

// Control encodes the message.
func (m Emptied) Control() Control {
	return newControl(TypeEmptied, 0, 0, m.Count)
}

// ParseEmptied reads an Emptied.
func ParseEmptied(b []byte) (Emptied, error) {
	if len(b) < HeaderLen+idLen+countLen {
		return Emptied{}, tooShort(b)
	}
	return Emptied{Count: le.Uint64(b[HeaderLen+idLen:])}, nil
}
