package shm

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

// If a process lacks room or a descriptor for a link's next segment, the dial that needed the segment
// fails, and nothing else does.
func TestSegmentThatCannotBeTaken(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	var all [][2]session.Endpoint
	defer func() {
		for _, c := range all {
			end(c[0])
			end(c[1])
		}
	}()
	connect := func() error {
		a, err := dial(l.at, Config{})
		if err != nil {
			return err
		}
		b, err := l.accept()
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
	// The dialing end can map the next segment, but the accepting end cannot.
	rest := held.space.Limit() - held.space.Used() - halfSize(nextSegment(firstSlots))
	held.space.Take(quota.Own, rest)
	err := connect()
	held.space.Return(quota.Own, rest)
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

// This process is at its limit of descriptors, so the descriptor of a segment is lost in transit: the
// segment is refused, and the link goes on.
func TestSegmentWhoseDescriptorIsLost(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.handshake()
	right := memfd(t, halfSize(firstSlots), halfSeals, 0)
	send := func(want uint8) {
		t.Helper()
		s.send((&message{kind: msgSegment, number: firstSlots}).encode(), right)
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil || m.kind != msgSegmentReply || m.code != want {
			t.Fatalf("%+v, %v, want code %d", m, err, want)
		}
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil { // descriptors that are open stay open
		t.Fatal(err)
	}
	send(codeResources)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	send(codeOK)
	servesOthers(t, l)
}

// While a peer has not read the reply to a segment, it gets no reply to a further one, because that
// would also have a descriptor in transit.
func TestSegmentsWhoseRepliesAreNotRead(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.handshake()
	for _, slots := range []int{firstSlots, 2 * firstSlots} {
		s.send((&message{kind: msgSegment, number: uint32(slots)}).encode(), memfd(t, halfSize(slots), halfSeals, 0))
	}
	s.send(connectTo(0))
	select {
	case ep := <-l.taken:
		end(ep)
		t.Fatal("what is behind the segments was handled")
	case <-time.After(50 * time.Millisecond): // that would be a wrong reply
	}
	servesOthers(t, l)
	for range 2 {
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil || m.kind != msgSegmentReply || m.code != codeOK || len(fds) != 1 {
			t.Fatalf("%+v, %v, %d descriptors", m, err, len(fds))
		}
	}
	ep, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	end(ep)
}

// This process is at its limit of descriptors, so it does not get a half: the dial that needed it fails.
// The link goes on, and the next dial makes another half.
func TestHalfThatIsLost(t *testing.T) {
	leaks(t)
	var links atomic.Int32
	half, door := halfToPass(t), doorbellEnd(t)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	at := serveName(t, func(c *net.UnixConn) {
		d, err := dupConn(c) // the caller closes c
		if err != nil {
			t.Error(err)
			return
		}
		links.Add(1)
		serving.Go(func() {
			defer d.Close()
			answerLink(message{kind: msgLinkReply, version: version}, func(c *net.UnixConn) {
				for {
					var m message
					fds, err := receive(c, &m)
					closeAll(fds)
					switch {
					case err != nil:
						return
					case m.kind == msgSegment:
						unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max})
						send(c, &message{kind: msgSegmentReply}, half)
					}
				}
			}, half, door)(d)
		})
	})
	defer serving.Wait()
	var all []session.Endpoint
	for range firstSlots {
		ep, err := Dial(t.Context(), at.port, at.name, at.user, Config{timeout: patience})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ep)
		defer func() { ep.(*endpoint).link.die(errPeerGone); end(ep) }() // that peer retires from no slot
	}
	_, err := Dial(t.Context(), at.port, at.name, at.user, Config{timeout: patience})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	wantReason(t, err, session.ReasonResources)
	for i, ep := range all {
		if ep.Err() != nil {
			t.Fatalf("connection %d: %v", i, ep.Err())
		}
	}
	ep, err := Dial(t.Context(), at.port, at.name, at.user, Config{timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { ep.(*endpoint).link.die(errPeerGone); end(ep) }()
	if n := links.Load(); n != 2 {
		t.Errorf("%d links", n)
	}
}

func dupConn(c *net.UnixConn) (*net.UnixConn, error) {
	f, err := c.File()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return d.(*net.UnixConn), nil
}

// If a link ends while a dial adds a segment to it, the segment is unmapped only once, and the dial
// finds that it may try another link.
func TestLinkThatEndsWhileItIsExtended(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	for i := range 100 {
		a, b := meet(t, l)
		near, far := a.(*endpoint).link, b.(*endpoint).link
		near.slots.mu.Lock()
		near.slots.free = nil
		near.slots.mu.Unlock()
		failed := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			e, err := near.dial(ctx)
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
		far.control.Close()
		if err := <-failed; err != nil && !errors.Is(err, ErrLinkGone) { // with nil the answers came before the end
			t.Errorf("the dial: %v", err)
		}
		near.closeUnused()
	}
}

// If this end could not map its half of a segment that the peer has, the link takes no further segment.
// A dial that is waiting for one uses another link, and existing connections go on.
func TestDialBehindAHalfThatIsLost(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	var near *link
	for range firstSlots {
		a, b := meet(t, l)
		defer end(a)
		defer end(b)
		near = a.(*endpoint).link
		defer func() {
			if err := a.Err(); err != nil {
				t.Errorf("a connection: %v", err)
			}
		}()
	}
	payer := near.payer
	one := limits{addressSpace: halfSize(nextSegment(firstSlots)), mappings: mostMappings}
	near.payer.holdings = newHoldings(one) // this end's half fits, but the peer's does not
	_, err := near.dial(t.Context())
	wantReason(t, err, session.ReasonResources)
	near.payer = payer
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if e, err := near.dial(ctx); !errors.Is(err, ErrLinkGone) {
		t.Errorf("a dial behind it: %v", err)
		if err == nil {
			end(e)
		}
	}
	servesOthers(t, l) // over another link
}
