package sanconn_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// counted is a connection that is read as gRPC does: by functions of one RawConn that read by
// syscall.Read. The connection counts such reads like its own.
type counted struct {
	*sanconn.Conn
	raw   syscall.RawConn
	tcp   int           // TCP's descriptor
	waits chan struct{} // has a token when a function has found nothing on TCP or the session
}

func countedOf(t testing.TB, c *sanconn.Conn) counted {
	testenv.AsBuilt(t)
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := newconn.HandleOf(c).TCP().SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	r := counted{Conn: c, raw: raw, waits: make(chan struct{}, 1)}
	tcp.Control(func(fd uintptr) { r.tcp = int(fd) })
	return r
}

func (c counted) Read(p []byte) (n int, err error) {
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		n, failed = testenv.SyscallRead(int(fd), p)
		if failed != syscall.EAGAIN {
			return true
		}
		if int(fd) != c.tcp { // on the socket that shows that nothing has come, during which the connection may move
			return false
		}
		select {
		case c.waits <- struct{}{}:
		default:
		}
		return false
	})
	switch {
	case err == io.EOF:
		return 0, errors.New("a RawConn's Read returns no io.EOF: its function finds the end")
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, failed
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// readBeside reads after calling ends, or, with waits, calls ends while the Read waits.
func (c counted) readBeside(p []byte, waits bool, ends func()) (n int, err error) {
	if !waits {
		ends()
		return c.Read(p)
	}
	select { // a token of an earlier Read
	case <-c.waits:
	default:
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		n, err = c.Read(p)
	}()
	<-c.waits
	ends()
	<-read
	return n, err
}

// A counted Read returns what the connection's own Read would, on each carrier and during a move, and
// does not change the carrier.
func TestCountedReadReadsTheConnection(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		r := countedOf(t, b)
		b.SetReadDeadline(time.Now().Add(patience))
		sent := pattern(3 << 20)
		go func() {
			for rest, size := sent, 1; len(rest) > 0; size = size*3%200_000 + 1 {
				n, err := a.Write(rest[:min(size, len(rest))])
				if err != nil {
					t.Error(err)
					break
				}
				rest = rest[n:]
			}
			a.CloseWrite()
		}()
		got, err := io.ReadAll(r)
		if err != nil {
			t.Error(err)
		}
		wantBytes(t, got, sent)
		if st := b.Stats(); st.BytesReceived != uint64(len(sent)) {
			t.Errorf("%d bytes were counted of %d", st.BytesReceived, len(sent))
		}
		if n, in := sanconn.Lent(); n != 0 || in != 0 { // the number may be another descriptor's from then on
			t.Errorf("%d descriptors count as lent, %d are in the table", n, in)
		}
	})
}

// proposes makes an end propose a move. It returns when the proposal was made, and the channel gets the
// result.
func proposes(t *testing.T, c *sanconn.Conn, ep session.Endpoint) (proposed chan error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	proposed = make(chan error, 1)
	go func() { proposed <- connpair.Propose(ctx, c, ep, session.Config{}, nil) }()
	testenv.Eventually(t, patience, func() error {
		if state := c.Debug(); !strings.Contains(state, "proposed") {
			return errors.New(state)
		}
		return nil
	})
	return proposed
}

// If a peer that has moved dies before its answer comes, bytes that it has sent may be lost: TCP's end
// is a cut, even for a function that is not yet known to read by syscall.Read.
func TestCountedReadOfACutMove(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	a.SetReadDeadline(time.Now().Add(patience))
	r := countedOf(t, a)
	proposed := make(chan error, 1)
	go func() { proposed <- connpair.Propose(t.Context(), a, ea, session.Config{}, nil) }()
	err = connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
		ea.Hold(twin.HoldMessages)
		return b
	})
	if err == nil {
		_, err = b.Write([]byte("lost"))
	}
	if err != nil {
		t.Fatal(err)
	}
	eb.Kill()
	newconn.HandleOf(b).TCP().Close()
	if err := <-proposed; err == nil {
		t.Fatal("it has had an answer")
	}
	for range 2 {
		if n, err := r.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%d, %v", n, err)
		}
	}
}

