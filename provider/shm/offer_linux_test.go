package shm

import (
	"context"
	"errors"
	"net"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// A process that momentarily lacks room or a descriptor for a link's next segment fails
// the dial that needed it, and nothing else.
func TestSegmentThatCannotBeTaken(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var all [][2]session.Endpoint
	defer func() {
		for _, c := range all {
			end(c[0])
			end(c[1])
		}
	}()
	connect := func() error {
		bound := bind(t, "127.0.0.1")
		a, err := Dial(t.Context(), bound, tcp.Addr().(*net.TCPAddr), Config{})
		if err != nil {
			unix.Close(bound)
			return err
		}
		b, _, _, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, [2]session.Endpoint{a, b})
		return nil
	}
	for range firstSlots {
		if err := connect(); err != nil {
			t.Fatal(err)
		}
	}
	// The dialing end can map the next segment, the accepting one cannot.
	rest := held.space.Limit() - held.space.Used() - segmentSize(nextSegment(firstSlots))
	held.space.TakeOwn(rest)
	err := connect()
	held.space.ReturnOwn(rest)
	why := new(session.Unavailable)
	if !errors.As(err, &why) || why.Reason != session.ReasonResources {
		t.Errorf("the dial: %v, want %v", err, session.ReasonResources)
	}
	if err := connect(); err != nil {
		t.Errorf("the next dial: %v", err)
	}
	if len(all) != firstSlots+1 {
		t.Fatalf("%d connections", len(all))
	}
	for i, c := range all {
		if c[0].Reserve(8, 8) == nil {
			t.Fatalf("connection %d takes nothing: %v", i, c[0].Err())
		}
		c[0].Commit(8)
		var ev session.Event
		if !c[1].Poll(&ev) || len(ev.Msg) != 8 {
			t.Fatalf("connection %d brings nothing: %v", i, c[1].Err())
		}
		c[1].Drop()
	}
}

func TestSegmentWhoseDescriptorIsLost(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	s := dialRaw(t, l)
	s.handshake()
	right := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	for _, c := range []struct {
		fds  []int // more than a message has: the kernel closes the rest, as where there is no descriptor left
		code uint8
	}{{[]int{right, right, right}, codeResources}, {[]int{right}, codeOK}} {
		s.send((&message{kind: msgSegment, number: firstSlots}).encode(), c.fds...)
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil || m.kind != msgSegmentReply || m.code != c.code {
			t.Fatalf("%d descriptors: %+v, %v, want code %d", len(c.fds), m, err, c.code)
		}
	}
	servesOthers(t, tcp, l)
}

// If a link ends while a dial offers it a segment, the segment is unmapped only once, and
// the dial learns that another link may do.
func TestLinkThatEndsDuringAnOffer(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	for i := range 100 {
		a, b := meet(t, tcp, l)
		near, far := a.(*endpoint).link, b.(*endpoint).link
		near.slots.mu.Lock()
		near.slots.free = nil
		near.slots.mu.Unlock()
		failed := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			e, err := connectOver(ctx, near)
			if err == nil {
				end(e)
			}
			failed <- err
		}()
		abort(a)
		abort(b)
		for range i * 20 {
			runtime.Gosched()
		}
		far.control.close()
		// The answer came in time, and refused a dial without an address; or it did not.
		if err := <-failed; err == nil || !errors.Is(err, errLinkGone) && err.Error() != codeError(codeAddress).Error() {
			t.Errorf("the dial: %v", err)
		}
		near.closeUnused()
	}
}
