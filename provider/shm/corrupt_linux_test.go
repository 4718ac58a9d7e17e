package shm

import (
	"errors"
	"math/rand"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// A peer that writes arbitrary values into the shared memory loses its connection. It causes no crash,
// no hang, and no access outside the ring. (Package ring tests what a ring does.)
func TestPeerThatCorruptsTheSlot(t *testing.T) {
	// An end can write only its own half.
	corrupt := func(p *peer, at, n uintptr) {
		c := unsafe.Pointer(p.Endpoint.(*endpoint).slot.own.control)
		for i := range n {
			*(*byte)(unsafe.Add(c, at+i)) = 0xff
		}
	}
	var all slotControl
	t.Run("of what comes", func(t *testing.T) {
		a, b := pair(t, Config{})
		corrupt(a, unsafe.Offsetof(all.out), unsafe.Sizeof(all.out))
		var ev session.Event
		if b.Poll(&ev) || !errors.Is(b.Err(), syscall.ECONNRESET) {
			t.Errorf("the receiver finds %v", b.Err())
		}
		if b.Poll(&ev) || b.Reserve(1, 1) != nil || b.ReserveControl(1) != nil {
			t.Error("the connection goes on")
		}
	})
	t.Run("of what goes", func(t *testing.T) {
		a, b := pair(t, Config{})
		a.send([]byte("a message that was sent before"))
		corrupt(a, unsafe.Offsetof(all.in), unsafe.Sizeof(all.in))
		b.fill(ring.MaxMessage)
		if !errors.Is(b.Err(), syscall.ECONNRESET) {
			t.Errorf("the sender finds %v", b.Err())
		}
		if b.Poll(new(session.Event)) || b.Reserve(1, 1) != nil || b.ReserveControl(1) != nil {
			t.Error("the connection goes on")
		}
	})
}

// The same with random writes while both ends use the connection.
func TestRandomCorruptionDoesNoHarm(t *testing.T) {
	leaks(t)
	for seed := range int64(200) {
		a, b, err := connected(Config{})
		if err != nil {
			t.Fatal(err)
		}
		a.Start(newSleeper())
		b.Start(newSleeper())
		r := rand.New(rand.NewSource(seed))
		e := a.(*endpoint)
		var ev session.Event
		for range 300 {
			if n := 1 + r.Intn(session.MaxControl); r.Intn(9) == 0 && a.ReserveControl(n) != nil {
				a.CommitControl(n)
			} else if buf := a.Reserve(1, 1+r.Intn(2000)); buf != nil {
				a.Commit(len(buf))
			}
			if r.Intn(20) == 0 {
				mem := unsafe.Slice((*byte)(unsafe.Pointer(e.slot.own.control)), controlSize)
				mem = mem[unsafe.Sizeof(sideState{}):] // skips the states: changing them could close the connection in order
				if r.Intn(4) == 0 {
					mem = unsafe.Slice((*byte)(unsafe.Pointer(e.slot.own.cells)), cellsSize)
				}
				mem[r.Intn(len(mem))] ^= byte(1 << r.Intn(8))
			}
			if r.Intn(20) == 0 {
				e.slot.own.ring[r.Intn(32<<10)] ^= byte(r.Intn(256))
			}
			for r.Intn(3) > 0 && b.Poll(&ev) {
				switch {
				case ev.Kind == session.Message && len(ev.Msg) > ring.MaxMessage:
					t.Fatalf("seed %d: a message of %d bytes", seed, len(ev.Msg))
				case r.Intn(2) == 0:
					b.Keep()
				default:
					b.Drop()
				}
			}
			for r.Intn(3) > 0 && b.Front() != nil {
				b.Release()
			}
		}
		end(a)
		end(b)
	}
}
