// Package newconn is what package moving does with the connections that package sanconn gives
// to programs, and no program has a use for: so package sanconn does not export it.
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
	// New makes a *sanconn.Conn around a TCP connection, which it owns from now on.
	New func(tcp *net.TCPConn, c Config) net.Conn

	// HandleOf returns the Handle of a *sanconn.Conn, by which that moves. They are one object.
	HandleOf func(net.Conn) Handle
)

// Never is for more bytes than any connection is used for.
const Never = int64(1) << 62

// Config is how a connection begins.
type Config struct {
	// Threshold is for how many bytes a connection must be used by its Read and Write before
	// Life.Used, and after the program has had its descriptor, before it moves: one that belongs
	// to an event loop never is.
	Threshold int64

	// Life gets what becomes of the connection.
	Life Life

	// PassedOn: others have had the descriptor. BytesWritten and BytesRead are what they have
	// written to and read from the TCP connection.
	PassedOn                bool
	BytesWritten, BytesRead uint64
}

// Life is what package moving keeps of a connection. It must not refer to that, which would never be
// collected then. Its methods must not block.
type Life interface {
	// Used is called by an operation that goes on, once the connection has been used for
	// Config.Threshold bytes: see Handle.CallUse. urgent: before that, by urgent data.
	Used(h Handle, urgent bool)

	// Closed is called once, when the connection is closed, or the program has forgotten it: on a
	// session, and on TCP if Holds, which is for what is held from the beginning on.
	Closed()
	Holds() bool

	// Moved is called when both ends have agreed to move to a session by a provider, also where
	// that is behind the end of Propose, and Left when the connection has gone back to TCP, with
	// why, unless that is a wish of either program.
	Moved(provider string)
	Left(why error)
}

// What the two ends of a connection send each other on a session, as its notes: the first
// byte of each.
//
//	proposal   dialer → acceptor   which connection, as package hello has it
//	answer     acceptor → dialer   whether it moves, likewise
//	begin      both ways           at: the session's bytes come behind so many of TCP's
//	leave      both ways           at: so many bytes of the session are the application's
const (
	NoteProposal = 1
	NoteAnswer   = 2
	NoteBegin    = 3
	NoteLeave    = 4
)

// Handle is package moving's view of a connection.
type Handle interface {
	TCP() *net.TCPConn
	Life() Life

	// Propose proposes to the peer to move to a session, which the connection owns if it succeeds: it
	// sends hello, negotiates unless that has been done, and waits for the answer, of which judge
	// returns why the connection does not move, or nil. Then both directions move, each when its
	// writer gets to it. A peer that does not answer holds up Propose until ctx ends, but not the
	// connection; one that has not even taken the session, for half a second: then it never gets
	// the proposal, and the error is ErrNotTaken. On an error that is not ErrNoAnswer the session is
	// still the caller's.
	Propose(ctx context.Context, s *session.Session, hello []byte, judge func(answer []byte) error) error

	// Accept moves to a session by which the peer has made a proposal, and answers it. On an
	// error the session is still the caller's, and nothing has been answered.
	Accept(s *session.Session, answer []byte) error

	// Notes returns what a session of the connection is to have as its OnNote. It does not
	// keep the connection alive.
	Notes() func(s *session.Session, note []byte)

	// Stays reports whether TCP carries the connection for good, as the program uses its
	// descriptor.
	Stays() bool

	// Shut reports whether the program has closed the connection, or ended a direction of one
	// that no move is under way for, so that it does not move any more.
	Shut() bool

	// CallUse has Life.Used called again, once the connection has been used for so many
	// bytes more; Never: not before it is called again, as a move is under way.
	CallUse(bytes int64)

	// Moved waits until both directions have moved to the session, or cannot any more. It fails
	// where either had bytes of the application on TCP before.
	Moved(context.Context) error
}

// ErrNotTaken is the error of a Propose to a process that has not looked at it, as one that is
// stopped. Another one may be tried.
var ErrNotTaken = fmt.Errorf("the process that was asked does nothing: %w", syscall.ETIMEDOUT)

// ErrClaimed is the error of a Propose while the program has the descriptor, or may have taken it
// for itself: see Config.Threshold. It is no attempt.
var ErrClaimed error = &session.Unavailable{Reason: session.ReasonStays, Err: errors.New("the program uses the descriptor")}

// ErrNoAnswer is the error of a Propose that the peer has not answered yet. It may still move.
var ErrNoAnswer = fmt.Errorf("the peer has not answered yet: %w", syscall.ETIMEDOUT)
