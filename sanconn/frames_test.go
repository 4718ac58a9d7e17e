package sanconn_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
)

// The bytes of a Write or a Commit are not mixed with those of others, even if the way back to TCP cuts
// the call in its middle, on TCP or on the session.
func TestConcurrentWritesAreNotMixed(t *testing.T) {
	const size, writers = 3 << 20, 3 // more than TCP takes unread
	times := 5
	if testing.Short() {
		times = 2
	}
	for name, write := range map[string]func(c *sanconn.Conn, p []byte) (units []int, err error){
		"Write": func(c *sanconn.Conn, p []byte) ([]int, error) {
			n, err := c.Write(p)
			return []int{n}, err
		},
		"WriteBuffers": func(c *sanconn.Conn, p []byte) ([]int, error) {
			n, err := c.WriteBuffers(&net.Buffers{p[:size/3], nil, p[size/3 : size/2], p[size/2:], nil})
			return []int{int(n)}, err
		},
		"Commit": func(c *sanconn.Conn, p []byte) (units []int, err error) {
			if p[0] != 'a' {
				n, err := c.Write(p)
				return []int{n}, err
			}
			for len(p) > 0 && err == nil {
				var room []byte
				if room, err = c.Reserve(len(p)); err == nil {
					n := copy(room, p)
					err = c.Commit(n)
					units, p = append(units, n), p[n:]
				}
			}
			return units, err
		},
	} {
		for way, goBack := range waysBack {
			t.Run(name+" "+way, func(t *testing.T) {
				for range times {
					a, b, err := newPair(newconn.Config{}, newconn.Config{})
					if err != nil {
						t.Fatal(err)
					}
					defer a.Close()
					defer b.Close()
					if way != "while it moves" {
						moveAgain(t, a, b)
						if err := newconn.HandleOf(a).Moved(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					all, begun := readSlowly(t, b)
					units := make([][]int, writers)
					var writing sync.WaitGroup
					for w := range writers {
						writing.Go(func() {
							var err error
							if units[w], err = write(a, bytes.Repeat([]byte{byte('a' + w)}, size)); err != nil {
								t.Error(err)
							}
						})
					}
					<-begun
					goBack(t, a, b)
					writing.Wait()
					a.CloseWrite()
					wantUnits(t, <-all, units)
				}
			})
		}
	}
}

var waysBack = map[string]func(t *testing.T, a, b *sanconn.Conn){
	"for good": takeFile,
	"and moves again": func(t *testing.T, a, b *sanconn.Conn) {
		if err := sanconn.LeaveSAN(a); err != nil {
			t.Error(err)
		}
		moveAgain(t, a, b)
	},
	"while it moves": func(t *testing.T, a, b *sanconn.Conn) {
		moveAgain(t, a, b) // while a Write is in TCP
		takeFile(t, a, b)
	},
}

func takeFile(t *testing.T, a, _ *sanconn.Conn) {
	f, err := a.File()
	if err != nil {
		t.Error(err)
		return
	}
	f.Close()
}

// moveAgain moves a connection as soon as that is possible.
func moveAgain(t *testing.T, a, b *sanconn.Conn) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	testenv.Eventually(t, time.Minute, func() error { // b may have to flush what came back before
		ea, eb := twin.Pair(twin.Config{})
		return movePair(ctx, a, b, ea, eb, sessions{})
	})
}

// readSlowly reads to the end, so slowly that Writes wait: the sleeps set its pace, and wait for
// nothing. begun is closed when the first bytes have come.
func readSlowly(t *testing.T, c *sanconn.Conn) (all <-chan []byte, begun <-chan struct{}) {
	read, first := make(chan []byte, 1), make(chan struct{})
	go func() {
		var got bytes.Buffer
		buf := make([]byte, 32<<10)
		for n := 0; ; n++ {
			if n%4 == 0 {
				time.Sleep(time.Millisecond)
			}
			k, err := c.Read(buf)
			got.Write(buf[:k])
			if n == 0 {
				close(first)
			}
			if err != nil {
				if err != io.EOF {
					t.Error(err)
				}
				read <- got.Bytes()
				return
			}
		}
	}()
	return read, first
}

// wantUnits checks that the stream consists of the writers' units: how many bytes each has written at a
// time, all of its own letter.
func wantUnits(t *testing.T, all []byte, units [][]int) {
	t.Helper()
	for at := 0; at < len(all); {
		w := int(all[at] - 'a')
		if len(units[w]) == 0 {
			t.Fatalf("%d more bytes of writer %d at %d", len(all)-at, w, at)
		}
		n := units[w][0]
		units[w] = units[w][1:]
		if k := bytes.Count(all[at:min(at+n, len(all))], all[at:at+1]); k != n {
			t.Fatalf("%d bytes of writer %d at %d, of which %d were written at a time", k, w, at, n)
		}
		at += n
	}
	for w, left := range units {
		if len(left) > 0 {
			t.Errorf("%d units of writer %d are missing", len(left), w)
		}
	}
}
