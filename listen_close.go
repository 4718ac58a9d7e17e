package san

import (
	"cmp"
	"net"
	"time"
)

// leftTime bounds how long what Close leaves waits for Accept: on a busy machine a server's
// loop takes its time to come round. It is a variable for tests.
var leftTime = 5 * time.Second

// Close ends the listener. Connections that wait for Accept are reset; those that
// were accepted live on. It waits for the negotiations under way to end.
//
// If the listener was adopted, or File was called, other processes may share its socket,
// and a dialer is not to notice that one of them ends. Then connections that wait are not
// reset: for 5 s, Accept returns them before it returns net.ErrClosed. So go on calling
// Accept, as the loop of a server does, until it fails.
func (l *Listener) Close() error {
	if l.closing.Swap(true) {
		return &net.OpError{Op: "close", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
	err := l.tcp.Close()
	err = cmp.Or(err, l.stop())
	if l.shared.Load() && len(l.ready)+len(l.left) > 0 {
		time.AfterFunc(leftTime, l.resetLeft)
	} else {
		l.resetLeft()
	}
	close(l.settled)
	return err
}

// stop ends all but the TCP listener, which nobody accepts from any more.
func (l *Listener) stop() (err error) {
	for _, a := range l.acceptors { // first: those whose negotiation ends may try again elsewhere
		err = cmp.Or(err, a.Close())
	}
	close(l.closed)
	l.cancel()
	l.startTCP.Do(func() {}) // a later Accept must start nothing
	l.background.Wait()
	return err
}

// resetLeft resets what nobody accepts.
func (l *Listener) resetLeft() {
	for {
		select {
		case c := <-l.ready:
			c.SetLinger(0)
			c.Close()
		case c := <-l.left:
			reset(c)
		default:
			return
		}
	}
}
