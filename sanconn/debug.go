package sanconn

import (
	"fmt"
	"strings"
	"time"
	"weak"

	"github.com/sanconn/san/session"
)

// Debug describes the connection for people who find it stuck: its carriers and how far each has come,
// what its operations wait for and since when, and what is in progress on the session. The text has
// several lines, and its form may change; docs/DEBUGGING.md explains it. It may be called at any time,
// from any goroutine. It waits a few milliseconds at most; a lock that an operation holds for longer is
// named instead.
func (c *Conn) Debug() string {
	text, s := c.describe()
	if s != nil {
		text += s.Debug()
	}
	return text
}

// describe describes the connection without its session, which it returns.
func (c *Conn) describe() (string, *session.Session) {
	var b strings.Builder
	fmt.Fprintf(&b, "%v %v by %s\n", c.LocalAddr(), c.RemoteAddr(), c.Provider())
	fmt.Fprintf(&b, "  tcp     %d bytes read, %d written\n", c.in.bytes.Load(), c.out.written.Load())
	if c.closed.Load() {
		fmt.Fprintf(&b, "  closed  by the program\n")
	}
	if !session.LockSoon(&c.mu) {
		fmt.Fprintf(&b, "  state   busy: its lock is held\n")
		return b.String(), nil
	}
	defer c.mu.Unlock()
	fmt.Fprintf(&b, "  state   %v; read %s; written %s\n", c.state.phase, c.state.in.describe(), c.state.out.describe())
	for _, d := range []struct {
		name string
		*deadline
	}{{"read", &c.in.deadline}, {"write", &c.out.deadline}} {
		if !d.want.IsZero() {
			fmt.Fprintf(&b, "  %s deadline in %v\n", d.name, time.Until(d.want).Round(time.Millisecond))
		}
	}
	if c.state.phase == leaving {
		fmt.Fprintf(&b, "  leaving the SAN; asked for by this end: %v, the peer leaves, too: %v\n", c.state.asked, c.state.both)
	}
	if c.refused != nil {
		fmt.Fprintf(&b, "  the last move: %v\n", c.refused)
	}
	return b.String(), c.session
}

// describe tells whether the direction has moved, and whether it has ended.
func (d *direction) describe() (text string) {
	text = "by TCP"
	if d.begun {
		text = fmt.Sprintf("by the SAN from byte %d on", d.at)
	}
	if d.shut {
		text += ", shut"
	}
	return text
}

// name names the connection to its session, for session.Dump. It does not keep the connection alive.
func (c *Conn) name(s *session.Session) {
	weakly := weak.Make(c)
	s.Name(c.LocalAddr(), c.RemoteAddr(), func() string {
		if c := weakly.Value(); c != nil {
			text, _ := c.describe()
			return text
		}
		return "a connection that the program has forgotten\n"
	})
}