// A counted Read that waits lets the connection move, and continues on the session, even if it has
// waited from the beginning: the program does not use the descriptor in another way.
func TestCountedReadMoves(t *testing.T) {
	for _, waits := range []bool{false, true} {
		a, b, move := onTCPPair(t, newconn.Config{Threshold: 1 << 20})
		r := countedOf(t, b)
		if !waits {
			a.Write([]byte("x"))
			if n, err := r.Read(make([]byte, 10)); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		came := make(chan string, 1)
		go func() {
			buf := make([]byte, 10)
			n, err := r.Read(buf)
			if err != nil {
				t.Error(err)
			}
			came <- string(buf[:n])
		}()
		<-r.waits
		testenv.Eventually(t, patience, move)
		testenv.Eventually(t, patience, func() error {
			if b.Provider() == "tcp" {
				return errors.New(b.Debug())
			}
			return nil
		})
		a.Write([]byte("behind the move")) // more than it reads at once
		if got := <-came; got != "behind the" {
			t.Errorf("%q", got)
		}
		rest := make([]byte, 10)
		if n, err := r.Read(rest); string(rest[:n]) != " move" || err != nil {
			t.Errorf("%q, %v", rest[:n], err)
		}
		if p := b.Provider(); p == "tcp" {
			t.Error("it has gone back")
		}
	}
}

// A function that reads in another way ends a move even before the peer has taken the proposal: nothing
// waits for the answer.
func TestUncountedBehindAProposal(t *testing.T) {
	ring := session.Limits{MaxMessage: 4096}
	ea, eb := twin.Pair(twin.Config{Limits: ring})
	defer eb.Kill()
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	a.SetDeadline(time.Now().Add(patience))
	r := countedOf(t, a)
	buf := make([]byte, 10)
	b.Write([]byte("x"))
	if n, err := r.Read(buf); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	proposed := proposes(t, a, ea)
	b.Write([]byte("abcdef"))
	if err := r.raw.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), buf[:3], 0)
		return err != syscall.EAGAIN
	}); !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
	if err := <-proposed; !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
	newconn.HandleOf(b).TCP().CloseWrite()
	if got, err := io.ReadAll(a); string(got) != "def" || !errors.Is(err, syscall.ECONNRESET) { // the peer may have moved
		t.Errorf("%q, %v", got, err)
	}
}

// If two functions read at the same time, by one RawConn or by two, each byte goes to one of them.
func TestCountedReadsAtOnce(t *testing.T) {
	for _, raws := range []int{1, 2} {
		eachEndpoint(t, func(t *testing.T, l session.Limits) {
			a, b := pipe(t, l, nil)
			b.SetReadDeadline(time.Now().Add(patience))
			rs := []counted{countedOf(t, b), countedOf(t, b)}
			sent := pattern(3000)
			go func() {
				for i := range sent {
					if _, err := a.Write(sent[i : i+1]); err != nil {
						t.Error(err)
						break
					}
				}
				a.CloseWrite()
			}()
			var counts [2][256]int
			var reading sync.WaitGroup
			for i := range counts {
				reading.Go(func() {
					r, one := rs[i%raws], make([]byte, 1)
					for {
						_, err := r.Read(one)
						if err == io.EOF {
							return
						} else if err != nil {
							t.Error(err)
							return
						}
						counts[i][one[0]]++
					}
				})
			}
			reading.Wait()
			for _, b := range sent {
				counts[0][b]--
			}
			for v := range 256 {
				if n := counts[0][v] + counts[1][v]; n != 0 {
					t.Errorf("of the bytes %#x came %d too many", v, n)
				}
			}
		})
	}
}

// A function that never waits finds TCP's end, or its error, in a later call.
func TestCountedReadThatNeverWaits(t *testing.T) {
	for _, reset := range []bool{false, true} {
		a, b, _ := onTCPPair(t, newconn.Config{})
		r, buf := countedOf(t, b), make([]byte, 10)
		a.Write([]byte("x"))
		if n, err := r.Read(buf); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		want := error(nil)
		if reset {
			want = syscall.ECONNRESET
			a.SetLinger(0)
		}
		a.Close()
		for range 2 { // and again
			testenv.Eventually(t, patience, func() error {
				n, err := -1, error(nil)
				if failed := r.raw.Read(func(fd uintptr) bool {
					n, err = testenv.SyscallRead(int(fd), buf)
					return true
				}); failed != nil {
					return failed
				}
				if err != want || n > 0 || err == nil && n < 0 {
					return fmt.Errorf("reset %v: read %d, %v", reset, n, err)
				}
				return nil
			})
		}
	}
}

