package siege

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/siege/internal/rawshm"
)

// Attacks go on for as long as the test measures. Each has its own pace, which leaves processor time to
// the victim and the bystander: the test is about what an attack costs these, and not about an idle
// loop. The attackers' sleeps are no waits for events.

// attacker is what an attacker has.
type attacker struct {
	*roleIO
	to netip.AddrPort // the victim's address

	tcp []*net.TCPConn // of the connections that it has moved
}

// stands reports that the attack has begun.
func (a *attacker) stands(what string, args ...any) {
	a.say("stands", fmt.Sprintf(what, args...))
}

// attackRole makes a role from an attack, whose settings are of type A.
func attackRole[A any](attack func(a *attacker, args A) error) func(*roleIO) error {
	return func(r *roleIO) error {
		var common attackArgs
		if err := r.args(&common); err != nil {
			return err
		}
		var args A
		if err := json.Unmarshal([]byte(common.More), &args); err != nil {
			return err
		}
		a := &attacker{roleIO: r}
		var err error
		if a.to, err = netip.ParseAddrPort(common.Address); err != nil {
			return err
		}
		var files unix.Rlimit
		unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
		unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files.Max, Max: files.Max})
		return attack(a, args)
	}
}

// link makes a link according to the protocol.
func (a *attacker) link() (*rawshm.Conduit, error) {
	bell, err := rawshm.NewDoorbell()
	if err != nil {
		return nil, err
	}
	defer unix.Close(bell)
	return rawshm.Open(a.to.Port(), bell)
}

// connect makes a TCP connection, and moves it. The first byte on it is the mode.
func (a *attacker) connect(l *rawshm.Conduit, slot int, mode byte) (*rawshm.Conn, error) {
	d, err := net.Dial("tcp", a.to.String())
	if err != nil {
		return nil, err
	}
	tcp := d.(*net.TCPConn)
	a.tcp = append(a.tcp, tcp)
	known := rawshm.TCP{Local: tcp.LocalAddr().(*net.TCPAddr).AddrPort(), Remote: a.to}
	if known.Cookie, err = tcpid.Cookie(tcp); err != nil {
		return nil, err
	}
	c := l.Conn(slot)
	var failed error
	late := testenv.Await(5*time.Second, func() error {
		var moved bool
		if moved, failed = a.move(l, c, slot, tcp, &known); !moved && failed == nil {
			return errors.New("the connection is not accepted")
		}
		return nil
	})
	if err := errors.Join(failed, late); err != nil {
		return nil, err
	}
	c.Put(rawshm.SessionMessage(rawshm.Data, string(mode)))
	c.Publish()
	return c, nil
}

// move tries to move a TCP connection, which may not have been accepted yet.
func (a *attacker) move(l *rawshm.Conduit, c *rawshm.Conn, slot int, tcp *net.TCPConn, known *rawshm.TCP) (moved bool, err error) {
	peer, err := tcpid.Peer(tcp)
	if known.PeerCookie = peer.Cookie; err != nil || !peer.Accepted {
		return false, err
	}
	if err := l.Connect(slot); err != nil {
		return false, err
	}
	if err := c.Establish(5 * time.Second); err != nil {
		return false, err
	}
	switch code, err := c.Move(*known, 0, 5*time.Second); {
	case err != nil:
		return false, err
	case code == rawshm.Moves:
		return true, nil
	case code != rawshm.Unknown: // Accept may not have returned
		return false, fmt.Errorf("the proposal's answer is %d", code)
	}
	c.SetState(rawshm.StateAborted)
	err = untilDone(c, 5*time.Second)
	c.Reset()
	return false, err
}

// untilDone waits until the victim no longer uses a connection.
func untilDone(c *rawshm.Conn, limit time.Duration) error {
	return testenv.Await(limit, func() error {
		if !c.Done() {
			return errors.New("a connection is not closed")
		}
		return nil
	})
}

// untilFull waits until the victim waits for room to send.
func untilFull(c *rawshm.Conn) error {
	return testenv.Await(patience/2, func() error {
		if !c.WantsRoom() {
			return errors.New("the victim has room")
		}
		return nil
	})
}

// many makes up to n connections on one link, as many as the victim accepts.
func (a *attacker) many(n int, mode byte) (l *rawshm.Conduit, conns []*rawshm.Conn, err error) {
	if l, err = a.link(); err != nil {
		return nil, nil, err
	}
	for len(conns) < n {
		if len(conns) == l.Slots() {
			if err := l.Extend(); err != nil {
				return l, conns, nil
			}
		}
		c, err := a.connect(l, len(conns), mode)
		if err != nil {
			return l, conns, nil
		}
		conns = append(conns, c)
	}
	return l, conns, nil
}

