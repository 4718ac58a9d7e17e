package shm

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// turnTime is how often a listener that waits in line looks whether it is its turn, for no
// event tells that. It costs a few microseconds. Dialers do not wait for it: where there is
// no first in line, they go to the second.
const turnTime = 100 * time.Millisecond

// When one restart follows another, the second place is still taken by a process that is
// about to move up. A listener that begins waits for it for placeTime, a few turns, and tries
// each placePause: the process is not to report that it is ready, whereupon the one ahead
// leaves, while no dialer would find it.
const (
	placeTime  = 3 * turnTime
	placePause = 5 * time.Millisecond
)

// line is a listener's place in the line of those that share its TCP listener. From the
// second on it always holds one of the two places, so whoever stands behind stays there,
// and a dialer that looks at both finds it. Who has neither place yet, as two others stay,
// waits for the second, in no order.
type line struct {
	at    [2]*entrance  // of first and second; nil: not held
	ended chan struct{} // closed when it is first, or gives up
}

// begin takes the first place. If that is taken it is an error, unless the listener is to
// take over: then it stands in line until the listener ends.
func (l *Listener) begin() (err error) {
	l.line.ended = make(chan struct{})
	if !l.cfg.TakeOver {
		defer close(l.line.ended)
		l.line.at[first], err = l.enter(first)
		return takenError(err)
	}
	err = l.advance()
	for end := time.Now().Add(placeTime); errors.Is(err, unix.EADDRINUSE) && l.line.at[second] == nil && time.Now().Before(end); {
		time.Sleep(placePause)
		err = l.advance()
	}
	if err == nil || !errors.Is(err, unix.EADDRINUSE) {
		close(l.line.ended)
		return takenError(err)
	}
	why := takenError(err)
	l.behind.Store(&why)
	go l.standInLine()
	return nil
}

// standInLine advances until the listener is first, or ends.
func (l *Listener) standInLine() {
	defer close(l.line.ended)
	turn := time.NewTicker(turnTime)
	defer turn.Stop()
	for {
		select {
		case <-l.closed:
			return
		case <-turn.C:
		}
		if err := l.advance(); err == nil {
			l.behind.Store(nil)
			return
		}
	}
}

// advance takes the second place, and then the first. It fails where there is somebody
// ahead; then it has advanced as far as it can.
func (l *Listener) advance() (err error) {
	for _, at := range []place{second, first} {
		if l.line.at[at] != nil {
			continue
		}
		if l.line.at[at], err = l.enter(at); err != nil {
			return err
		}
	}
	l.line.at[second].close() // those who have come there and were not accepted look again
	l.line.at[second] = nil
	return nil
}

// leave gives up the listener's place in line.
func (l *Listener) leave() (err error) {
	<-l.line.ended
	for _, e := range l.line.at {
		if e != nil {
			err = errors.Join(err, e.close())
		}
	}
	return err
}

// Waiting returns nil if the listener serves, and otherwise, while another process that
// shares the TCP listener does, a *session.Unavailable around EADDRINUSE.
func (l *Listener) Waiting() error {
	if why := l.behind.Load(); why != nil {
		return *why
	}
	return nil
}

// takenError is what an error of enter means to the listener.
func takenError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EADDRINUSE):
		// Another process serves the same listener, or somebody has guessed the name.
		// Dialers check whose process it is.
		return &session.Unavailable{Reason: session.ReasonOwner,
			Err: fmt.Errorf("shm: rendezvous: another process serves this TCP listener, until it closes its own or ends: %w", err)}
	}
	return unavailable(fmt.Errorf("shm: rendezvous: %w", err))
}
