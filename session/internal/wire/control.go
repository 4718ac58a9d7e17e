package wire

// Control is an encoded message without payload, complete but for the credit in its
// header. Until there is room for it, a sender keeps it as it is.
type Control struct {
	b    [HeaderLen + idLen + descriptorLen]byte
	n    int8
	more []byte // behind b's n

	// Returns is the memory to which this end gives its access back with the message, if
	// that is Returnable.
	Returns Descriptor
}

// Type returns the message's type.
func (c *Control) Type() Type { return Type(c.b[0]) }

// Len returns its length in bytes.
func (c *Control) Len() int { return int(c.n) + len(c.more) }

// Put writes the message with this credit to room, which has Len bytes.
func (c *Control) Put(room []byte, credit uint32) {
	copy(room[copy(room, c.b[:c.n]):], c.more)
	le.PutUint32(room[4:], credit)
}

// Plain encodes a message that is nothing but its type.
func Plain(t Type) Control { return newControl(t, 0) }

// newControl encodes a message whose body is these words.
func newControl(t Type, flags uint8, words ...uint64) Control {
	c := Control{n: int8(HeaderLen + 8*len(words))}
	Header{Type: t, Flags: flags}.Put(c.b[:])
	for i, word := range words {
		le.PutUint64(c.b[HeaderLen+8*i:], word)
	}
	return c
}
