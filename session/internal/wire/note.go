package wire

// noteMost is the longest note in bytes.
const noteMost = 240

// Bytes encodes a Note or an Urgent with the bytes p, which must not be changed until the message was
// sent.
func Bytes(t Type, p []byte) Control {
	c := Plain(t)
	c.more = p
	return c
}

// ParseNote returns the note, which is a part of the message.
func ParseNote(b []byte) ([]byte, error) {
	if n := len(b) - HeaderLen; n < 1 || n > noteMost {
		return nil, tooShort(b)
	}
	return b[HeaderLen:], nil
}