// A function that looks once and finds nothing does not take the reset from a later Read, and does not
// find the end of a stream that lacks bytes.
func TestCountedLooksAtACutStream(t *testing.T) {
	look := func(r counted) (n int, err error) {
		failed := r.raw.Read(func(fd uintptr) bool {
			n, err = testenv.SyscallRead(int(fd), make([]byte, 10))
			return true
		})
		return n, errors.Join(err, failed)
	}
	for range 20 {
		a, b, _ := onTCPPair(t, newconn.Config{})
		r := countedOf(t, b)
		a.Write([]byte("x"))
		if n, err := r.Read(make([]byte, 10)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		a.SetLinger(0)
		a.Close()
		if _, err := look(r); !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		for _, want := range []error{syscall.ECONNRESET, io.EOF} {
			if _, err := b.Read(make([]byte, 1)); !errors.Is(err, want) {
				t.Fatalf("%v, want %v", err, want)
			}
		}
	}
	a, b, _ := onTCPPair(t, newconn.Config{})
	r := countedOf(t, b)
	if p := b.Provider(); p != "tcp" {
		t.Fatal(p)
	}
	sanconn.Expect(b, 10) // these bytes do not come
	a.Close()
	testenv.Eventually(t, patience, func() error {
		n, err := look(r)
		if n == 0 && err == nil {
			t.Fatal("it finds an end")
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			return err
		}
		return nil
	})
}

// While a function of one RawConn has the descriptor, a function of another RawConn waits, so that each
// syscall.Read reads for its own function.
func TestCountedReadsByTwoRawConns(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		if l.Provider == moving.Provider {
			return // the bytes of one carrier would be awaited on the other
		}
		a, b := pipe(t, l, nil)
		b.SetReadDeadline(time.Now().Add(patience))
		first, second, one := countedOf(t, b), countedOf(t, b), make([]byte, 1)
		for _, r := range []counted{first, second} {
			a.Write([]byte("x"))
			if n, err := r.Read(one); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		a.Write([]byte("a"))
		began, over, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		calls, n := 0, 0
		var failed error
		err := first.raw.Read(func(fd uintptr) bool {
			if calls++; calls == 1 {
				go func() {
					ended <- second.raw.Read(func(uintptr) bool {
						select {
						case <-began: // this is not the first call
						default:
							close(began)
						}
						<-over
						return true
					})
				}()
				select {
				case <-began:
				case <-time.After(50 * time.Millisecond): // it was not called, as it should be
				}
			}
			n, failed = testenv.SyscallRead(int(fd), one)
			return true
		})
		close(over)
		if calls != 1 || n != 1 || one[0] != 'a' || err != nil || failed != nil {
			t.Errorf("called %d times, read %d of %q, %v, %v", calls, n, one, err, failed)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A function that reads in another way in the middle of a move, after others that read by syscall.Read,
// resets the connection: it is not known any more how much of TCP was read.
func TestUncountedInTheMiddleOfAMove(t *testing.T) {
	a, b, move := onTCPPair(t, newconn.Config{})
	r := countedOf(t, b)
	buf := make([]byte, 10)
	a.Write([]byte("x"))
	if n, err := r.Read(buf); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	a.Write([]byte("abcdef"))
	if err := move(); err != nil { // b has not read up to the position
		t.Fatal(err)
	}
	err := r.raw.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), buf[:3], 0)
		return err != syscall.EAGAIN
	})
	if err == nil {
		t.Error("it may")
	}
	b.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadAll(b); !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
}

// A counted Read does not allocate, as net's does not, provided that its function is made once.
func TestCountedReadAllocatesNothing(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		if l.Provider == moving.Provider {
			return // its move allocates
		}
		a, b := pipe(t, l, nil)
		r := countedOf(t, b)
		b.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 10)
		f := func(fd uintptr) bool {
			_, err := testenv.SyscallRead(int(fd), buf)
			return err != syscall.EAGAIN
		}
		turn := func() {
			if _, err := a.Write(buf[:1]); err != nil {
				t.Fatal(err)
			}
			if err := r.raw.Read(f); err != nil {
				t.Fatal(err)
			}
		}
		turn() // after this it is known how the function reads
		if n := testing.AllocsPerRun(200, turn); n >= 1 {
			t.Errorf("%v allocations", n)
		}
	})
}

