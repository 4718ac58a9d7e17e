package sanconn

import (
	"errors"

	"github.com/sanconn/san/internal/raceedge"
)

// WriteUrgent sends 1 to MaxUrgent bytes beside the stream: they overtake what was
// written before. Urgent data that the peer has not read when more arrives is lost. If
// the peer takes nothing, WriteUrgent may wait, until the write deadline at most. With
// any other length the error is EMSGSIZE.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	raceedge.Release()
	n, err := c.session.WriteUrgent(p)
	return n, c.opError(opWrite, err)
}

// ReadUrgent returns the urgent data that arrived last, and does not block. What has
// no room in p is lost. If there is none, the error is ErrNoUrgent, as it is.
func (c *Conn) ReadUrgent(p []byte) (int, error) {
	n, err := c.session.ReadUrgent(p)
	raceedge.Acquire()
	if errors.Is(err, ErrNoUrgent) && !c.closed.Load() {
		return n, ErrNoUrgent
	}
	return n, c.opError(opRead, err)
}

// Urgent returns a channel that receives a value when urgent data arrives. It has room
// for one: call ReadUrgent until ErrNoUrgent.
func (c *Conn) Urgent() <-chan struct{} { return c.session.Urgent() }
