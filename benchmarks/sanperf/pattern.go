package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
)

// stampLen is the length of the message number at the start of each message
// that has room for it.
const stampLen = 8

// A pattern is the content of a stream's messages, known to both ends: the number of the
// message, so that a misplaced message is noticed, and fixed random bytes.
type pattern struct {
	fill []byte // one message; its stamp is not used
}

func newPattern(size int) pattern {
	fill := make([]byte, size)
	rand.NewChaCha8([32]byte{}).Read(fill)
	return pattern{fill}
}

// message returns a message to be stamped and written.
func (p pattern) message() []byte { return bytes.Clone(p.fill) }

// stamp puts the message number seq into m, if there is room.
func (p pattern) stamp(m []byte, seq uint64) {
	if len(m) >= stampLen {
		binary.LittleEndian.PutUint64(m, seq)
	}
}

// check returns an error about the first byte of got that differs from the stream at offset.
func (p pattern) check(offset int64, got []byte) error {
	size := int64(len(p.fill))
	var stamp [stampLen]byte
	for len(got) > 0 {
		at := offset % size
		n := min(size-at, int64(len(got)))
		want := p.fill[at : at+n]
		if at < stampLen && size >= stampLen {
			binary.LittleEndian.PutUint64(stamp[:], uint64(offset/size))
			n = min(n, stampLen-at)
			want = stamp[at : at+n]
		}
		if !bytes.Equal(got[:n], want) {
			i := 0
			for got[i] == want[i] {
				i++
			}
			return fmt.Errorf("wrong data: byte %d of the stream (byte %d of message %d) is %#02x and should be %#02x",
				offset+int64(i), at+int64(i), offset/size, got[i], want[i])
		}
		got, offset = got[n:], offset+n
	}
	return nil
}
