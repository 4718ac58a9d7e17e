package san

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

// takeDescriptor gives the program the descriptor for a moment, as a call that sets an option does.
func takeDescriptor(t testing.TB, c net.Conn) {
	t.Helper()
	raw, err := c.(*sanconn.Conn).SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// firstTurns is how many round trips a connection makes at least before it moves: each Read counts for
// 32 KiB of use.
const firstTurns = moving.FirstUse / (32 << 10)

// attempts counts the attempts to move to shared memory that failed for a reason other than the
// connection itself.
type attempts struct {
	claimed atomic.Int32 // the program was using the descriptor
	late    atomic.Int32 // one of the two ends was too late, as on a busy machine
}

func countAttempts(t *testing.T) *attempts {
	a := new(attempts)
	useProviders(t, watched{byShm, func(move func() error) error {
		err := move()
		if errors.Is(err, newconn.ErrClaimed) {
			a.claimed.Add(1)
		} else if reasonOf(err) == ReasonTimeout {
			a.late.Add(1)
		}
		return err
	}})
	return a
}

// roundsUntilMoved uses a connection, one end of which echoes, for a little more than firstTurns at a
// time, until it has moved; after each time it waits for an attempt that has begun. It returns the
// number of times, but at most most. After an attempt that was late the count begins again, and the next
// attempt comes as if that one had not been made.
func (a *attempts) roundsUntilMoved(t testing.TB, c, s net.Conn, most int) int {
	t.Helper()
	a.late.Store(0)
	var echo sync.WaitGroup
	defer echo.Wait()
	defer func() { c.(*sanconn.Conn).CloseWrite() }()
	echo.Go(func() { io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s}) })
	c.SetDeadline(time.Now().Add(testTimeout))
	b := make([]byte, 1)
	for round := 1; round < most; round++ {
		for range firstTurns + 4 {
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, b); err != nil {
				t.Fatal(err)
			}
		}
		moved := func() bool { return InfoOf(c).Provider == shm.Name }
		waitFor(t, "the end of what that has begun", func() bool { return moved() || !isMoving(c) && !isMoving(s) })
		if moved() {
			return round
		}
		if a.late.Swap(0) > 0 {
			newconn.HandleOf(c).CallUse(moving.FirstUse)
			round = 0
		}
	}
	return most
}

// Control right after Dial, as in gRPC, delays the move of a connection that would move at once: it then
// needs the use that others need. It costs no attempt.
func TestControlBehindDial(t *testing.T) {
	tried := countAttempts(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for range 8 { // after a failed attempt the next one would need four times as much use
		tried.claimed.Store(0)
		c := mustDial(t, atOnce(), l.Addr().String())
		takeDescriptor(t, c)
		s := mustAccept(t, l)
		waitFor(t, "the move at once, which pauses until that", func() bool { return tried.claimed.Load() > 0 })
		if n := tried.roundsUntilMoved(t, c, s, 4); n == 4 {
			t.Errorf("not moved: %+v", InfoOf(c))
		}
	}
}

// What one end did before the other end's attempt, such as a search in vain, does not delay the next
// move after Control.
func TestFileConnBehindControl(t *testing.T) {
	tried := countAttempts(t)
	for range 3 {
		tcp := plainListen(t, "127.0.0.1:0")
		c := mustDial(t, new(Dialer), tcp.Addr().String())
		n := mustAccept(t, tcp).(*net.TCPConn)
		f, err := n.File()
		if err != nil {
			t.Fatal(err)
		}
		n.Close()
		s, err := FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		takeDescriptor(t, s)
		// At the latest it moves at the dialer's second attempt, after four times as much use.
		if most := 2 * (1 + moving.MoreUse); tried.roundsUntilMoved(t, c, s, most) == most {
			t.Errorf("not moved: %+v", InfoOf(c))
		}
	}
}

// A stream of Writes also moves after Control. In a stream a Write is always in progress, so the kernel
// has counted more bytes than the Writes have returned. Two streams, one in each direction, move as
// well.
func TestStreamBehindControl(t *testing.T) {
	onlyShm(t)
	const up, down, both = 1, 2, 3
	for _, dialed := range []bool{true, false} {
		for _, ways := range []int{up, down, both} {
			l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
			c, s := mustDial(t, new(Dialer), l.Addr().String()), mustAccept(t, l)
			takes := s
			if dialed {
				takes = c
			}
			takeDescriptor(t, takes)
			moved := func() bool { return InfoOf(c).Provider == shm.Name && InfoOf(s).Provider == shm.Name }
			end := time.Now().Add(testTimeout)
			c.SetDeadline(end)
			s.SetDeadline(end)
			var streams sync.WaitGroup
			stream := func(from, to net.Conn, flows bool) {
				streams.Go(func() {
					for b := make([]byte, 64<<10); flows && !moved(); {
						if _, err := from.Write(b); err != nil {
							t.Errorf("Control by the dialer: %v, ways: %d: %v; %+v, %+v", dialed, ways, err, InfoOf(c), InfoOf(s))
							break
						}
					}
					if flows {
						from.(*sanconn.Conn).CloseWrite()
					}
				})
				streams.Go(func() {
					for b := make([]byte, 16<<10); flows; {
						if _, err := to.Read(b); err == io.EOF {
							break
						} else if err != nil {
							t.Errorf("Control by the dialer: %v, ways: %d: %v; %+v, %+v", dialed, ways, err, InfoOf(c), InfoOf(s))
							from.Close()
							break
						}
						for began := time.Now(); time.Since(began) < 5*time.Microsecond; { // slow enough that Writes have to wait
						}
					}
				})
			}
			stream(c, s, ways&up != 0)
			stream(s, c, ways&down != 0)
			streams.Wait()
		}
	}
}

// A connection that a condition has refused is not proposed again, whatever the program does with its
// descriptor.
func TestRefusedIsNotOfferedBehindControl(t *testing.T) {
	onlyShm(t)
	var asked atomic.Int32
	l := mustListen(t, &ListenConfig{Condition: func(MoveProposal) error {
		asked.Add(1)
		return errors.New("no")
	}}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String())
	s := mustAccept(t, l)
	var echo sync.WaitGroup
	defer echo.Wait()
	defer c.Close()
	echo.Go(func() { io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s}) })
	b := make([]byte, 1)
	for range 3 {
		turns := func() {
			for range 12 * firstTurns {
				c.Write(b)
				if _, err := io.ReadFull(c, b); err != nil {
					t.Fatal(err)
				}
			}
		}
		turns()
		waitFor(t, "it is refused", func() bool { // an attempt that has failed is repeated after more use
			if InfoOf(c).Fallback == ReasonRefused {
				return true
			}
			turns()
			return false
		})
		takeDescriptor(t, c)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// A File that fails does not keep the connection on TCP.
func TestFileThatFails(t *testing.T) {
	tried := countAttempts(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c, s := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn), mustAccept(t, l)
	s.Write([]byte("abc"))
	if _, err := c.Peek(); err != nil {
		t.Fatal(err)
	}
	if f, err := c.File(); err == nil {
		f.Close()
		t.Fatal("a descriptor without bytes that were not read")
	}
	c.Discard(3)
	// At the latest it moves at the second attempt, after four times as much use.
	if most := 2 * (1 + moving.MoreUse); tried.roundsUntilMoved(t, c, s, most) == most {
		t.Errorf("not moved: %+v", InfoOf(c))
	}
}