// A function that finds nothing, or waits after the end, is not called again before something has
// changed, and neither is one that reads in another way.
func TestCountedReadWaits(t *testing.T) {
	const most = 20 // some calls find out that it has to wait, and how it reads
	buf := make([]byte, 10)
	read := func(fd uintptr) { testenv.SyscallRead(int(fd), buf) }
	for name, tt := range map[string]struct {
		ends bool
		does func(fd uintptr)
	}{
		"nothing": {false, read},
		"the end": {true, read},
		"looks":   {false, func(fd uintptr) { syscall.Recvfrom(int(fd), buf, syscall.MSG_PEEK) }},
	} {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				r := countedOf(t, b)
				b.SetReadDeadline(time.Now().Add(patience))
				a.Write([]byte("x"))
				if n, err := r.Read(buf[:1]); n != 1 || err != nil {
					t.Fatal(n, err)
				}
				a.Write([]byte("y"))
				if tt.ends {
					a.CloseWrite()
				}
				if name == "looks" {
					if n, err := r.Read(buf[:1]); n != 1 || err != nil {
						t.Fatal(n, err)
					}
				}
				b.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				calls := 0
				if err := r.raw.Read(func(fd uintptr) bool {
					calls++
					tt.does(fd)
					return false
				}); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error(err)
				}
				if calls > most {
					t.Errorf("it was called %d times", calls)
				}
			})
		})
	}
}

// After the deadline no function is called, even if something has come.
func TestCountedReadBehindTheDeadline(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		r := countedOf(t, b)
		buf := make([]byte, 1)
		b.SetReadDeadline(time.Now().Add(patience))
		a.Write([]byte("xy"))
		if n, err := r.Read(buf); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		b.SetReadDeadline(time.Unix(1, 0))
		if err := r.raw.Read(func(uintptr) bool { t.Error("it is called"); return true }); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	})
}

// A syscall.Read that has found a function's connection, but reaches it only when the function has
// returned, reads nothing.
func TestCountedReadIsOver(t *testing.T) {
	a, b, _ := onTCPPair(t, newconn.Config{})
	r := countedOf(t, b)
	a.Write([]byte("x"))
	testenv.Eventually(t, patience, func() error {
		var kept undernet.RawReader
		if err := r.raw.Read(func(fd uintptr) bool { kept = undernet.ReaderOf(int(fd)); return true }); err != nil {
			t.Fatal(err)
		}
		if kept == nil {
			return errors.New("nothing has come")
		}
		if _, _, err := kept.Next(); err != syscall.EAGAIN {
			kept.Took(0, syscall.EAGAIN)
			t.Error(err)
		}
		return nil
	})
}

// While the meaning of TCP's end is not known, a deadline and Close end a Read as usual.
func TestCountedReadBehindAnOpenEnd(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{MaxMessage: 4096}})
	defer eb.Kill()
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	r, buf := countedOf(t, a), make([]byte, 10)
	b.Write([]byte("x"))
	if n, err := r.Read(buf); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	proposed := proposes(t, a, ea)
	newconn.HandleOf(b).TCP().CloseWrite()
	a.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := r.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("behind a deadline: %d, %v", n, err)
	}
	a.SetReadDeadline(time.Time{})
	read := make(chan error, 1)
	go func() { _, err := r.Read(buf); read <- err }()
	testenv.Eventually(t, patience, func() error {
		if !sanconn.Reading(a) {
			return errors.New("it does not read")
		}
		return nil
	})
	a.Close()
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("beside Close: %v", err)
	}
	<-proposed
}

// If the connection leaves the session while a function has the descriptor, the function gets nothing
// from the session, and what has come is read by TCP.
func TestCountedReadBesideTheWayBack(t *testing.T) {
	for _, carrier := range carriers[2:] { // sessions from the beginning
		a, b := pipe(t, carrier.limits, nil)
		b.SetReadDeadline(time.Now().Add(patience))
		r, buf := countedOf(t, b), make([]byte, 10)
		a.Write([]byte("x"))
		if n, err := r.Read(buf); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		sendUnread(t, a, b)
		left := make(chan error, 1)
		calls, got := 0, ""
		err := r.raw.Read(func(fd uintptr) bool {
			if calls++; calls == 1 {
				go func() { left <- sanconn.LeaveSAN(a) }()
				testenv.Eventually(t, patience, func() error {
					if sanconn.SessionOf(b) != nil {
						return errors.New("it is on the session")
					}
					return nil
				})
			}
			n, err := testenv.SyscallRead(int(fd), buf)
			if err != nil && err != syscall.EAGAIN {
				t.Errorf("%s: call %d: %v", carrier.name, calls, err)
				return true
			}
			got += string(buf[:max(n, 0)])
			return len(got) == len("unread")
		})
		if err = errors.Join(err, <-left); err != nil || got != "unread" {
			t.Errorf("%s: %q, %v", carrier.name, got, err)
		}
	}
}

