package sanconn

import (
	"errors"
	"io"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

var (
	// ErrNotReserved is returned by Commit without a Reserve before it, and by Discard of
	// some bytes without a Peek.
	ErrNotReserved = session.ErrNotReserved
	// ErrTooMuch is returned by Commit and Discard of more bytes than were lent.
	ErrTooMuch = session.ErrTooMuch
)

// Counts that an io.Reader or io.Writer must not return.
var (
	errInvalidRead  = errors.New("invalid read result")
	errInvalidWrite = errors.New("invalid write result") // io's own, which is not exported
)

// Reserve returns room in the memory that the connection sends from, for a caller that
// would otherwise fill a buffer and Write it: at least one byte, up to n. It blocks while
// there is no room. The caller fills the room from its front and calls Commit; until then
// other Writes wait, and after it the room must not be used. Its errors are those of Write.
func (c *Conn) Reserve(n int) ([]byte, error) {
	b, err := c.session.Reserve(n)
	return b, c.opError(opWrite, err)
}

// Commit sends the first n bytes of what Reserve returned, in the place of a Write; 0:
// none. It does not block. After an error nothing is reserved, and nothing was sent.
func (c *Conn) Commit(n int) error {
	raceedge.Release()
	return c.opError(opWrite, c.session.Commit(n))
}

// Peek returns bytes that have arrived, where they lie: at least one, and as many as lie
// there in one piece. It blocks while there are none. They stay in place until Discard;
// until then Reads wait, and another Peek returns the same. Its errors are those of Read.
func (c *Conn) Peek() ([]byte, error) {
	b, err := c.session.Peek()
	raceedge.Acquire()
	if err == nil || err == io.EOF {
		return b, err
	}
	return nil, c.opError(opRead, err)
}

// Discard counts the first n bytes of what Peek returned as read. None of them may be used
// after it.
func (c *Conn) Discard(n int) error { return c.opError(opRead, c.session.Discard(n)) }
