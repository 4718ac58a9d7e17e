package sanconn

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// In programs that cmd/san has built, a function of RawConn.Read that reads by syscall.Read, as gRPC's
// does, reads the connection instead: from either carrier, and counted like the connection's own Read.
// Such a function neither takes the connection back to TCP nor keeps it there.

// lending is what syscall.Read finds while a function of a RawConn's Read has TCP's descriptor. In each
// call the function reads once, and then finds nothing, so that each read gets what comes next.
type lending struct {
	// Guarded by incoming.lends.
	f       func(fd uintptr) (done bool) // has the descriptor, or is to have it
	once    func(fd uintptr)             // lends the descriptor to f …
	waiting func(fd uintptr) (over bool) // … and is called again if f wants to wait; both are made once
	done    bool                         // f's result
	session *session.Session             // the session to read; nil: TCP, or what precedes it
	most    uint64                       // how many bytes may be read from TCP; 0: read what precedes it
	plain   bool                         // show TCP's end, and its errors, as they come

	mu    sync.Mutex // guards the fields below, as others may have kept the descriptor's number; held from Next to Took
	out   bool       // f has the descriptor
	used  bool       // f has read by syscall.Read
	took  bool       // … and got bytes of TCP
	tells error      // what f is told in place of bytes: the end, or an error
	ended error      // TCP's, kept for later calls: f need not wait for what it means
}

// lent has the RawConns whose descriptors functions have at the moment.
var lent lentTable

type lentTable struct {
	n       atomic.Int32 // how many there are, as each syscall.Read of the process checks that
	shelves [64]lentShelf
}

type lentShelf struct {
	mu sync.Mutex // guards by; held only for a look
	by map[int]*rawConn
}

func init() { undernet.ReaderOf = lent.readerOf }

// readerOf returns what syscall.Read reads in place of a descriptor, or nil.
func (t *lentTable) readerOf(fd int) undernet.RawReader {
	if t.n.Load() == 0 {
		return nil
	}
	s := t.shelf(fd)
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.by[fd]; r != nil {
		return r
	}
	return nil
}

func (t *lentTable) shelf(fd int) *lentShelf { return &t.shelves[uint(fd)%uint(len(t.shelves))] }

func (t *lentTable) add(fd int, r *rawConn) {
	s := t.shelf(fd)
	s.mu.Lock()
	if s.by == nil {
		s.by = make(map[int]*rawConn)
	}
	s.by[fd] = r
	s.mu.Unlock()
	t.n.Add(1)
}

func (t *lentTable) remove(fd int) {
	s := t.shelf(fd)
	s.mu.Lock()
	delete(s.by, fd)
	s.mu.Unlock()
	t.n.Add(-1)
}

// lendingLocked returns r's lending. incoming.lends is held.
func (r *rawConn) lendingLocked() *lending {
	if r.lending == nil {
		r.lending = new(lending)
	}
	return r.lending
}

// lend calls f with TCP's descriptor, which is not closed meanwhile.
func (r *rawConn) lend(fd uintptr) {
	l := r.lending
	if !undernet.Reads.Load() {
		l.done = l.f(fd)
		return
	}
	l.mu.Lock()
	l.out, l.used, l.took = true, false, false
	l.mu.Unlock()
	lent.add(int(fd), r)
	defer func() { // even if f panics
		lent.remove(int(fd))
		l.mu.Lock()
		l.out = false
		r.counts.Store(l.used)
		l.mu.Unlock()
	}()
	l.done = l.f(fd)
}

// Next implements undernet.RawReader.
func (r *rawConn) Next() (b []byte, most uint64, err error) {
	l := r.lending
	l.mu.Lock()
	defer func() {
		if err != nil {
			l.mu.Unlock()
		}
	}()
	if !l.out || l.used {
		return nil, 0, syscall.EAGAIN
	}
	l.used = true
	switch {
	case l.tells != nil:
		err = l.tells
	case l.session != nil:
		b, err = l.session.PeekExclusive(false)
		raceedge.Acquire()
		if b == nil && err == nil {
			err = syscall.EAGAIN
		} else if err != nil && asErrno(err) != syscall.EAGAIN {
			l.tells = err
		}
	case l.most > 0:
		most = l.most
	default:
		b = r.c.in.front
	}
	return b, most, asErrno(err)
}

// Took implements undernet.RawReader.
func (r *rawConn) Took(n int, err error) error {
	l := r.lending
	defer l.mu.Unlock()
	switch {
	case l.tells != nil: // the end
	case l.session != nil:
		l.session.Discard(n)
	case l.most == 0:
		r.c.in.advance(r.c, n)
	case n > 0:
		l.took = true
		r.c.in.count(r.c, n)
	case !l.plain && err != syscall.EAGAIN && err != syscall.EINTR:
		l.ended = cmp.Or(err, io.EOF)
		r.c.mu.Lock()
		r.c.state.tcpFailed(err) // for other operations, if f does not wait for what that means
		r.c.mu.Unlock()
		return syscall.EAGAIN
	}
	return err
}

