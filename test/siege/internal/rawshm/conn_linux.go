package rawshm

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
)

// Offsets in a slot's control area, on either side.
const (
	state     = 0
	ringTail  = 128 // of the ring in the same half
	ringWant  = 256
	ringHead  = 512 // of the ring in the other half
	ringSleep = 640
	ringDone  = 768
)

// States of a side.
const (
	StateOpen    = 0
	StateClosed  = 1
	StateAborted = 2
)

// The bits above the state tell which of the slot's connections it is.
const (
	turnUnit = 4
	turnMask = 1<<31 - turnUnit
)

// Kinds of records.
const (
	kindMessage = 1 << 32
	kindPad     = 2 << 32
)

// Conn is the dialing side of a connection.
type Conn struct {
	link   *Conduit
	slot   slot
	number int
	tail   uint64    // of the ring out
	head   uint64    // of the ring in
	rung   [2]uint64 // the peer's sleep and want words when they were last rung for
}

// Conn returns the connection in a slot, which was not used before.
func (c *Conduit) Conn(number int) *Conn {
	return &Conn{link: c, slot: c.slots[number], number: number}
}

// own and theirs return words in this side's control area and in the other's.
func (c *Conn) own(at int) *atomic.Uint64    { return at64(c.slot.mem, c.slot.control+at) }
func (c *Conn) theirs(at int) *atomic.Uint64 { return at64(c.slot.theirs, c.slot.control+at) }

// SetTail publishes any position as the ring's tail.
func (c *Conn) SetTail(v uint64) { c.own(ringTail).Store(v) }

// SetState sets this side's state.
func (c *Conn) SetState(v uint32) {
	c.ownState().Store(c.ownState().Load()&turnMask | v)
	c.link.Kick(c.number)
}

// Done reports whether the other side no longer uses the slot.
func (c *Conn) Done() bool { return c.Peer() != StateOpen && c.peer()>>31 == 0 }

// Peer returns the other side's state.
func (c *Conn) Peer() uint32 {
	if !c.taken() {
		return StateOpen
	}
	return c.peer() & 3
}

// taken reports whether the other side has taken the connection.
func (c *Conn) taken() bool { return c.peer()&turnMask == c.ownState().Load()&turnMask }

func (c *Conn) ownState() *atomic.Uint32 { return at32(c.slot.mem, c.slot.control+state) }

func (c *Conn) peer() uint32 { return at32(c.slot.theirs, c.slot.control+state).Load() }

// WantsRoom reports whether the other side waits for room in its ring.
func (c *Conn) WantsRoom() bool { return c.theirs(ringWant).Load()&1 != 0 }

// Reset prepares a slot for another connection, once neither side uses it any more.
func (c *Conn) Reset() {
	clear(c.slot.mem[c.slot.control:][:controlSize])
	c.tail, c.head, c.rung = 0, 0, [2]uint64{}
}

// kick kicks if the peer has set one of its alarms since the last kick.
func (c *Conn) kick(which, at int) {
	if w := c.theirs(at).Load(); w&1 != 0 && w != c.rung[which] {
		c.rung[which] = w
		c.link.Kick(c.number)
	}
}

// Put writes a record, and does not publish it. It returns false if there is no room.
func (c *Conn) Put(msg []byte) bool {
	size := uint64(8 + (len(msg)+7)&^7)
	head := c.theirs(ringHead).Load()
	at := c.tail
	if left := ringSize - at%ringSize; left < size {
		if at+left+size-head > ringSize || left < 8 {
			return false
		}
		c.putHeader(at, kindPad|left)
		at += left
	}
	if at+size+8-head > ringSize { // room for a pad must always be left
		return false
	}
	c.putHeader(at, kindMessage|uint64(len(msg)))
	copy(c.slot.mem[c.slot.ring+int(at%ringSize)+8:], msg)
	c.tail = at + size
	return true
}

func (c *Conn) putHeader(at, h uint64) {
	binary.LittleEndian.PutUint64(c.slot.mem[c.slot.ring+int(at%ringSize):], h)
}

// Publish publishes the records of Put, and wakes the peer if it sleeps.
func (c *Conn) Publish() {
	c.SetTail(c.tail)
	c.kick(0, ringSleep)
}

// Get waits for the peer's next message, but not longer than limit.
func (c *Conn) Get(limit time.Duration) ([]byte, error) {
	end := time.Now().Add(limit)
	for {
		if c.head == c.theirs(ringTail).Load() {
			if time.Now().After(end) {
				return nil, fmt.Errorf("no message within %v, the peer's state is %d", limit, c.Peer())
			}
			time.Sleep(50 * time.Microsecond)
			continue
		}
		off := int(c.head % ringSize)
		h := binary.LittleEndian.Uint64(c.slot.theirs[c.slot.ring+off:])
		n := int(uint32(h))
		if h&^(1<<32-1) == kindPad {
			c.free(uint64(n))
			continue
		}
		msg := append([]byte(nil), c.slot.theirs[c.slot.ring+off+8:][:n]...)
		c.free(uint64(8 + (n+7)&^7))
		return msg, nil
	}
}

func (c *Conn) free(n uint64) {
	c.head += n
	at32(c.slot.mem, c.slot.control+ringDone).Store(uint32(c.head))
	c.own(ringHead).Store(c.head)
	c.kick(1, ringWant)
}

// Types of the session's messages.
const (
	Data      = 2
	OfferRead = 4
	ShutdownM = 11
	CloseM    = 12
	AskInbox  = 19
	PingM     = 15
	Note      = 24
)

// SessionMessage returns a message of the session.
func SessionMessage(kind uint8, body string) []byte {
	return append([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, body...)
}

// Negotiate returns the first message of a session on a ring.
func Negotiate() []byte {
	b := make([]byte, 8+40)
	b[0] = 1
	copy(b[8:], "SANc")
	binary.LittleEndian.PutUint16(b[12:], Version)
	binary.LittleEndian.PutUint32(b[20:], 64<<10) // largest message
	return b
}

// Establish negotiates.
func (c *Conn) Establish(limit time.Duration) error {
	if !c.Put(Negotiate()) {
		return fmt.Errorf("no room to negotiate")
	}
	c.Publish()
	m, err := c.Get(limit)
	if err == nil && (len(m) < 48 || m[0] != 1 || string(m[8:12]) != "SANc") {
		err = fmt.Errorf("the first message is % x", m)
	}
	return err
}
