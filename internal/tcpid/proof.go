package tcpid

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proof is what one end of a connection shows of its stamp, and counts of wrong ones that others
// have shown to it. The zero value is ready for use.
type Proof struct {
	stamps atomic.Pointer[func() ([]Stamp, error)] // once, as the kernel tells them but once
	wrong  atomic.Int32
	mu     sync.Mutex // held while a half is compared: several at once pass no limit
}

// MostGuesses is how many wrong halves of its stamp a connection takes. One guess in some thousand is
// right.
const MostGuesses = 3

// Guessed reports whether there were too many wrong ones: the end proves nothing any more.
func (p *Proof) Guessed() bool { return p.wrong.Load() >= MostGuesses }

func (p *Proof) once(read func() ([]Stamp, error)) ([]Stamp, error) {
	if p.stamps.Load() == nil {
		f := sync.OnceValues(read)
		p.stamps.CompareAndSwap(nil, &f)
	}
	return (*p.stamps.Load())()
}

// Dialed is DialerStamps. The first call has to be before anything is sent.
func (p *Proof) Dialed(c *net.TCPConn, began time.Time) ([]Stamp, error) {
	return p.once(func() ([]Stamp, error) { return DialerStamps(c, began) })
}

// Confirm reports whether an answer to the dialer's challenge is the acceptor's.
func (p *Proof) Confirm(s Stamp, answer uint16) bool {
	ok := s.Confirm(answer)
	if !ok {
		p.wrong.Add(1)
	}
	return ok
}

// Answer returns the acceptor's half, unless the challenge is not its dialer's.
func (p *Proof) Answer(c *net.TCPConn, challenge uint16) (half uint16, ok bool) {
	s, err := p.once(func() ([]Stamp, error) {
		s, err := acceptorStamp(c)
		return []Stamp{s}, err
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || p.Guessed() {
		return 0, false
	}
	if half, ok = s[0].answer(challenge); !ok {
		p.wrong.Add(1)
	}
	return half, ok
}
