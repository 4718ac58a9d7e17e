package wire

// Inbox answers AskInbox with memory that the peer may write to; length 0: there is none.
func Inbox(memory Descriptor) Control {
	return newControl(TypeInbox, 0, 0, memory.Addr, memory.Key, memory.Len)
}

// ParseInbox reads an Inbox.
func ParseInbox(b []byte) (memory Descriptor, err error) {
	if len(b) < HeaderLen+idLen+descriptorLen {
		return memory, tooShort(b)
	}
	return parseDescriptor(b[HeaderLen+idLen:]), nil
}

// FillLen is the length of Fill in bytes.
const FillLen = HeaderLen + 8

// PutFill writes the body of a Fill, whose header is the caller's: the next length bytes of the
// stream are in the peer's inbox.
func PutFill(b []byte, length uint32) { le.PutUint64(b[HeaderLen:], uint64(length)) }

// ParseFill reads a Fill.
func ParseFill(b []byte) (length uint32, err error) {
	if len(b) < FillLen {
		return 0, tooShort(b)
	}
	return le.Uint32(b[HeaderLen:]), nil
}

// Emptied reports that count bytes of the inbox have been read since it was opened.
func Emptied(count uint64) Control { return newControl(TypeEmptied, 0, 0, count) }

// ParseEmptied reads an Emptied.
func ParseEmptied(b []byte) (count uint64, err error) {
	if len(b) < HeaderLen+idLen+countLen {
		return 0, tooShort(b)
	}
	return le.Uint64(b[HeaderLen+idLen:]), nil
}