// A function that reads in another way, after others that read by syscall.Read, must not get TCP's bytes
// before those that Peek has taken from TCP. The connection does not move afterwards.
func TestUncountedBehindPeek(t *testing.T) {
	a, b, move := onTCPPair(t, newconn.Config{})
	r, buf := countedOf(t, b), make([]byte, 10)
	a.Write([]byte("xabc"))
	if n, err := r.Read(buf[:1]); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if got, err := b.Peek(); string(got) != "abc" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	a.Write([]byte("def"))
	n := -1
	if err := r.raw.Read(func(fd uintptr) bool {
		testenv.Eventually(t, patience, func() (err error) {
			n, _, err = syscall.Recvfrom(int(fd), buf[:2], 0)
			return err
		})
		return true
	}); err == nil {
		t.Errorf("it may read %q", buf[:n])
	}
	b.Discard(3)
	if err := move(); !errors.Is(err, connpair.ErrRefused) {
		t.Errorf("it moves: %v", err)
	}
}

// After a function has read in another way, after others that read by syscall.Read, the connection does
// not move, whether the function is done or waits for more: it is not known how much of TCP was read.
func TestNoMoveBehindUncounted(t *testing.T) {
	for name, want := range map[string]string{"done": "abc", "waits": "abcdef"} {
		t.Run(name, func(t *testing.T) {
			a, b := pipe(t, session.Limits{}, nil)
			b.SetReadDeadline(time.Now().Add(patience))
			r, buf := countedOf(t, b), make([]byte, 10)
			a.Write([]byte("x"))
			if n, err := r.Read(buf); n != 1 || err != nil { // by the session, before a function has had the descriptor
				t.Fatal(n, err)
			}
			if err := sanconn.LeaveSAN(a); err != nil {
				t.Fatal(err)
			}
			awaitLeft(t, b)
			a.Write([]byte("abc"))
			got, took, ended := "", make(chan struct{}, 10), make(chan error, 1)
			go func() {
				ended <- r.raw.Read(func(fd uintptr) bool {
					n, _, _ := syscall.Recvfrom(int(fd), buf, 0)
					if got += string(buf[:max(n, 0)]); n > 0 {
						took <- struct{}{}
					}
					return got == want
				})
			}()
			<-took
			if want == "abc" {
				if err := <-ended; err != nil {
					t.Fatal(err)
				}
			}
			ea, eb := twin.Pair(twin.Config{})
			if err := movePair(t.Context(), a, b, ea, eb, sessions{}); !errors.Is(err, connpair.ErrRefused) {
				t.Fatalf("it moves: %v", err)
			}
			if want != "abc" {
				a.Write([]byte("def"))
				if err := <-ended; err != nil || got != want {
					t.Errorf("%q, %v", got, err)
				}
			}
		})
	}
}

// A deadline takes precedence over bytes that Peek has left unread.
func TestCountedReadBehindPeek(t *testing.T) {
	a, b, _ := onTCPPair(t, newconn.Config{})
	r := countedOf(t, b)
	a.Write([]byte("xabc"))
	buf := make([]byte, 10)
	if n, err := r.Read(buf[:1]); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := b.Peek(); err != nil {
		t.Fatal(err)
	}
	b.Discard(1)
	b.SetReadDeadline(time.Unix(1, 0))
	if n, err := r.Read(buf); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(n, err)
	}
	b.SetReadDeadline(time.Now().Add(patience))
	if n, err := r.Read(buf); string(buf[:n]) != "bc" || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
}

