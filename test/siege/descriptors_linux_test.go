package siege

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/test/siege/internal/rawshm"
)

// Attacks with descriptors that are passed, and with descriptors that are kept.

func init() {
	roles["closers"] = attackRole(closersRole)
	roles["stuffed"] = attackRole(stuffedRole)
	roles["keep"] = attackRole(keepRole)
}

// closersRole passes more lingering sockets than there are threads that close what it has passed. Then
// it connects, passes more, and hangs up, without end.
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
				break // the victim does not accept it
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

// stuffedRole sends messages with as many descriptors as the kernel can pass: as the first or a later
// message of a link, on many links at the same time, again and again. It reports how many links did not
// end at the first such message.
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
				continue // there is no room for a link
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

// stuffable returns a link, and a message that is valid there at the moment.
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
	if err = l.Connect(0); err != nil { // a link without a connection would soon end anyway
		l.Close()
	}
	return l, m, err
}

// serves reports whether the peer goes on after a message that should have ended the link. A link goes
// on unless the peer hangs up instead of answering that message, or a segment after it. A handshake goes
// on unless the peer hangs up before there is a link.
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

// kept is how much memory, in bytes, the victim's halves of segments have of which an attacker has
// descriptors.
type kept struct {
	Ended  int64 // of links that have ended
	Unread int64 // of a link whose connections the victim has closed, and that were not read
}

// keepRole ends links whose rings the victim has filled, but keeps their descriptors. Then it also keeps
// a link whose rings the victim has filled and closed. On request it reports what it keeps.
func keepRole(a *attacker, args [2]int) error {
	links, last := args[0], args[1] // how many links, and how many connections the last link has
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

// allocated returns how much memory files have.
func allocated(fds []int) (n int64) {
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}
