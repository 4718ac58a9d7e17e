// Package newconn is the interface by which package moving makes and moves the connections of package
// sanconn. Programs have no use for it, so package sanconn does not export it.
package newconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/sanconn/san/session"
)

// Package sanconn, which imports this package, sets these when it is initialized.
var (
	// New makes a *sanconn.Conn around a TCP connection, which belongs to the new Conn from then on.
	New func(tcp *net.TCPConn, c Config) net.Conn

	// HandleOf returns the Handle of a *sanconn.Conn, by which package moving moves it. Both are one
	// object.
	HandleOf func(net.Conn) Handle
)

// Never is a number of bytes beyond the use of any connection.
const Never = int64(1) << 62

// Config is what a connection begins with.
type Config struct {
	// Threshold is how many bytes a connection must be used for, by its own Read and Write, before
	// Life.Used is called; likewise after the program has had its descriptor, before it moves again. A
	// connection whose descriptor belongs to an event loop is never used so.
	Threshold int64

	// Life is told what becomes of the connection.
	Life Life

	// PassedOn: other owners have had the descriptor before. BytesWritten and BytesRead are the bytes
	// that they have written to and read from the TCP connection.
	PassedOn                bool
	BytesWritten, BytesRead uint64
}

// Life is what package moving keeps about a connection. It must not refer to the connection, which
// would then never be collected. Its methods must not block.
type Life interface {
	// Used is called by an operation, and does not end it, once the connection has been used for
	// Config.Threshold bytes, and as Handle.CallUse requests. urgent: called earlier, because of urgent
	// data.
	Used(h Handle, urgent bool)

	// Closed is called once: when the connection is closed; or when it is collected, if it is on a
	// session then or Holds reports true. Holds reports whether the connection holds something from its
	// beginning on, which Closed releases.
	Closed()
	Holds() bool

	// Moved is called when both ends have agreed to move to a session by a provider, even if Propose
	// has returned before. Left is called when the connection has gone back to TCP; why is nil if
	// either program caused that.
	Moved(provider string)
	Left(why error)
}

// The notes that the two ends of a connection send each other on a session. The constants are the first
// byte of a note.
//
//	proposal   dialer → acceptor   which connection, encoded by package hello
//	answer     acceptor → dialer   whether it moves, encoded by package hello
//	begin      both ways           at: the session's bytes follow the first at bytes of TCP's stream
//	leave      both ways           at: the first at bytes of the session are the application's
const (
	NoteProposal = 1
	NoteAnswer   = 2
	NoteBegin    = 3
	NoteLeave    = 4
)

// Handle is what package moving can do with a connection.
type Handle interface {
	TCP() *net.TCPConn
	Life() Life

	// Propose proposes to the peer to move to a session. It negotiates, unless the session has, sends
	// hello as the proposal, and waits for the answer; judge returns why the connection does not move
	// by that answer, or nil. Then each direction moves when its writer gets to it. A peer that does
	// not answer delays Propose until ctx ends, but not the connection. A peer that does not take the
	// session within half a second never gets the proposal, and the error is ErrNotTaken. The session
	// belongs to the connection if Propose returns nil or ErrNoAnswer, otherwise to the caller.
	Propose(ctx context.Context, s *session.Session, hello []byte, judge func(answer []byte) error) error

	// Accept moves the connection to the session by which the peer has proposed, and sends the answer.
	// After an error the session still belongs to the caller, and no answer has been sent.
	Accept(s *session.Session, answer []byte) error

	// Notes returns the OnNote for a session of the connection. It does not keep the connection alive.
	Notes() func(s *session.Session, note []byte)

	// Stays reports whether the connection stays on TCP for good, because the program uses its
	// descriptor.
	Stays() bool

	// Shut reports whether the connection cannot move any more: the program has closed it, or has ended
	// one of its directions while no move was under way.
	Shut() bool

	// CallUse requests the next call of Life.Used, after the connection has been used for so many bytes
	// more. Never: no call until the next CallUse, as a move is under way.
	CallUse(bytes int64)

	// Moved waits until both directions have moved to the session, or cannot move any more. It fails if
	// either direction carried bytes of the application on TCP before.
	Moved(context.Context) error
}

// ErrNotTaken is the error of Propose if the process has not taken the session, as when it is stopped.
// The move may be proposed to another process.
var ErrNotTaken = fmt.Errorf("the process that was asked does nothing: %w", syscall.ETIMEDOUT)

// ErrClaimed is the error of Propose while the program has the descriptor, or may still use it for
// itself: see Config.Threshold. It does not count as an attempt.
var ErrClaimed error = &session.Unavailable{Reason: session.ReasonStays, Err: errors.New("the program uses the descriptor")}

// ErrNoAnswer is the error of Propose if the peer has not answered yet. The connection may still move.
var ErrNoAnswer = fmt.Errorf("the peer has not answered yet: %w", syscall.ETIMEDOUT)
