package san

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

func init() { roles["echo"] = roleEcho }

// roleEcho takes over a connection whose descriptor it inherits as 3, or gets by a message on descriptor
// 3, and echoes.
func roleEcho(lane) error {
	f := os.NewFile(3, "connection")
	if os.Getenv(envName) == "message" {
		control := make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(3, make([]byte, 1), control, 0)
		if err != nil {
			return err
		}
		messages, err := unix.ParseSocketControlMessage(control[:n])
		if err != nil {
			return err
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fds[0]), "connection")
	}
	c, err := FileConn(f)
	if err != nil {
		return err
	}
	f.Close()
	fmt.Printf("%T\n", c)
	if _, err := io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}); err != nil {
		return err
	}
	fmt.Println(InfoOf(c).Provider)
	return c.Close()
}

// A connection's descriptor is passed to another process, before and after it has moved, with and
// without unread bytes. There the connection goes on, no byte is wrong, and it moves again.
func TestConnectionIsPassedOn(t *testing.T) {
	onlyShm(t)
	for _, how := range []string{"inherited", "message"} {
		for _, end := range []string{"accepted", "dialed"} {
			for _, moved := range []bool{false, true} {
				for _, unread := range []int{0, 1, 100_000} {
					t.Run(fmt.Sprintf("%s, %s, moved %v, %d unread", how, end, moved, unread), func(t *testing.T) {
						passOn(t, how, end == "dialed", moved, unread)
					})
				}
			}
		}
	}
}

func passOn(t *testing.T, how string, dialed, moved bool, unread int) {
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l).(*sanconn.Conn)
	send(t, c, s, "before")
	if moved {
		wantMovedByUse(t, c, s, shm.Name)
		wantMoved(t, s, shm.Name)
		send(t, s, c, "by shm")
		send(t, c, s, "by shm")
	}
	if dialed {
		c, s = s, c
	}
	c.SetDeadline(time.Now().Add(testTimeout))
	data := make([]byte, 1<<20)
	position(data, 0)
	if _, err := c.Write(data[:unread]); err != nil {
		t.Fatal(err)
	}
	f, err := s.File()
	if err != nil {
		t.Fatal(err)
	}
	p := startPassed(t, how, f)
	f.Close()
	s.Close()
	if got := p.line(t); got != "*sanconn.Conn" {
		t.Fatalf("the other process has a %s", got)
	}
	wrote := make(chan error)
	go func() {
		for n := unread; n < len(data); n += 1000 {
			if !dialed && n == (len(data)-unread)/2000*1000+unread {
				newconn.HandleOf(c).CallUse(0)
			}
			if _, err := c.Write(data[n:min(n+1000, len(data))]); err != nil {
				wrote <- err
				return
			}
		}
		wrote <- nil
	}()
	got := make([]byte, len(data))
	if n, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("after %d bytes: %v", n, err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	wantPositions(t, got, 0)
	waitFor(t, "it moves", func() bool { // an attempt that has failed is repeated after more use
		for n := 0; n < firstTurns && InfoOf(c).Provider != shm.Name; n++ {
			send(t, c, c, "more")
		}
		return InfoOf(c).Provider == shm.Name
	})
	c.SetDeadline(time.Now().Add(testTimeout))
	c.CloseWrite()
	if n, err := c.Read(got); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
	if got := p.line(t); got != shm.Name {
		t.Errorf("the other process was on %s", got)
	}
}

// The descriptors of both ends are passed on, one after the other, and both new owners try to move the
// connection.
func TestBothEndsArePassedOn(t *testing.T) {
	tries := countAttempts(t)
	for range amount(20, 3) {
		l := plainListen(t, "127.0.0.1:0")
		dialed := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		ends := [2]net.Conn{dialed, mustAccept(t, l)}
		for i, c := range ends {
			f, err := c.(*net.TCPConn).File()
			if err != nil {
				t.Fatal(err)
			}
			ends[i], err = FileConn(f)
			f.Close()
			c.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer ends[i].Close()
		}
		tries.late.Store(0)
		use := func() {
			send(t, ends[0], ends[1], "there")
			send(t, ends[1], ends[0], "and back")
		}
		for range firstTurns + 4 { // after a first attempt that failed, it takes four times as many
			use()
		}
		waitFor(t, "a move", func() bool {
			if tries.late.Load() > 0 {
				use()
			}
			return InfoOf(ends[0]).Provider == shm.Name
		})
	}
}

