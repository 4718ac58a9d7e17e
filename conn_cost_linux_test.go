package san

import (
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// Large Writes go by RDMA from the program's own memory exactly on the lanes where they should. "By
// messages" includes the send buffer.
func TestLanesMoveBytesAsTheySay(t *testing.T) {
	for _, l := range sanLanes {
		if l.skipped() {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			client, server := l.sanPipe(t)
			// On a ring all bytes go through the ring. verbs uses RDMA reads if the peer can read, and
			// if that pays, which on devices without windows (rxe, siw) is not known in advance.
			rdma := l.provider != shm.Name && l.options.Threshold >= 0 && l.options.Disable&session.FeatureRDMARead == 0
			open := rdma && l.options.Threshold == 0 && inGuest != hwsim.Lane
			var wg sync.WaitGroup
			var sent int64
			wg.Go(func() {
				b := make([]byte, 8<<20)
				for i := range 10 { // memory is copied until that has cost as much as registering it
					if i >= 2 && (!rdma || client.Stats().DirectBytesSent > 0) {
						break
					}
					n, _ := client.Write(b)
					sent += int64(n)
				}
				client.CloseWrite()
			})
			n, err := io.Copy(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{server})
			if wg.Wait(); n != sent || n < 16<<20 || err != nil {
				t.Errorf("read %d of %d, %v", n, sent, err)
			}
			st := client.Stats()
			if got := st.DirectBytesSent > 0; got != rdma && !open {
				t.Errorf("RDMA was used: %v, want %v; %+v", got, rdma, st)
			}
			if st.BytesSent != uint64(sent) || server.Stats().BytesReceived != uint64(sent) {
				t.Errorf("counted %d bytes sent, %d received", st.BytesSent, server.Stats().BytesReceived)
			}
		})
	}
}

func TestReadAndWriteDoNotAllocate(t *testing.T) {
	for _, l := range sanLanes {
		if l.skipped() {
			continue
		}
		for _, size := range []int{1, 64, 4096, 64 << 10} {
			if at := l.options.Threshold; at > 0 && at <= size {
				continue // there each Write costs a registration
			}
			if inGuest != "" && size > 4096 {
				continue // there a round takes longer than the time after which the idle poller looks at a session
			}
			t.Run(fmt.Sprintf("%s, %d bytes", l.name, size), func(t *testing.T) {
				client, server := l.sanPipe(t)
				b := make([]byte, size)
				round := func() {
					client.SetDeadline(time.Now().Add(testTimeout))
					// No more than a ring holds while nobody reads.
					for rest := size; rest > 0; {
						n, err := client.Write(b[:min(rest, 16<<10)])
						if err != nil {
							t.Fatal(err)
						}
						if _, err := io.ReadFull(server, b[:n]); err != nil {
							t.Fatal(err)
						}
						rest -= n
					}
				}
				for range 100 {
					round()
				}
				if n := testing.AllocsPerRun(1000, round); n != 0 {
					t.Errorf("%v allocations per round", n)
				}
			})
		}
	}
}

// Connections that are closed leave nothing behind.
func TestConnectionsLeaveNothing(t *testing.T) {
	for _, l := range lanes {
		if l.skipped() {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			connect := func(times int) {
				ln := l.listen(t, l.here())
				defer ln.Close()
				for range times {
					c := mustDial(t, l.dialer(), ln.Addr().String())
					s := mustAccept(t, ln)
					l.begin(c)
					send(t, c, s, "hello")
					c.Close()
					s.Close()
				}
			}
			connect(1) // librdmacm keeps the devices open that it has used once
			idle(t)
			before := resources(t)
			connect(amount(50, 20))
			idle(t)
			runtime.GC()
			wantResources(t, before)
			waitFor(t, "no connection is counted as open", func() bool { return Stats().Open[l.provider] == 0 })
		})
	}
}

// idle waits until provider shm has released what earlier tests used.
func idle(t testing.TB) {
	t.Helper()
	waitFor(t, "no link is left", func() bool { return countMappings(t) == 0 })
}
