package tcpid

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proof is one end's knowledge of its connection's stamp, and its count of wrong halves that others
// have shown to it. The zero value is ready for use.
type Proof struct {
	stamps atomic.Pointer[func() ([]Stamp, error)] // read once, as the kernel gives them only once
	wrong  atomic.Int32
	mu     sync.Mutex // held while a half is compared, so that simultaneous guesses do not pass MostGuesses
}

// MostGuesses is how many wrong halves of its stamp a connection accepts. One guess in some thousand is
// right.
const MostGuesses = 3

// Guessed reports whether MostGuesses is reached: then this end proves nothing any more.
func (p *Proof) Guessed() bool { return p.wrong.Load() >= MostGuesses }

func (p *Proof) once(read func() ([]Stamp, error)) ([]Stamp, error) {
	if p.stamps.Load() == nil {
		f := sync.OnceValues(read)
		p.stamps.CompareAndSwap(nil, &f)
	}
	return (*p.stamps.Load())()
}

// Dialed returns DialerStamps. Its first call must come before anything is sent.
func (p *Proof) Dialed(c *net.TCPConn, began time.Time) ([]Stamp, error) {
	return p.once(func() ([]Stamp, error) { return DialerStamps(c, began) })
}

// Confirm reports whether an answer to the dialer's challenge is the acceptor's half.
func (p *Proof) Confirm(s Stamp, answer uint16) bool {
	ok := s.Confirm(answer)
	if !ok {
		p.wrong.Add(1)
	}
	return ok
}

// Answer returns the acceptor's half, if the challenge is the dialer's half.
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
