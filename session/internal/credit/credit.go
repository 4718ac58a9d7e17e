// Package credit counts messages for flow control. Each end has as many credits as the other end has
// receive buffers posted, less Reserved. Each message except Credit costs one. Each header reports how
// many messages its sender has dealt with: their buffers are posted again, and the credits return.
package credit

import (
	"fmt"
	"sync/atomic"
)

const (
	// Reserved is how many receive buffers of a window are for Credit messages; see Counts.Due.
	Reserved = 8

	// Control is how many credits are kept for control messages.
	Control = 8

	// Max keeps the arithmetic far from wrapping around. Available also returns it if there are no
	// credits.
	Max = 1 << 20
)

// Counts are the messages of both directions, without Credit, modulo 2³². The zero value is for an
// endpoint without credits, on which everything may be sent. Sent, Available and Advertise are for the
// sending side, in one goroutine at a time; Received, ReceivedFirst and DealtWith for the receiving
// side, likewise; Due is for both.
type Counts struct {
	window uint32 // messages that the peer may have in flight; 0: no credits
	limit  uint32 // … that this end may have; set before anything but Negotiate is sent

	sent       uint32        // messages that this end has sent
	marked     uint32        // … up to the last that was marked
	peerFreed  atomic.Uint32 // … dealt with by the peer
	received   atomic.Uint32 // messages of the peer
	freed      atomic.Uint32 // … dealt with
	advertised atomic.Uint32 // … and reported to the peer as such
}

// Open sets how many receive buffers this end has posted; 0: there are no credits.
func (c *Counts) Open(buffers int) {
	if buffers != 0 {
		c.window = uint32(buffers - Reserved)
	}
}

// Window returns how many messages, without Credit, the peer may have in flight; 0: no limit.
func (c *Counts) Window() uint32 { return c.window }

// Limit sets how many messages this end may have in flight, from the peer's parameters.
func (c *Counts) Limit(n uint32) { c.limit = n }

// Available returns for how many more messages the peer has buffers. An error means that the peer has
// reported more messages than it can have received.
func (c *Counts) Available() (int, error) {
	if c.limit == 0 {
		return Max, nil
	}
	under := int32(c.sent - c.peerFreed.Load())
	if under < 0 {
		return 0, fmt.Errorf("it has dealt with %d messages that were not sent", -under)
	}
	return int(int32(c.limit) - under), nil
}

// Sent counts a message other than Credit.
func (c *Counts) Sent() { c.sent++ }

// Mark marks the last message that was sent. MarkedUnderWay reports whether the peer has not dealt with
// it yet; without credits it returns false.
func (c *Counts) Mark() { c.marked = c.sent }

func (c *Counts) MarkedUnderWay() bool {
	return c.limit != 0 && int32(c.marked-c.peerFreed.Load()) > 0
}

// Advertise returns the credit for a header that is about to be sent.
func (c *Counts) Advertise() uint32 {
	if c.window == 0 {
		return 0
	}
	f := c.freed.Load()
	c.advertised.Store(f)
	return f
}

// Received counts a message and takes the credit in its header; costs is false for Credit. news: there
// is more credit than before.
func (c *Counts) Received(credit uint32, costs bool) (news bool, err error) {
	if c.window == 0 {
		return false, nil
	}
	if costs {
		c.received.Add(1)
	}
	was := c.peerFreed.Load()
	if credit == was {
		return false, nil
	}
	if credit-was > Max {
		return false, fmt.Errorf("its credit goes from %d to %d", was, credit)
	}
	c.peerFreed.Store(credit)
	return true, nil
}

// ReceivedFirst counts the peer's first message, whose header brings no credit.
func (c *Counts) ReceivedFirst() {
	if c.window != 0 {
		c.received.Add(1)
	}
}

// DealtWith counts a message, other than Credit, whose buffer was released.
func (c *Counts) DealtWith() {
	if c.window != 0 {
		c.freed.Add(1)
	}
}

// Due reports whether a Credit message has to be sent: after half of the buffers that data may use were
// released, or when credit for control may run short. Credit messages cost no credit; otherwise they
// would cause each other without end. They have buffers of their own, and no more than Reserved of them
// can be in flight: a peer that does not receive gets one for each half of its credits, and one for
// each of the last few messages that it can still send.
func (c *Counts) Due() bool {
	if c.window == 0 {
		return false
	}
	adv := c.advertised.Load()
	unreported := c.freed.Load() - adv
	left := c.window - (c.received.Load() - adv)
	return unreported >= max(Control/2, (c.window-Control)/2) || unreported > 0 && left <= Control/2
}