// One direction of a stream was ended on the descriptor, before that was passed on, or in Control: the
// connection does not move, and its peer finds the end of the stream.
func TestStreamEndedByDescriptor(t *testing.T) {
	onlyShm(t)
	for _, passed := range []bool{true, false} {
		for _, dialed := range []bool{true, false} {
			for _, how := range []int{unix.SHUT_WR, unix.SHUT_RD} {
				t.Run(fmt.Sprintf("passed on %v, dialed %v, how %d", passed, dialed, how), func(t *testing.T) {
					endByDescriptor(t, passed, dialed, how)
				})
			}
		}
	}
}

func endByDescriptor(t *testing.T, passed, dialed bool, how int) {
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l).(*sanconn.Conn)
	end, peer := s, c
	if dialed {
		end, peer = c, s
	}
	if raw, err := end.SyscallConn(); err != nil {
		t.Fatal(err)
	} else if err := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), how) }); err != nil {
		t.Fatal(err)
	}
	if passed {
		end = passedOn(t, end)
	}
	from, to, ended := peer, end, peer // from and to: the direction that goes on; ended: the end that reads the other one
	if how == unix.SHUT_RD {
		from, to, ended = end, peer, end
	}
	for range 2 * firstTurns { // more than enough to move after Control
		send(t, from, to, string(make([]byte, 64<<10)))
	}
	mover := peer // the end that would move it
	if dialed {
		mover = end
	}
	useUntil(t, mover, func() { send(t, from, to, "more") }, "it stays", func() bool { return InfoOf(mover).Fallback == ReasonStays })
	wantStays(t, mover, ReasonStays)
	ended.SetReadDeadline(time.Now().Add(testTimeout))
	if n, err := ended.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("where the stream has ended: %d, %v", n, err)
	}
}

// If urgent data is unread when a descriptor is passed on, the kernel's count of bytes is too large.
// Such a connection does not move, because it would do so at the wrong position.
func TestPassedOnWithUrgentData(t *testing.T) {
	onlyShm(t)
	l := plainListen(t, "127.0.0.1:0")
	var dialer net.Dialer
	c, err := dialer.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := mustAccept(t, l)
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if closed := raw.Control(func(fd uintptr) { err = unix.Sendto(int(fd), []byte("!"), unix.MSG_OOB, nil) }); closed != nil || err != nil {
		t.Fatal(closed, err)
	}
	c.Write([]byte("behind it"))
	testenv.Eventually(t, testTimeout, func() error {
		if _, read, err := tcpid.Positions(s.(*net.TCPConn)); err != nil || read == 0 {
			return fmt.Errorf("%d bytes read, %v", read, err)
		}
		return nil
	})
	a, b := passedOn(t, c.(*net.TCPConn)), passedOn(t, s.(*net.TCPConn))
	b.SetDeadline(time.Now().Add(testTimeout))
	got := make([]byte, len("behind it"))
	if _, err := io.ReadFull(b, got); err != nil || string(got) != "behind it" {
		t.Fatalf("%q, %v", got, err)
	}
	wantStaysByUse(t, b, a, ReasonStays)
	send(t, a, b, "there")
	send(t, b, a, "and back")
}

// passedOn returns what FileConn makes of a connection's File.
func passedOn(t *testing.T, c interface {
	File() (*os.File, error)
	Close() error
}) *sanconn.Conn {
	t.Helper()
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c.Close()
	n, err := FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n.(*sanconn.Conn)
}

