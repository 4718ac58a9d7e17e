package wire

// noteMost is the longest note in bytes.
const noteMost = 240

// Bytes encodes a Note or an Urgent with these bytes, which must not be changed as long as the
// message waits.
func Bytes(t Type, p []byte) Control {
	c := Plain(t)
	c.more = p
	return c
}

// ParseNote returns the note, which lies in the message.
func ParseNote(b []byte) ([]byte, error) {
	if n := len(b) - HeaderLen; n < 1 || n > noteMost {
		return nil, tooShort(b)
	}
	return b[HeaderLen:], nil
}
