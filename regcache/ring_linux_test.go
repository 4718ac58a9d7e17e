package regcache

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ring is the part of io_uring that fakeNIC needs (include/uapi/linux/io_uring.h).
type ring struct {
	fd     int
	pipe   [2]int
	mu     sync.Mutex // guards what follows
	free   []int
	sq, cq []byte
	sqes   []byte
	params ringParams
}

type ringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     ringOffsets
	cq                                                                     ringOffsets
}

type ringOffsets struct {
	head, tail, mask, entries, flags, dropped, array, _ uint32
	_                                                   uint64
}

const (
	ringSlots            = 8192
	ringRegisterBuffers2 = 15
	ringUpdateBuffers    = 16
	ringSparse           = 1
	ringWriteFixed       = 5
	ringGetEvents        = 1
	ringOffsetCQ         = 0x8000000
	ringOffsetSQEs       = 0x10000000
	ringPiece            = 32 << 10 // fits a pipe
)

type ringRegister struct {
	nr, flags  uint32
	_          uint64
	data, tags uint64
}

type ringUpdate struct {
	offset, _  uint32
	data, tags uint64
	nr, _      uint32
}

func newRing() (*ring, error) {
	r := &ring{}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&r.params)), 0)
	if errno != 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", errno)
	}
	r.fd = int(fd)
	p := &r.params
	var err error
	mapping := func(offset int64, n uint32) []byte {
		b, e := unix.Mmap(r.fd, offset, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if e != nil {
			err = e
		}
		return b
	}
	r.sq = mapping(0, p.sq.array+p.sqEntries*4)
	// struct io_cqring_offsets: cqes is where sq has the field after dropped.
	r.cq = mapping(ringOffsetCQ, p.cq.dropped+p.cqEntries*16)
	r.sqes = mapping(ringOffsetSQEs, p.sqEntries*64)
	if err != nil {
		return nil, fmt.Errorf("io_uring: mmap: %w", err)
	}
	table := ringRegister{nr: ringSlots, flags: ringSparse}
	if err := r.control(ringRegisterBuffers2, unsafe.Pointer(&table), unsafe.Sizeof(table)); err != nil {
		return nil, fmt.Errorf("io_uring: sparse buffers: %w", err)
	}
	for slot := ringSlots - 1; slot >= 0; slot-- {
		r.free = append(r.free, slot)
	}
	if err := unix.Pipe2(r.pipe[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *ring) close() {
	unix.Close(r.fd)
	unix.Close(r.pipe[0])
	unix.Close(r.pipe[1])
	unix.Munmap(r.sq)
	unix.Munmap(r.cq)
	unix.Munmap(r.sqes)
}

func (r *ring) control(op int, arg unsafe.Pointer, n uintptr) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), uintptr(op), uintptr(arg), n, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (r *ring) register(addr uintptr, n int) (slot int, err error) {
	r.mu.Lock()
	if len(r.free) == 0 {
		r.mu.Unlock()
		return 0, syscall.ENOMEM
	}
	slot = r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.mu.Unlock()
	if err := r.update(slot, addr, n); err != nil {
		r.mu.Lock()
		r.free = append(r.free, slot)
		r.mu.Unlock()
		return 0, err
	}
	return slot, nil
}

func (r *ring) unregister(slot int) error {
	err := r.update(slot, 0, 0)
	r.mu.Lock()
	r.free = append(r.free, slot)
	r.mu.Unlock()
	return err
}

func (r *ring) update(slot int, addr uintptr, n int) error {
	type iovec struct{ base, n uintptr }
	v := &iovec{addr, uintptr(n)}
	u := &ringUpdate{offset: uint32(slot), data: uint64(uintptr(unsafe.Pointer(v))), nr: 1}
	p := escape(v)
	err := r.control(ringUpdateBuffers, unsafe.Pointer(u), unsafe.Sizeof(*u))
	escape(p)
	return err
}

var escaped atomic.Pointer[any]

// escape keeps v alive and on the heap until the call.
func escape(v any) any {
	escaped.Store(&v)
	return v
}

// read makes the kernel write n bytes at addr, from the pages that were pinned for slot, to a pipe.
func (r *ring) read(slot int, addr uintptr, n int) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]byte, 0, n)
	for n > 0 {
		piece := min(n, ringPiece)
		if err := r.writeFixed(slot, addr, piece); err != nil {
			return nil, err
		}
		at := len(out)
		out = out[:at+piece]
		for got := at; got < at+piece; {
			m, err := unix.Read(r.pipe[0], out[got:at+piece])
			if err == unix.EINTR {
				continue
			}
			if err != nil || m == 0 {
				return nil, fmt.Errorf("pipe: %d, %v", m, err)
			}
			got += m
		}
		n -= piece
		addr += uintptr(piece)
	}
	return out, nil
}

func (r *ring) writeFixed(slot int, addr uintptr, n int) error {
	u32 := func(b []byte, at uint32) *uint32 { return (*uint32)(unsafe.Pointer(&b[at])) }
	p := &r.params
	tail := atomic.LoadUint32(u32(r.sq, p.sq.tail))
	at := tail & *u32(r.sq, p.sq.mask)
	sqe := r.sqes[at*64 : at*64+64]
	clear(sqe)
	sqe[0] = ringWriteFixed
	*(*int32)(unsafe.Pointer(&sqe[4])) = int32(r.pipe[1])
	*(*uint64)(unsafe.Pointer(&sqe[8])) = ^uint64(0) // offset: none
	*(*uint64)(unsafe.Pointer(&sqe[16])) = uint64(addr)
	*(*uint32)(unsafe.Pointer(&sqe[24])) = uint32(n)
	*(*uint16)(unsafe.Pointer(&sqe[40])) = uint16(slot)
	*u32(r.sq, p.sq.array+at*4) = at
	atomic.StoreUint32(u32(r.sq, p.sq.tail), tail+1)
	submit := uintptr(1)
	for {
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), submit, 1, ringGetEvents, 0, 0)
		if errno == 0 || errno == unix.EINTR {
			submit = 0
		} else {
			return fmt.Errorf("io_uring_enter: %w", errno)
		}
		head := atomic.LoadUint32(u32(r.cq, p.cq.head))
		if head == atomic.LoadUint32(u32(r.cq, p.cq.tail)) {
			continue
		}
		cqe := p.cq.dropped + (head&*u32(r.cq, p.cq.mask))*16 // see newRing
		result := *(*int32)(unsafe.Pointer(&r.cq[cqe+8]))
		atomic.StoreUint32(u32(r.cq, p.cq.head), head+1)
		if int(result) != n {
			return fmt.Errorf("io_uring: write of %d from fixed buffer %d: %d", n, slot, result)
		}
		return nil
	}
}