// startPassed starts a process, and passes it a descriptor.
func startPassed(t *testing.T, how string, f *os.File) *process {
	t.Helper()
	with := func(f *os.File) *process {
		return startProcess(t, "echo", moves, "", func(c *exec.Cmd) {
			c.ExtraFiles = []*os.File{f}
			c.Env = append(c.Env, envName+"="+how)
		})
	}
	if how == "inherited" {
		return with(f)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	defer unix.Close(pair[0])
	p := with(theirs)
	if err := unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(int(f.Fd())), nil, 0); err != nil {
		t.Fatal(err)
	}
	return p
}

// The reason of a connection that was passed on, whichever its end: before it is used, that it was not
// used enough; after an attempt that has found nobody at the other end, that its peer is plain.
func TestReasonOfAConnectionThatIsPassedOn(t *testing.T) {
	onlyShm(t)
	for _, end := range []string{"accepted", "dialed"} {
		t.Run(end, func(t *testing.T) {
			l := plainListen(t, "127.0.0.1:0")
			peer := mustDial(t, &Dialer{Policy: Never}, l.Addr().String()).(*net.TCPConn)
			other := mustAccept(t, l).(*net.TCPConn)
			if end == "dialed" {
				peer, other = other, peer
			}
			c := passedOn(t, other)
			wantFallback(t, c, ReasonUnused)
			wantStaysByUse(t, c, peer, ReasonPeerPlain)
		})
	}
}

// The same holds if an earlier attempt has failed for another reason.
func TestReasonBehindAnAttemptThatWasLate(t *testing.T) {
	var tries atomic.Int32
	useProviders(t, watched{byShm, func(move func() error) error {
		if tries.Add(1) == 1 {
			return os.ErrDeadlineExceeded
		}
		return move()
	}})
	l := plainListen(t, "127.0.0.1:0")
	peer := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
	c := passedOn(t, mustAccept(t, l).(*net.TCPConn))
	wantStaysByUse(t, c, peer, ReasonTimeout)
	wantStaysByUse(t, c, peer, ReasonPeerPlain)
}

// For descriptors of other networks than TCP, FileConn returns what net.FileConn does.
func TestFileConnOfOthers(t *testing.T) {
	path := t.TempDir() + "/socket"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f, err := c.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	same, err := FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	defer same.Close()
	if _, ok := same.(*net.UnixConn); !ok {
		t.Errorf("a %T", same)
	}
	if _, err := FileConn(os.Stdin); err == nil {
		t.Error("a connection of what is none")
	}
}

// A framework that takes the descriptor for its own event loop, as gnet does, gets all bytes on it,
// whether it takes it before or after the move. Both ends may do so at the same time.
func TestDescriptorIsUsed(t *testing.T) {
	onlyShm(t)
	for _, after := range []bool{false, true} {
		for _, ends := range []string{"dialer", "acceptor", "both"} {
			t.Run(fmt.Sprintf("after the move %v, by the %s", after, ends), func(t *testing.T) {
				l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
				c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
				s := mustAccept(t, l).(*sanconn.Conn)
				if after {
					wantMovedByUse(t, c, s, shm.Name)
					wantMoved(t, s, shm.Name)
				}
				const text = "to be read by the descriptor"
				// If an end goes back to TCP because its peer does, bytes that have come stay in the
				// end's memory.
				if ends != "both" {
					io.WriteString(c, text)
				}
				io.WriteString(s, text)
				use := func(c *sanconn.Conn, peer net.Conn) {
					raw, err := c.SyscallConn()
					if err != nil {
						t.Fatal(err)
					}
					var fd int
					if err := raw.Control(func(u uintptr) { fd = int(u) }); err != nil {
						t.Fatal(err)
					}
					want := text
					if ends == "both" && c == s {
						want = "by the descriptor" + text
					}
					got := make([]byte, len(want))
					for n := 0; n < len(got); {
						k, err := readWhenReady(fd, got[n:])
						if err != nil || k == 0 {
							t.Fatalf("after %q: %d, %v", got[:n], k, err)
						}
						n += k
					}
					if string(got) != want {
						t.Errorf("the descriptor has %q, want %q", got, want)
					}
					if _, err := unix.Write(fd, []byte("by the descriptor")); err != nil {
						t.Fatal(err)
					}
				}
				if ends != "acceptor" {
					use(c, s)
				}
				if ends == "both" {
					io.WriteString(c, text)
				}
				if ends != "dialer" {
					use(s, c)
				}
				for _, pair := range [][2]*sanconn.Conn{{c, s}, {s, c}} {
					reader := pair[0]
					want := ""
					if ends == "dialer" && reader == s || ends == "acceptor" && reader == c {
						want = text + "by the descriptor"
					} else if ends == "both" && reader == c {
						want = "by the descriptor"
					}
					got := make([]byte, len(want))
					reader.SetDeadline(time.Now().Add(testTimeout))
					if _, err := io.ReadFull(reader, got); string(got) != want || err != nil {
						t.Errorf("read %q, %v; want %q", got, err, want)
					}
					wantProvider(t, reader, providerTCP)
				}
				newconn.HandleOf(c).CallUse(0) // it must stay on TCP
				send(t, c, s, "and on")
				send(t, s, c, "and on")
				wantProvider(t, c, providerTCP)
			})
		}
	}
}

