package wire

// Control is an encoded message without payload, complete except for the credit in its header. A sender
// keeps it until there is room for it.
type Control struct {
	b    [HeaderLen + idLen + descriptorLen]byte
	n    int8
	more []byte // follows b's first n bytes

	// Returns is the memory to which this end gives its access back with the message, if it is
	// Returnable.
	Returns Descriptor
}

// Type returns the message's type.
func (c *Control) Type() Type { return Type(c.b[0]) }

// Len returns the message's length in bytes.
func (c *Control) Len() int { return int(c.n) + len(c.more) }

// Put writes the message with this credit into room, which has Len bytes.
func (c *Control) Put(room []byte, credit uint32) {
	copy(room[copy(room, c.b[:c.n]):], c.more)
	le.PutUint32(room[4:], credit)
}

// Plain encodes a message without a body.
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
