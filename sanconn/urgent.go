package sanconn

import "errors"

// WriteUrgent sends 1 to MaxUrgent (64) bytes beside the stream: they overtake
// what was written before. Urgent data that the peer has not read when more
// arrives is replaced by it. It may wait while the peer takes nothing, to the
// write deadline at most. Another length is EMSGSIZE.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	n, err := c.session.WriteUrgent(p)
	return n, c.opError(opWrite, err)
}

// ReadUrgent takes the urgent data that arrived last, without blocking; what has
// no room in p is lost. When there is none its error is ErrNoUrgent.
func (c *Conn) ReadUrgent(p []byte) (int, error) {
	n, err := c.session.ReadUrgent(p)
	if errors.Is(err, ErrNoUrgent) && !c.closed.Load() {
		return n, ErrNoUrgent
	}
	return n, c.opError(opRead, err)
}

// Urgent is signalled when urgent data arrives. It has room for one signal:
// call ReadUrgent until ErrNoUrgent.
func (c *Conn) Urgent() <-chan struct{} { return c.session.Urgent() }
