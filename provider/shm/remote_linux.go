package shm

import (
	"crypto/rand"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// Reading the peer's memory, by process_vm_readv.
//
// The exposer fills an entry of its table in the slot and tells the peer its key. The
// peer reads in chunks and commits each by compare-and-swap on the entry's word. The
// exposer revokes the access by a swap of the same word, which tells it how much the
// peer committed. A reader caught in the middle of a chunk may have read bytes that have
// changed since, and fails to commit them. (The kernel does not enforce any of this: a
// peer that may read this process's memory may read all of it.)
//
//	word  generation (31 bits) | revoked (1 bit) | taken (32 bits)
//	key   generation | index of the entry (8 bits)
const (
	remoteMax   = 1 << 30   // of an exposure and of a read, in bytes
	remoteChunk = 256 << 10 // per commit: larger chunks do not stay in the cache

	wordRevoked = 1 << 32
	wordTaken   = 1<<32 - 1
	generations = 1<<31 - 1
)

// A nonce is random for each process. Every read fetches the peer's along with the data,
// in one system call and hence from one address space. That reveals that the process id
// has been reused, or that the peer has called exec.
type nonce [16]byte

// ourNonce is a global, so that its address never changes.
var (
	ourNonce  nonce
	nonceOnce sync.Once
)

func localNonce() (at uint64, n nonce) {
	nonceOnce.Do(func() { rand.Read(ourNonce[:]) })
	return uint64(uintptr(unsafe.Pointer(&ourNonce))), ourNonce
}

var (
	errForeign = fmt.Errorf("shm: the peer's memory belongs to another process: %w", syscall.ECONNRESET)
	errRange   = errors.New("shm: remote access outside the exposed range")
)

// remote is the part of an endpoint that deals with remote access.
type remote struct {
	completions atomic.Int32 // queued, so that Poll need not lock

	mu         sync.Mutex // guards what follows
	done       []session.Event
	closed     bool
	reading    int           // Reads in the system call
	idle       chan struct{} // closed when reading drops to 0; nil: nobody waits
	generation uint64
	exposed    [exposures]exposedRange
}

// exposedRange is this side's own record of an exposure: the peer can overwrite the entry
// in shared memory.
type exposedRange struct {
	key  uint64 // 0: free
	size int
}

// Expose implements session.Endpoint.
func (e *endpoint) Expose(b []byte, rights session.Rights) (session.Descriptor, error) {
	if rights == 0 || len(b) == 0 || len(b) > remoteMax ||
		e.link.cfg.Disable&session.FeatureCMA != 0 {
		return session.Descriptor{}, fmt.Errorf("shm: cannot expose %d bytes with rights %d: %w", len(b), rights, syscall.EINVAL)
	}
	r := &e.remote
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return session.Descriptor{}, errClosed
	}
	for i := range r.exposed {
		if r.exposed[i].key != 0 {
			continue
		}
		r.generation = r.generation%generations + 1
		d := session.Descriptor{
			Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))),
			Key:  r.generation<<8 | uint64(i),
			Len:  uint64(len(b)),
		}
		r.exposed[i] = exposedRange{d.Key, len(b)}
		x := &e.control.exposed[e.side][i]
		x.addr.Store(d.Addr)
		x.len.Store(d.Len)
		if rights&session.RemoteRead == 0 {
			x.len.Store(0) // nothing to read; and there is no remote write
		}
		x.word.Store(r.generation << 33)
		x.key.Store(d.Key)
		return d, nil
	}
	return session.Descriptor{}, fmt.Errorf("shm: %d ranges are exposed: %w", exposures, syscall.ENOBUFS)
}

// Revoke implements session.Endpoint. It does not block.
func (e *endpoint) Revoke(d session.Descriptor) (taken int) {
	r := &e.remote
	i, generation := d.Key&0xff, d.Key>>8
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || i >= exposures || d.Key == 0 || r.exposed[i].key != d.Key {
		return 0
	}
	x := &e.control.exposed[e.side][i]
	x.key.Store(0)
	n := x.word.Swap(generation<<33|wordRevoked) & wordTaken
	// The peer may have written anything there.
	taken = int(min(n, uint64(r.exposed[i].size)))
	r.exposed[i] = exposedRange{}
	return taken
}

// Read implements session.Endpoint. The bytes are here when it returns; the
// completion follows like a NIC's.
func (e *endpoint) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	r := &e.remote
	r.mu.Lock()
	if r.closed || !e.link.canRead {
		r.mu.Unlock()
		return errClosed
	}
	r.reading++
	r.mu.Unlock()

	err := e.read(into, from, off)

	r.mu.Lock()
	r.done = append(r.done, session.Event{Kind: session.ReadDone, ID: id, Err: err})
	r.completions.Add(1)
	r.reading--
	if r.reading == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
	r.mu.Unlock()
	// As for a message, wake the session only if it has armed: otherwise it polls anyway,
	// and a wake-up would make it start a goroutine for each Read.
	if e.enter() {
		if sleep := &e.recv.control.sleep; sleep.Load() != 0 && sleep.Swap(0) != 0 {
			e.wake(session.RecvReady)
		}
		e.inside.Add(-1)
	}
	return nil
}