// At each stage of a move, and of the way back, the peer's Close is the end of the stream, and a reset
// is not.
func TestCountedReadEndsOnTheWay(t *testing.T) {
	buf := make([]byte, 10)
	moved := false
	for i := range 300 { // with the race detector some runs end at the wrong moment
		for of := range 4 {
			resets, waits := of&1 != 0, of&2 != 0
			a, b := pipe(t, moving, nil)
			r := countedOf(t, b)
			a.Write([]byte("ab"))
			if n, err := io.ReadFull(r, buf[:2]); n != 2 || err != nil {
				t.Fatal(n, err)
			}
			want := io.EOF
			if resets {
				want = syscall.ECONNRESET
				a.SetLinger(0)
			}
			for range i % 20 {
				runtime.Gosched()
			}
			if _, err := r.readBeside(buf, waits, func() { a.Close() }); !errors.Is(err, want) {
				t.Errorf("waits %v: %v, want %v\n%s", waits, err, want, b.Debug())
			}
			moved = moved || b.Provider() != onTCP.Provider
			b.Close()
		}
	}
	if !moved {
		t.Error("none has moved")
	}
}

// A counted Read returns what a RawConn's Read of net returns, and its function finds what syscall.Read
// returns on TCP.
func TestCountedReadEnds(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		buf := make([]byte, 10)
		for _, c := range []struct {
			what  string
			ends  func(a, b *sanconn.Conn)
			want  error
			later error // of the next Read
		}{
			{"the peer's CloseWrite", func(a, _ *sanconn.Conn) { a.CloseWrite() }, io.EOF, io.EOF},
			{"the peer's Close", func(a, _ *sanconn.Conn) { a.Close() }, io.EOF, io.EOF},
			{"CloseRead", func(_, b *sanconn.Conn) { b.CloseRead() }, io.EOF, io.EOF},
			{"a deadline", func(_, b *sanconn.Conn) { b.SetReadDeadline(time.Now().Add(time.Millisecond)) }, os.ErrDeadlineExceeded, os.ErrDeadlineExceeded},
			{"Close", func(_, b *sanconn.Conn) { b.Close() }, net.ErrClosed, net.ErrClosed},
			{"a reset", func(a, _ *sanconn.Conn) { a.SetLinger(0); a.Close() }, syscall.ECONNRESET, nil},
		} {
			for _, waits := range []bool{false, true} {
				a, b := pipe(t, l, nil)
				r := countedOf(t, b)
				a.Write([]byte("ab"))
				if n, err := io.ReadFull(r, buf[:2]); n != 2 || err != nil {
					t.Fatal(n, err)
				}
				n, err := r.readBeside(buf, waits, func() { c.ends(a, b) })
				if n != 0 {
					t.Errorf("%s: %d bytes", c.what, n)
				}
				if !errors.Is(err, c.want) {
					t.Errorf("%s, waits %v: %v", c.what, waits, err)
				}
				var oe *net.OpError
				if errors.As(err, &oe) && oe.Op != "raw-read" {
					t.Errorf("%s, waits %v: %v", c.what, waits, err)
				}
				if _, err = r.Read(buf); c.later != nil && !errors.Is(err, c.later) {
					t.Errorf("behind %s: %v", c.what, err)
				}
			}
		}
	})
}

// What the connection has learned about one function does not affect another: that one gets TCP's
// descriptor, for which the connection goes back to TCP.
func TestUncountedBehindCounted(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		r := countedOf(t, b)
		b.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 10)
		for range 3 {
			a.Write([]byte("abcdef"))
			if _, err := io.ReadFull(r, buf[:2]); err != nil {
				t.Fatal(err)
			}
			got := ""
			if err := r.raw.Read(func(fd uintptr) bool {
				n, _, err := syscall.Recvfrom(int(fd), buf, 0)
				got += string(buf[:max(n, 0)])
				return err != syscall.EAGAIN && len(got) == 4
			}); l.Provider == moving.Provider && errors.Is(err, syscall.ECONNRESET) {
				return // in the middle of its move
			} else if err != nil || got != "cdef" {
				t.Fatalf("%q, %v", got, err)
			}
		}
	})
}

// all reads with one function, which reads in each call until it finds nothing or the end, and waits for
// more until the end. It returns what was read.
func (c counted) all(t *testing.T) (got string, err error) {
	t.Helper()
	buf := make([]byte, 100)
	err = c.raw.Read(func(fd uintptr) bool {
		for {
			switch n, err := testenv.SyscallRead(int(fd), buf); {
			case n > 0:
				got += string(buf[:n])
			case err == syscall.EAGAIN:
				return false
			case err != nil:
				t.Error(err)
				return true
			default:
				return true
			}
		}
	})
	return got, err
}