// asErrno returns syscall.Read's result for an error of the connection; it is nil also for the end. For
// an error of this end only, such as a deadline, f has to wait: RawConn.Read returns that error.
func asErrno(err error) error {
	switch err {
	case nil, io.EOF:
		return nil
	case syscall.EAGAIN, session.ErrTaken, session.ErrInterrupted, session.ErrClosed:
		return syscall.EAGAIN
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return syscall.ECONNRESET
}

// readCounted is Read for a function that reads by syscall.Read, or that may: on a session it is tried.
// It returns false without an error once the function has not read by syscall.Read.
func (r *rawConn) readCounted(f func(fd uintptr) (done bool)) (done bool, err error) {
	c, tries := r.c, !r.counts.Load()
	for {
		s, did, err := r.readOnce(f, tries)
		switch {
		case err == errUncounted, err == nil && !did.read && s != nil:
			return false, nil // f is called again, with what has come shown in another way
		case err != nil && err != errLook, did.done, err == nil && !did.read:
			return did.done, err
		case err == nil && did.told: // f waits after the end
			if err := c.in.awaitBehindEnd(c); err != nil {
				return false, err
			}
		case err == nil && s != nil:
			var b []byte
			if b, err = s.PeekExclusive(true); b != nil {
				s.Discard(0)
			}
			if err == session.ErrInterrupted || err == session.ErrClosed {
				return false, err
			}
		}
		if err == errLook || err == session.ErrTaken {
			if err := c.in.await(c); err != nil && err != io.EOF {
				return false, err
			}
		}
		tries = tries && !did.read
	}
}

// errUncounted means that there is no session on which to try a function.
var errUncounted = errors.New("sanconn: on TCP")

// callResult is the result of one call of a function: it was done, has read by syscall.Read, and was
// told the end or an error.
type callResult struct{ done, read, told bool }

// readOnce makes f read once: from a session, which it returns, or from TCP, where it waits as long as
// f wants to.
func (r *rawConn) readOnce(f func(fd uintptr) (done bool), tries bool) (s *session.Session, did callResult, err error) {
	c := r.c
	c.in.lends.Lock()
	defer c.in.lends.Unlock()
	l := r.lendingLocked()
	if s = c.in.san.Load(); s == nil || tries { // a function that reads otherwise must not find TCP's bytes
		c.in.op.Lock()
		defer c.in.unlock(c)
		s = c.in.san.Load()
	}
	l.f, l.session, l.most, l.plain, l.tells, l.done = f, s, 0, false, nil, false
	if l.once == nil {
		l.once = r.lend
		l.waiting = func(fd uintptr) bool {
			r.lend(fd)
			return l.done || !l.used || l.took || l.ended != nil
		}
	}
	if tries && !(s != nil && r.quiet()) {
		return nil, callResult{}, errUncounted
	}
	if err = c.in.stopped(c); err == nil && s == nil {
		l.most, err = c.in.beforeLocked(c)
	}
	switch {
	case err == io.EOF: // by CloseRead
		l.tells = io.EOF
	case err != nil:
		return nil, callResult{}, err
	case l.most == 0:
		c.mu.Lock()
		err = c.in.deadline.passed(c)
		c.mu.Unlock()
		if err != nil {
			return nil, callResult{}, err
		}
	}
	if l.most > 0 {
		if l.ended == nil { // f may not have waited for what an earlier error means
			err = c.in.deadline.afterTCP(c, opRawRead, r.tcp().Read(l.waiting))
			if err == nil {
				err = c.readByTCP(l.used)
			}
			if err != nil || l.ended == nil || l.done {
				return nil, callResult{done: l.done, read: l.used}, err
			}
		}
		if err = c.in.endOfTCP(c, l.ended); err == errLook {
			l.ended = nil
		}
		if err == errLook || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return nil, callResult{}, err
		}
		l.tells = err
	}
	err = r.tcp().Control(l.once)
	if s != nil && !tries && c.in.san.Load() != s { // the session was left meanwhile
		c.in.nudge(c) // a Read by TCP has found the descriptor lent, as net reads by syscall.Read, too
	}
	switch {
	case l.used || err != nil:
	case s != nil:
		r.otherwise.Store(true)
		if !tries && c.in.san.Load() != s { // the session was left meanwhile
			c.in.op.Lock()
			err = c.readByTCP(false)
			c.in.unlock(c)
		}
	case c.in.holds(): // f may have read what follows these bytes
		c.fd.exposed.Add(1)
		err = errUnread
	}
	return s, callResult{l.done, l.used, l.tells != nil}, err
}

// quiet reports whether TCP shows nothing. A function that is tried and reads otherwise would take an
// error of TCP's, and would find the end when it is called again.
func (r *rawConn) quiet() (is bool) {
	r.tcp().Control(func(fd uintptr) { is = nothingIn(int(fd)) })
	return is
}

// readByTCP is called after a function has had TCP's descriptor; counted: it has read only by
// syscall.Read, and was counted. Before a move, if it was not counted, the counts are compared. During
// a move, the end of TCP's bytes would not be found.
func (c *Conn) readByTCP(counted bool) error {
	if !counted {
		c.fd.exposed.Add(1)
	}
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	switch {
	case !counted && c.in.holds():
		return errUnread
	case s == nil:
		return nil
	}
	_, read, err := tcpid.Positions(c.tcp)
	switch {
	case errors.Is(err, tcpid.ErrNotConnected): // what is missing then is found to be cut
		return nil
	case err == nil && read != c.in.bytes.Load():
		err = errCounts
	}
	if err != nil {
		err = s.Fail(err)
		c.sessionOver(s, false, err) // the session itself reports no end before the peer has taken it
	}
	return err
}
