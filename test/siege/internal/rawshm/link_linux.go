package rawshm

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The layout of half a segment.
const (
	bellSize    = 132 << 10
	controlSize = 1 << 10
	cellsSize   = 16 * (8 + 8 + 256)
	ringSize    = 4 << 20
	ringAlign   = 64 << 10

	FirstSlots = 16
	mostSlots  = 256
	linkSlots  = 16384
)

func ringsAt(slots int) int {
	return (bellSize + slots*(controlSize+cellsSize) + ringAlign - 1) / ringAlign * ringAlign
}

// HalfSize returns the length in bytes of half a segment with a number of slots.
func HalfSize(slots int) int { return ringsAt(slots) + slots*ringSize }

// NewHalf makes half a segment, as a sealed memfd, and maps it.
func NewHalf(slots int) (fd int, mem []byte, err error) {
	fd, err = unix.MemfdCreate("siege", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, nil, err
	}
	if err = unix.Ftruncate(fd, int64(HalfSize(slots))); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		mem, err = mapHalf(fd, slots, unix.PROT_READ|unix.PROT_WRITE)
	}
	if err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, mem, nil
}

func mapHalf(fd, slots, prot int) ([]byte, error) {
	return unix.Mmap(fd, 0, HalfSize(slots), prot, unix.MAP_SHARED|unix.MAP_NORESERVE)
}

// NewDoorbell returns an eventfd as doorbells are: ringing takes from its count.
func NewDoorbell() (fd int, err error) {
	fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK|unix.EFD_SEMAPHORE)
	if err != nil {
		return -1, err
	}
	var count [8]byte
	binary.NativeEndian.PutUint64(count[:], 1<<63)
	if _, err := unix.Write(fd, count[:]); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// A Conduit is the dialing end of a link.
type Conduit struct {
	Socket int
	Bell   int   // the peer's doorbell
	Halves []int // descriptors of the peer's halves
	slots  []slot
	maps   [][2][]byte
	asleep uint64 // the peer's value when it was last rung
}

// slot is a connection's place in a segment.
type slot struct {
	mem, theirs   []byte // this side's half of its segment, and the other side's
	control, ring int    // offsets in the halves
}

// Open makes a link according to the protocol, except that the caller chooses the doorbell, which stays
// the caller's.
func Open(port uint16, doorbell int) (*Conduit, error) {
	socket, err := Dial(port)
	if err != nil {
		return nil, err
	}
	c := &Conduit{Socket: socket, Bell: -1}
	if err := c.handshake(doorbell); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Conduit) handshake(doorbell int) error {
	fd, mem, err := NewHalf(FirstSlots)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := Send(c.Socket, Message{Kind: Link, Number: FirstSlots}, fd, doorbell); err != nil {
		unix.Munmap(mem)
		return err
	}
	m, fds, err := Receive(c.Socket, 10*time.Second)
	if err == nil && (m.Kind != LinkReply || m.Code != OK || len(fds) != 2) {
		err = CodeError{m.Kind, m.Code}
	}
	if err != nil {
		unix.Munmap(mem)
		return err
	}
	c.Bell = fds[1]
	return c.add(mem, fds[0], FirstSlots)
}

// CodeError is a reply with another code than expected.
type CodeError struct{ Kind, Code uint8 }

func (e CodeError) Error() string { return fmt.Sprintf("reply of kind %d, code %d", e.Kind, e.Code) }

func (c *Conduit) add(mem []byte, half, slots int) error {
	c.Halves = append(c.Halves, half)
	theirs, err := mapHalf(half, slots, unix.PROT_READ)
	c.maps = append(c.maps, [2][]byte{mem, theirs})
	if err != nil {
		return err
	}
	for i := range slots {
		c.slots = append(c.slots, slot{mem, theirs, bellSize + i*controlSize, ringsAt(slots) + i*ringSize})
	}
	return nil
}

// Slots returns how many connections the link has room for.
func (c *Conduit) Slots() int { return len(c.slots) }

// Extend adds the next segment. The first ones each double the number of slots.
func (c *Conduit) Extend() error {
	slots := min(len(c.slots), mostSlots, linkSlots-len(c.slots))
	fd, mem, err := NewHalf(slots)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := Send(c.Socket, Message{Kind: Segment, Number: uint32(slots)}, fd); err != nil {
		unix.Munmap(mem)
		return err
	}
	m, fds, err := Receive(c.Socket, 10*time.Second)
	if err == nil && (m.Kind != SegmentReply || m.Code != OK || len(fds) != 1) {
		err = CodeError{m.Kind, m.Code}
	}
	if err != nil {
		unix.Munmap(mem)
		return err
	}
	return c.add(mem, fds[0], slots)
}

// Connect requests a connection in a slot, and waits until the peer has taken or refused it.
func (c *Conduit) Connect(number int) error {
	if err := c.Ask(number); err != nil {
		return err
	}
	conn := c.Conn(number)
	for end := time.Now().Add(10 * time.Second); !conn.taken(); {
		m, _, err := Receive(c.Socket, time.Millisecond)
		if err == nil {
			return CodeError{m.Kind, m.Code}
		}
		if !conn.taken() && time.Now().After(end) {
			return err
		}
	}
	return nil
}

// Ask requests a connection in a slot.
func (c *Conduit) Ask(number int) error {
	conn := c.Conn(number)
	conn.ownState().Store((conn.peer()&turnMask + turnUnit) & turnMask)
	return Send(c.Socket, Message{Kind: Connect, Number: uint32(number)})
}

// Kick reports news of a slot, of both kinds, to the peer, and rings if the peer sleeps.
func (c *Conduit) Kick(number int) {
	const groups, slots = 128, 2048
	bell := c.maps[0][0]
	at64(bell, slots+8*number).Add(1<<32 + 1)
	at32(bell, groups+number/64*4).Add(1)
	if asleep := at64(c.maps[0][1], 0).Load(); asleep&1 != 0 && asleep != c.asleep {
		c.asleep = asleep
		c.Ring()
	}
}

// Ring rings the peer's doorbell, whether or not it sleeps.
func (c *Conduit) Ring() {
	var b [8]byte
	if _, err := unix.Read(c.Bell, b[:]); err == unix.EINVAL || err == unix.EAGAIN {
		unix.SendmsgN(c.Bell, b[:1], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) // before Linux 5.8
	}
}

// Sleep makes the peer ring for its next news.
func (c *Conduit) Sleep() {
	at64(c.maps[0][0], 0).Store(at64(c.maps[0][0], 0).Load()>>32<<32 + 1<<32 + 1)
}

// Close releases everything.
func (c *Conduit) Close() {
	unix.Close(c.Socket)
	if c.Bell >= 0 {
		unix.Close(c.Bell)
	}
	for i, m := range c.maps {
		unix.Close(c.Halves[i])
		unix.Munmap(m[0])
		unix.Munmap(m[1])
	}
	c.maps, c.Halves = nil, nil
}

// The words of shared memory. All offsets are multiples of their size.

func at32(mem []byte, off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&mem[off])) }
func at64(mem []byte, off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&mem[off])) }
