package wire

// noteMost is the longest note in bytes.
const noteMost = 240

// Note carries something for the layers above the session alone. The note must not be
// changed as long as the message waits.
func Note(note []byte) Control {
	c := Plain(TypeNote)
	c.more = note
	return c
}

// Urgent has bytes out of band, which must not be changed as long as the message waits.
func Urgent(p []byte) Control {
	c := Plain(TypeUrgent)
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