func (e *endpoint) read(into []byte, from session.Descriptor, off int) error {
	i := from.Key & 0xff
	if i >= exposures {
		return errRange
	}
	x := &e.control.exposed[1-e.side][i]
	if x.key.Load() != from.Key || from.Key == 0 {
		return session.ErrRevoked
	}
	// The entry counts, not the descriptor: the peer wrote both, but only the entry
	// is revoked.
	addr, size := x.addr.Load(), x.len.Load()
	if from.Addr != addr || off < 0 || uint64(off)+uint64(len(into)) > size || size > remoteMax {
		return x.excuse(from.Key, errRange)
	}
	word := from.Key>>8<<33 | uint64(off)
	for len(into) > 0 {
		n := min(len(into), remoteChunk)
		if err := e.link.readPeer(into[:n], addr+(word&wordTaken)); err != nil {
			return x.excuse(from.Key, err)
		}
		if !x.word.CompareAndSwap(word, word+uint64(n)) {
			if w := x.word.Load(); w>>33 == word>>33 && w&wordRevoked == 0 {
				return fmt.Errorf("%w: reads with gaps", errRange)
			}
			return session.ErrRevoked
		}
		word += uint64(n)
		into = into[n:]
	}
	return nil
}

// excuse returns ErrRevoked instead of err if the exposer has revoked the access
// meanwhile: its memory may be unmapped, and the entry may hold another exposure.
func (x *exposure) excuse(key uint64, err error) error {
	if x.key.Load() != key {
		return session.ErrRevoked
	}
	return err
}

// readPeer copies len(b) bytes from the peer's address space. The system call tells Go's
// scheduler that it may block: a peer that withholds its pages stops only this thread.
func (l *link) readPeer(b []byte, addr uint64) error {
	var got nonce
	local := [2]unix.Iovec{{Base: &got[0]}, {Base: &b[0]}}
	local[0].SetLen(len(got))
	local[1].SetLen(len(b))
	far := [2]unix.RemoteIovec{{Base: uintptr(l.nonceAt), Len: len(got)}, {Base: uintptr(addr), Len: len(b)}}
	for {
		n, err := unix.ProcessVMReadv(l.pid, local[:], far[:], 0)
		runtime.KeepAlive(b)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("shm: process_vm_readv: %w", err)
		case n >= len(got) && got != l.nonce:
			clear(b) // do not leak another process's memory
			return errForeign
		case n != len(got)+len(b):
			return fmt.Errorf("shm: process_vm_readv: %d bytes of %d: %w", n-len(got), len(b), syscall.EFAULT)
		}
		return nil
	}
}

// probeRead finds out by trying whether this process may read the peer's memory, which
// has to be visible, dumpable and not protected by ptrace_scope.
func (l *link) probeRead() bool {
	if l.cfg.Disable&session.FeatureCMA != 0 || l.pid <= 0 || l.nonceAt == 0 || bits.UintSize < 64 {
		return false // a 32-bit process cannot address all memory of a 64-bit one
	}
	var b nonce
	return l.readPeer(b[:], l.nonceAt) == nil && b == l.nonce
}

// completion hands out the oldest completion.
func (r *remote) completion(ev *session.Event) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.done) == 0 {
		return false
	}
	*ev = r.done[0]
	r.done = r.done[:copy(r.done, r.done[1:])]
	r.completions.Add(-1)
	return true
}

// Write implements session.Endpoint; see Limits.CanWrite. It always fails, because the
// peer could not limit what process_vm_writev writes to.
func (e *endpoint) Write([]byte, session.Descriptor, int, uint32) error {
	return fmt.Errorf("shm: no remote write: %w", syscall.EOPNOTSUPP)
}

// close revokes all access and waits for Reads in progress. Those take microseconds,
// unless the peer, which runs as the same user, withholds its memory: then close waits
// without a bound, because the memory read into must not change afterwards.
func (r *remote) close(e *endpoint) {
	r.mu.Lock()
	r.closed = true
	for i := range r.exposed {
		if r.exposed[i].key != 0 {
			x := &e.control.exposed[e.side][i]
			x.key.Store(0)
			x.word.Or(wordRevoked)
			r.exposed[i] = exposedRange{}
		}
	}
	var idle chan struct{}
	if r.reading > 0 {
		if r.idle == nil {
			r.idle = make(chan struct{})
		}
		idle = r.idle
	}
	r.mu.Unlock()
	if idle != nil {
		<-idle
	}
}