func init() {
	roles["peer"] = attackRole(peerRole)
	roles["bells"] = attackRole(bellsRole)
	roles["crowd"] = attackRole(crowdRole)
	roles["unread"] = attackRole(unreadRole)
	roles["greedy"] = attackRole(greedyRole)
	roles["silent"] = attackRole(silentRole)
	roles["idle"] = attackRole(idleRole)
	roles["linger"] = attackRole(lingerRole)
	roles["deaf"] = attackRole(deafRole)
	roles["wait"] = attackRole(waitRole)
	roles["kick"] = attackRole(kickRole)
	roles["halfopen"] = attackRole(halfOpenRole)
	roles["inbox"] = attackRole(inboxRole)
	roles["squat"] = attackRole(squatRole)
}

// peerRole follows the protocol.
func peerRole(a *attacker, _ struct{}) error {
	l, err := a.link()
	if err != nil {
		return err
	}
	for slot := range 20 {
		if slot == l.Slots() {
			if err := l.Extend(); err != nil {
				return err
			}
		}
		c, err := a.connect(l, slot, modeEcho)
		if err != nil {
			return err
		}
		for i := range 200 {
			sent := fmt.Sprintf("message %d of slot %d %0*d", i, slot, i*97%30000, 0)
			c.Put(rawshm.SessionMessage(rawshm.Data, sent))
			c.Publish()
			for got := ""; got != sent; {
				m, err := c.Get(5 * time.Second)
				if err != nil {
					return err
				}
				if m[0] != rawshm.Data || len(got)+len(m)-8 > len(sent) {
					return fmt.Errorf("%q instead of %q", m, sent)
				}
				got += string(m[8:])
			}
		}
		c.Put(rawshm.SessionMessage(rawshm.CloseM, ""))
		c.Publish()
	}
	a.stands("served")
	a.untilEnd()
	return nil
}

// bellsRole passes, as its doorbell, descriptors that block or fail those who ring, and makes the victim
// ring them.
func bellsRole(a *attacker, _ struct{}) error {
	bells, err := badBells()
	if err != nil {
		return err
	}
	var conns []*rawshm.Conn
	var links []*rawshm.Conduit
	for _, bell := range bells {
		l, err := rawshm.Open(a.to.Port(), bell)
		if err != nil {
			continue // the victim has refused it
		}
		c, err := a.connect(l, 0, modeEcho)
		if err != nil {
			return err
		}
		links, conns = append(links, l), append(conns, c)
	}
	a.stands("%d of %d doorbells are taken", len(links), len(bells))
	go func() {
		for i := 0; ; i++ {
			for k, c := range conns {
				links[k].Sleep()
				c.Put(rawshm.SessionMessage(rawshm.Data, "x"))
				c.Publish()
				c.Get(time.Millisecond)
			}
		}
	}()
	a.untilEnd()
	return nil
}

// badBells returns descriptors that are not doorbells, or were doorbells before they were spoiled.
func badBells() (fds []int, err error) {
	blocking := func(fd int) int {
		unix.SetNonblock(fd, false)
		return fd
	}
	fill := func(fd int) int {
		unix.SetNonblock(fd, true)
		for b := make([]byte, 4096); err == nil; {
			_, err = unix.Write(fd, b)
		}
		err = nil
		return blocking(fd)
	}
	var pipe, stream, packets [2]int
	if err := errors.Join(unix.Pipe(pipe[:])); err != nil {
		return nil, err
	}
	stream, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	packets, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		return nil, err
	}
	event, err := rawshm.NewDoorbell()
	if err != nil {
		return nil, err
	}
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, 0)
	if err != nil {
		return nil, err
	}
	epoll, err := unix.EpollCreate1(0)
	if err != nil {
		return nil, err
	}
	emptied := blocking(event)
	unix.SetNonblock(event, true)
	var b [8]byte
	for err == nil { // many writes spoil it, so that it is no semaphore any more
		_, err = unix.Write(event, b[:])
		if err == nil {
			break
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, err
	}
	file, err := c.(*net.TCPConn).File()
	if err != nil {
		return nil, err
	}
	return []int{fill(pipe[1]), pipe[0], fill(stream[0]), fill(packets[0]), blocking(emptied), timer, epoll, fill(int(file.Fd()))}, nil
}