// A function that reads several times in one call gets the next bytes each time, from the session, from
// TCP, or from what came back, and the end after everything.
func TestCountedReadsInOneCall(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		b.SetReadDeadline(time.Now().Add(patience))
		a.Write([]byte("abc"))
		a.Write([]byte("def"))
		a.CloseWrite()
		if got, err := countedOf(t, b).all(t); got != "abcdef" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("behind what came back", func(t *testing.T) {
		a, b, move := onTCPPair(t, newconn.Config{})
		r := countedOf(t, b)
		a.Write([]byte("x"))
		if n, err := r.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		a.Write([]byte("by TCP, "))
		if err := move(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			if a.Stats().BytesSent > a.Stats().TCPBytesSent {
				return nil
			}
			a.Write([]byte("."))
			return errors.New("it has not moved")
		})
		takeFile(t, a, b)
		a.Write([]byte("by TCP again"))
		a.CloseWrite()
		got, err := r.all(t)
		if n := int(a.Stats().BytesSent); err != nil || len(got) != n-1 || got[:8] != "by TCP, " || got[len(got)-12:] != "by TCP again" {
			t.Errorf("%q of %d bytes, %v", got, n, err)
		}
	})
	t.Run("behind Peek", func(t *testing.T) {
		a, b, _ := onTCPPair(t, newconn.Config{})
		r := countedOf(t, b)
		a.Write([]byte("xabc"))
		if n, err := r.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if _, err := b.Peek(); err != nil {
			t.Fatal(err)
		}
		a.Write([]byte("def"))
		a.CloseWrite()
		if got, err := r.all(t); got != "abcdef" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// The first counted Read on a session reads from the session, at both ends, and both stay on it. A
// function that peeks, after others that read, is shown by TCP what has come.
func TestCountedReadOnASession(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		if l.Provider == moving.Provider {
			return // it has not moved by then
		}
		a, b := pipe(t, l, nil)
		carrier := b.Provider()
		ra, rb := countedOf(t, a), countedOf(t, b)
		a.Write([]byte("from a"))
		ended := make(chan error, 1)
		go func() {
			_, err := ra.Read(make([]byte, 10))
			ended <- err
		}()
		<-ra.waits
		buf := make([]byte, 10)
		b.SetReadDeadline(time.Now().Add(patience))
		if n, err := rb.Read(buf); string(buf[:max(n, 0)]) != "from a" || err != nil {
			t.Errorf("%q, %v", buf[:max(n, 0)], err)
		}
		b.Write([]byte("from b"))
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if a.Provider() != carrier || b.Provider() != carrier {
			t.Errorf("they were carried by %s, and are by %s and %s", carrier, a.Provider(), b.Provider())
		}
		a.Write([]byte("abc"))
		if _, err := b.Peek(); err != nil { // until it has come
			t.Fatal(err)
		}
		b.Discard(0)
		if l.Provider == onTCP.Provider {
			return // Peek has taken the bytes from TCP
		}
		n := 0
		if err := rb.raw.Read(func(fd uintptr) bool {
			n, _, _ = syscall.Recvfrom(int(fd), buf, syscall.MSG_PEEK)
			return true
		}); err != nil || string(buf[:max(n, 0)]) != "abc" {
			t.Errorf("%d bytes are shown, %v", n, err)
		}
	})
}

// A goroutine that has kept the descriptor's number may read at the same time as a function that has the
// descriptor, as with net: each byte goes to one of them.
func TestCountedReadBesideAnother(t *testing.T) {
	const total = 1 << 20
	a, b, _ := onTCPPair(t, newconn.Config{})
	r := countedOf(t, b)
	a.Write([]byte("x"))
	if n, err := r.Read(make([]byte, 10)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	number := 0
	r.raw.Control(func(fd uintptr) { number = int(fd) })
	go a.Write(make([]byte, total))
	var n atomic.Int64
	var other sync.WaitGroup
	other.Go(func() {
		buf := make([]byte, 10)
		for n.Load() < total {
			k, _ := testenv.SyscallRead(number, buf)
			n.Add(int64(max(k, 0)))
		}
	})
	buf := make([]byte, 100)
	for n.Load() < total {
		b.SetReadDeadline(time.Now().Add(10 * time.Millisecond)) // the other goroutine may have read the last bytes
		k, err := r.Read(buf)
		n.Add(int64(k))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	other.Wait()
	if n.Load() != total {
		t.Errorf("%d of %d bytes", n.Load(), total)
	}
}
