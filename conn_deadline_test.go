package san

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
)

// A deadline passes in the middle of a large Write: the returned count is exact, the slice is no longer
// read, and the stream continues from there.
func TestWriteDeadlineInTheMiddle(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, taken := range []int{0, 1, 100 << 10, 3 << 20} {
			t.Run(fmt.Sprintf("%d read", taken), func(t *testing.T) {
				client, server := l.pipe(t)
				server.SetReadDeadline(time.Now().Add(testTimeout))
				data := make([]byte, 64<<20)
				position(data, 0)

				head := make([]byte, taken)
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, err := io.ReadFull(server, head); err != nil {
						t.Error(err)
					}
					client.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
				})
				n, err := client.Write(data)
				wantOpError(t, err, "write", os.ErrDeadlineExceeded)
				if n < 0 || n >= len(data) {
					t.Fatalf("wrote %d of %d", n, len(data))
				}
				clear(data)
				wg.Wait()
				client.SetWriteDeadline(time.Now().Add(testTimeout))
				if t.Failed() {
					return
				}
				wantPositions(t, head, 0)

				more := make([]byte, 1<<20)
				position(more, n)
				wg.Go(func() {
					if _, err := client.Write(more); err != nil {
						t.Error(err)
					}
					client.Close()
				})
				rest, err := io.ReadAll(server)
				wg.Wait()
				if err != nil {
					t.Fatal(err)
				}
				wantPositions(t, rest, taken)
				if got := taken + len(rest); got != n+len(more) {
					t.Errorf("%d bytes arrived, %d were written", got, n+len(more))
				}
			})
		}
	})
}

// Many deadlines, which pass at random moments of a transfer.
func TestWriteDeadlineAtAnyMoment(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		server.SetReadDeadline(time.Now().Add(2 * testTimeout))
		var wg sync.WaitGroup
		var got int
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(7, 7))
			buf := make([]byte, 2<<20)
			for {
				b := buf[:1+rnd.IntN(len(buf))]
				n, err := server.Read(b)
				if i := misplaced(b[:n], got); i >= 0 {
					t.Errorf("byte %d of the stream is not what was written there", i)
					server.Close()
					return
				}
				got += n
				if err == io.EOF {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
		rnd := rand.New(rand.NewPCG(8, 8))
		sent := 0
		for range 200 {
			data := make([]byte, 1+rnd.IntN(4<<20))
			position(data, sent)
			client.SetWriteDeadline(time.Now().Add(time.Duration(rnd.IntN(1000)) * time.Microsecond))
			n, err := client.Write(data)
			clear(data)
			sent += n
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
		}
		client.Close()
		wg.Wait()
		if got != sent {
			t.Errorf("%d bytes arrived, %d were written", got, sent)
		}
	})
}

// After a Read has returned, bytes that arrive later are not written to its slice.
func TestReadDeadlineLeavesTheSliceAlone(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		var sent int
		for i := range 100 {
			b := make([]byte, 4<<20)
			server.SetReadDeadline(time.Now().Add(time.Duration(i*10) * time.Microsecond))
			n, err := server.Read(b)
			if err != nil {
				wantOpError(t, err, "read", os.ErrDeadlineExceeded)
			}
			clear(b)
			data := make([]byte, 300<<10)
			position(data, sent)
			client.SetWriteDeadline(time.Now().Add(testTimeout))
			if _, err := client.Write(data); err != nil {
				t.Fatal(err)
			}
			server.SetReadDeadline(time.Now().Add(testTimeout))
			got := make([]byte, len(data))
			if _, err := io.ReadFull(server, got); err != nil {
				t.Fatal(err)
			}
			wantPositions(t, got, sent)
			sent += len(data)
			if n != 0 || len(bytes.Trim(b, "\x00")) != 0 {
				t.Fatalf("round %d: the Read that had returned %d bytes found more", i, n)
			}
		}
	})
}

func TestDeadlineInThePastBeatsReadyData(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		send(t, client, server, "hello")
		if _, err := io.WriteString(client, "ready"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		past := time.Now().Add(-time.Second)
		server.SetDeadline(past)
		n, err := server.Read(make([]byte, 10))
		if oe := wantOpError(t, err, "read", os.ErrDeadlineExceeded); n != 0 || !oe.Timeout() ||
			oe.Source.String() != server.LocalAddr().String() || oe.Addr.String() != server.RemoteAddr().String() {
			t.Errorf("read %d, %+v", n, oe)
		}
		for _, b := range [][]byte{nil, make([]byte, 10)} {
			n, err = server.Write(b)
			if wantOpError(t, err, "write", os.ErrDeadlineExceeded); n != 0 {
				t.Errorf("wrote %d of %d", n, len(b))
			}
		}
		server.SetDeadline(time.Time{})
		if n, err := server.Read(make([]byte, 10)); n != 4 || err != nil {
			t.Errorf("afterwards: read %d, %v", n, err)
		}
		if err := server.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		server.SetDeadline(past) // an expired deadline comes before the end of the stream, too
		_, err = server.Write(make([]byte, 10))
		wantOpError(t, err, "write", os.ErrDeadlineExceeded)
	})
}