// crowdRole negotiates as many sessions as possible, on as many links as possible, and proposes nothing
// on them.
func crowdRole(a *attacker, most int) error {
	total, links := 0, 0
	for ; total < most; links++ {
		l, err := a.link()
		if err != nil {
			break
		}
		had := total
		for slot := 0; total < most && l.Connect(slot) == nil && l.Conn(slot).Establish(5*time.Second) == nil; slot++ {
			total++
			if slot+1 == l.Slots() && l.Extend() != nil {
				break
			}
		}
		if total == had {
			break
		}
	}
	a.stands("%d sessions on %d links", total, links)
	a.untilEnd()
	return nil
}

// unreadRole fills rings with the smallest messages, which the victim's program does not read.
func unreadRole(a *attacker, conns int) error {
	_, all, err := a.many(conns, modeHold)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("no connection")
	}
	data, ping := rawshm.SessionMessage(rawshm.Data, "x"), rawshm.SessionMessage(rawshm.PingM, "")
	fill := func() (put int) {
		for _, c := range all {
			for k := 0; k < 4000 && c.Put(data) && c.Put(ping); k++ {
				put++
			}
			c.Publish()
		}
		return put
	}
	// The victim's idle poller takes messages while it has room for them, at its own pace: the rings are
	// full once it has taken nothing for a while.
	const looks, most, apart = 25, 1000, 20 * time.Millisecond
	for quiet, n := 0, 0; quiet < looks; quiet++ {
		if fill() > 0 {
			quiet = 0
		}
		if n++; n == most {
			return fmt.Errorf("%d rings still take messages after %v", len(all), most*apart)
		}
		time.Sleep(apart)
	}
	a.stands("%d rings are full", len(all))
	go func() {
		for {
			fill()
			time.Sleep(10 * time.Millisecond)
		}
	}()
	a.untilEnd()
	return nil
}

// greedyRole makes the victim send without end, and reads nothing of it.
func greedyRole(a *attacker, conns int) error {
	_, all, err := a.many(conns, modeSend)
	if err != nil {
		return err
	}
	a.stands("%d connections are sent to", len(all))
	a.untilEnd()
	return nil
}

// silentRole holds connections that do not negotiate. When one is ended, it makes another.
func silentRole(a *attacker, want int) error {
	l, err := a.link()
	if err != nil {
		return err
	}
	for l.Slots() < want {
		if l.Extend() != nil {
			break
		}
	}
	held := make([]bool, l.Slots())
	pass := func() (n int) {
		for i := range held {
			c := l.Conn(i)
			if held[i] && c.Peer() != rawshm.StateOpen {
				c.SetState(rawshm.StateAborted)
				held[i] = !c.Done()
			}
			if !held[i] {
				c.Reset()
				held[i] = l.Connect(i) == nil
			}
			if held[i] {
				n++
			}
		}
		return n
	}
	a.stands("%d are silent", pass())
	go func() {
		for {
			pass()
			time.Sleep(time.Millisecond)
		}
	}()
	a.untilEnd()
	return nil
}

// idleRole makes links without connections.
func idleRole(a *attacker, want int) error {
	n := 0
	for ; n < want; n++ {
		l, err := a.link()
		if err != nil {
			break
		}
		unix.Close(l.Bell)
	}
	a.stands("%d links", n)
	a.untilEnd()
	return nil
}

// lingerRole passes sockets whose last close waits until their data is sent, which never happens: in a
// handshake, and later. The attacker must close its own descriptor first, so that the victim's close is
// the last one; if the attacker's own close lingers, it was the last.
func lingerRole(a *attacker, want int) error {
	passed, err := a.passLingering(want)
	if err != nil {
		return err
	}
	a.stands("%d sockets linger", passed)
	a.untilEnd()
	return nil
}

// passLingering passes up to want sockets, and returns how many it has passed.
func (a *attacker) passLingering(want int) (int32, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	var passed atomic.Int32
	for try := 0; int(passed.Load()) < want && try < 20*want; try++ {
		fd, err := lingering(ln.Addr().(*net.TCPAddr).AddrPort())
		if err != nil {
			return 0, err
		}
		m := rawshm.Message{Kind: rawshm.Link, Number: rawshm.FirstSlots}
		open := func() (int, error) { return rawshm.Dial(a.to.Port()) }
		if try%2 == 1 {
			l, err := a.link()
			if err != nil {
				break
			}
			m = rawshm.Message{Kind: rawshm.Connect}
			open = func() (int, error) { return l.Socket, nil }
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			socket, err := open()
			if err != nil || rawshm.Send(socket, m, fd) != nil {
				return
			}
			begun := time.Now()
			unix.Close(fd)
			if time.Since(begun) < time.Millisecond {
				passed.Add(1)
			}
		}()
		select {
		case <-done:
		case <-time.After(10 * time.Millisecond): // this close lingers, so it is the last
		}
	}
	return passed.Load(), nil
}