// readWhenReady reads a descriptor as an event loop does: after poll has found it readable, and not
// after poll was interrupted by one of the runtime's signals.
func readWhenReady(fd int, b []byte) (int, error) {
	for end := time.Now().Add(testTimeout); ; {
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(testTimeout.Milliseconds()))
		if n, err := unix.Read(fd, b); err != unix.EAGAIN || time.Now().After(end) {
			return n, err
		}
	}
}

// An event loop that gets an accepted connection's descriptor by Control, and is late, finds all that
// was sent in the meantime, even if the dialer wants to move at once.
func TestDescriptorIsUsedLate(t *testing.T) {
	onlyShm(t)
	for _, atOnce := range []bool{false, true} {
		t.Run(fmt.Sprint("at once ", atOnce), func(t *testing.T) {
			l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
			tcp, err := net.Dial("tcp", l.Addr().String()) // a plain connection: nobody may move it before Control
			if err != nil {
				t.Fatal(err)
			}
			s := mustAccept(t, l).(*sanconn.Conn)
			raw, err := s.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var fd int
			if err := raw.Control(func(u uintptr) { fd = int(u) }); err != nil {
				t.Fatal(err)
			}
			p, err := unhurried().plan("tcp")
			if err != nil {
				t.Fatal(err)
			}
			c := p.Begin(tcp.(*net.TCPConn), time.Now())
			defer c.Close()
			if p.AtOnce = atOnce; atOnce {
				p.MoveAtOnce(c)
				wantStays(t, c, ReasonStays)
			}
			all, got := make([]byte, 3*moving.FirstUse), make([]byte, 3*moving.FirstUse)
			position(all, 0)
			wrote := make(chan error, 1)
			c.SetWriteDeadline(time.Now().Add(testTimeout))
			go func() { _, err := c.Write(all); wrote <- err }()
			wantStays(t, c, ReasonStays)
			for n := 0; n < len(all); {
				k, err := readWhenReady(fd, got[n:])
				if err != nil || k == 0 {
					t.Fatalf("the descriptor has %d bytes: %d, %v", n, k, err)
				}
				n += k
			}
			wantPositions(t, got, 0)
			if err := <-wrote; err != nil {
				t.Error(err)
			}
		})
	}
}

// A process that has passed a connection's descriptor on need not have closed its own.
func TestConnectionIsPassedOnAndKept(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l).(*sanconn.Conn)
	f, err := s.File()
	if err != nil {
		t.Fatal(err)
	}
	p := startPassed(t, "inherited", f)
	f.Close()
	p.line(t)
	wantMovedByUse(t, c, c, shm.Name) // the other process echoes
	s.Close()
}
