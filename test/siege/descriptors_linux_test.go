package siege

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/test/siege/internal/rawshm"
)

// Attacks by the descriptors that are passed, and by those that are kept.

func init() {
	roles["closers"] = attackRole(closersRole)
	roles["stuffed"] = attackRole(stuffedRole)
	roles["keep"] = attackRole(keepRole)
}

// closersRole passes sockets that linger, more of them than threads close what it has passed,
// and then connects, passes more and hangs up, without end.
func closersRole(a *attacker, want int) error {
	passed, err := a.passLingering(want)
	if err != nil {
		return err
	}
	bell, err := rawshm.NewDoorbell()
	if err != nil {
		return err
	}
	n := 0
	pass := func() {
		for range 100 {
			s, err := rawshm.Dial(a.to.Port())
			if err != nil {
				break // they are not accepted
			}
			rawshm.Send(s, rawshm.Message{Kind: rawshm.Link, Number: rawshm.FirstSlots}, bell, bell)
			unix.Close(s)
			n++
		}
		time.Sleep(10 * time.Millisecond) // its pace
	}
	for range 50 {
		pass()
	}
	a.stands("%d sockets linger, and %d were closed behind them", passed, n)
	go func() {
		for {
			pass()
		}
	}()
	a.untilEnd()
	return nil
}

// stuffedRole sends messages with as many descriptors as the kernel passes on: the first ones of
// links and later ones, on many links at once, again and again. It says how many links did not
// end by the first of that.
func stuffedRole(a *attacker, links int) error {
	const most = 253 // SCM_MAX_FD
	bell, err := rawshm.NewDoorbell()
	if err != nil {
		return err
	}
	fds := make([]int, most)
	for i := range fds {
		fds[i] = bell
	}
	pass := func() (sent, outlived int) {
		var all []*rawshm.Conduit
		for i := range links {
			l, m, err := a.stuffable(i)
			if err != nil {
				continue // there is no room
			}
			defer l.Close()
			if rawshm.Send(l.Socket, m, fds...) == nil {
				all = append(all, l)
			}
		}
		for _, l := range all {
			if serves(l) {
				outlived++
			}
		}
		return len(all), outlived
	}
	sent, outlived := pass()
	a.stands("%d messages of %d descriptors", sent, most)
	a.say("outlived", outlived)
	go func() {
		for {
			pass()
		}
	}()
	a.untilEnd()
	return nil
}

// stuffable returns a link, and a message that is due there.
func (a *attacker) stuffable(i int) (l *rawshm.Conduit, m rawshm.Message, err error) {
	switch i % 3 {
	case 0:
		socket, err := rawshm.Dial(a.to.Port())
		return &rawshm.Conduit{Socket: socket, Bell: -1}, rawshm.Message{Kind: rawshm.Link, Number: rawshm.FirstSlots}, err
	case 1:
		m = rawshm.Message{Kind: rawshm.Segment, Number: rawshm.FirstSlots}
	case 2:
		m = rawshm.Message{Kind: rawshm.Connect, Number: 1}
	}
	if l, err = a.link(); err != nil {
		return nil, m, err
	}
	if err = l.Connect(0); err != nil { // one without a connection ends soon anyway
		l.Close()
	}
	return l, m, err
}

// serves reports whether the peer goes on behind a message that should have ended the link: a link
// unless it hangs up instead of an answer, to that message or to a segment behind it, and a handshake
// unless it does so before it leads to one.
func serves(l *rawshm.Conduit) bool {
	if l.Slots() > 0 {
		err := l.Extend()
		return err == nil || err == unix.ETIMEDOUT || errors.As(err, new(rawshm.CodeError))
	}
	for {
		m, fds, err := rawshm.Receive(l.Socket, patience/2)
		for _, fd := range fds {
			unix.Close(fd)
		}
		if err != nil || m.Code == rawshm.OK {
			return err == nil || err == unix.ETIMEDOUT
		}
	}
}

// kept is how much memory the victim's halves of segments have, in bytes, that an attacker has
// descriptors of.
type kept struct {
	Ended  int64 // of links that have ended
	Unread int64 // of one whose connections the victim has closed, which were not read
}

// keepRole ends links whose rings the victim has filled, but keeps their descriptors. Then it
// keeps a link, too, whose rings the victim has filled, and closed. When it is asked, it says
// what it keeps.
func keepRole(a *attacker, args [2]int) error {
	links, last := args[0], args[1] // how many, and how many connections the last one has
	var ended []int
	for range links {
		l, conns, err := a.many(rawshm.FirstSlots, modeSend)
		if err != nil || len(conns) == 0 {
			return errors.Join(err, errors.New("no connection"))
		}
		for _, c := range conns {
			if err := untilFull(c); err != nil {
				return err
			}
		}
		unix.Close(l.Socket)
		ended = append(ended, l.Halves...)
	}
	l, conns, err := a.many(last, modeFill)
	if err != nil {
		return err
	}
	for _, c := range conns {
		if err := untilDone(c, patience/2); err != nil {
			return err
		}
	}
	a.stands("%d links have ended, and %d connections were closed", links, len(conns))
	for a.command() != "" {
		a.say("kept", kept{allocated(ended), allocated(l.Halves)})
	}
	return nil
}

// allocated is how much memory files have.
func allocated(fds []int) (n int64) {
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}