// lingering returns a connected socket with data that nobody reads, and with SO_LINGER.
func lingering(to netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return -1, err
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}); err != nil {
		return -1, err
	}
	unix.SetNonblock(fd, true)
	b := make([]byte, 64<<10)
	for {
		if _, err := unix.Write(fd, b); err != nil {
			break
		}
	}
	return fd, unix.SetNonblock(fd, false)
}

// deafRole requests connections again and again, without using them, and reads no refusal.
func deafRole(a *attacker, links int) error {
	n := 0
	for ; n < links; n++ {
		l, err := a.link()
		if err != nil {
			break
		}
		// None of the connects is used, and no refusal is read.
		c := l.Conn(0)
		for range 100 {
			if err := l.Ask(0); err != nil {
				break
			}
			c.SetState(rawshm.StateAborted)
			if untilDone(c, 2*time.Millisecond) != nil {
				break // the victim waits for room
			}
			c.Reset()
		}
	}
	a.stands("%d links have connected in vain, and read nothing", n)
	a.untilEnd()
	return nil
}

// waitRole makes the victim wait in Reads and Writes, by sending bytes and freeing room bit by bit.
func waitRole(a *attacker, conns int) error {
	_, all, err := a.many(conns, modeWait)
	if err != nil {
		return err
	}
	a.stands("%d connections keep the victim waiting", len(all))
	go func() {
		for i := 0; ; i++ {
			for _, c := range all {
				switch i % 3 {
				case 0:
					c.Put(rawshm.SessionMessage(rawshm.Data, "x"))
				case 1:
					c.Put(rawshm.SessionMessage(rawshm.Data, ""))
				}
				if i%100 == 0 { // less room than the victim waits for, and room for the answers
					c.Put(rawshm.SessionMessage(rawshm.PingM, ""))
					for m, err := c.Get(0); err == nil && m[0] != rawshm.Data; {
						m, err = c.Get(0)
					}
				}
				c.Publish()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	a.untilEnd()
	return nil
}

// kickRole reports news of many connections to the victim, all the time, when there are none.
func kickRole(a *attacker, conns int) error {
	l, all, err := a.many(conns, modeHold)
	if err != nil {
		return err
	}
	a.stands("%d connections are kicked", len(all))
	go func() {
		for {
			for i := range all {
				l.Kick(i)
			}
			time.Sleep(time.Millisecond)
		}
	}()
	a.untilEnd()
	return nil
}

// halfOpenRole connects to the victim's unix sockets again and again, and sends nothing.
func halfOpenRole(a *attacker, most int) error {
	var sockets []int
	pass := func() {
		for range most / 10 {
			if s, err := rawshm.Dial(a.to.Port()); err == nil {
				sockets = append(sockets, s)
			}
			for len(sockets) > most {
				unix.Close(sockets[0])
				sockets = sockets[1:]
			}
		}
	}
	for range 10 {
		pass()
	}
	a.stands("%d sockets are silent", len(sockets))
	go func() {
		for {
			pass()
			time.Sleep(10 * time.Millisecond)
		}
	}()
	a.untilEnd()
	return nil
}

// inboxRole requests memory to write to, on each connection, and reports the answers.
func inboxRole(a *attacker, conns int) error {
	_, all, err := a.many(conns, modeHold)
	if err != nil {
		return err
	}
	told := 0
	for _, c := range all {
		c.Put(rawshm.SessionMessage(rawshm.AskInbox, ""))
		c.Publish()
		m, err := c.Get(2 * time.Second)
		for _, b := range m[min(len(m), 8):] {
			if err == nil && b != 0 {
				told++
				break
			}
		}
	}
	a.stands("%d asked", len(all))
	a.say("told", told)
	a.untilEnd()
	return nil
}

// squatRole takes names of the victim's port, and answers nobody who connects to them.
func squatRole(a *attacker, most int) error {
	n := 0
	for ; n < most; n++ {
		if _, err := net.Listen("unixpacket", fmt.Sprintf("%s%016x", rawshm.Prefix(a.to.Port()), rand.Uint64())); err != nil {
			return err
		}
	}
	a.stands("%d names", n)
	a.untilEnd()
	return nil
}
