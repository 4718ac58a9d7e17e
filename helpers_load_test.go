package san

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// loadDialers is how many goroutines dial at a time.
const loadDialers = 4

// load dials without a break. Every connection has to be made, and answered by one byte:
// the name of the listener that has accepted it.
type load struct {
	done    atomic.Bool
	dialing sync.WaitGroup

	mu       sync.Mutex // guards what follows
	answered map[answeredBy]int
	failed   error // the first
}

type answeredBy struct {
	provider string
	name     byte
}

func startLoad(t *testing.T, d *Dialer, address string) *load {
	l := &load{answered: make(map[answeredBy]int)}
	for range loadDialers {
		l.dialing.Go(func() {
			for !l.done.Load() {
				by, err := exchange(d, address)
				l.mu.Lock()
				if err == nil {
					l.answered[by]++
				} else if l.failed == nil {
					l.failed = err
				}
				l.mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	t.Cleanup(func() {
		l.end()
		if l.failed != nil {
			t.Error(l.failed)
		}
	})
	return l
}

// exchange makes one connection, and returns who answers.
func exchange(d *Dialer, address string) (by answeredBy, err error) {
	c, err := d.Dial("tcp", address)
	if err != nil {
		return by, err
	}
	defer c.Close()
	by.provider = InfoOf(c).Provider
	c.SetDeadline(time.Now().Add(testTimeout))
	b := make([]byte, 1)
	if _, err = c.Write(b); err == nil {
		_, err = c.Read(b)
	}
	if err != nil {
		err = fmt.Errorf("a connection by %s that was not answered: %w", by.provider, err)
	}
	by.name = b[0]
	return by, err
}

// count is how many connections one listener has answered by a provider.
func (l *load) count(provider string, name byte) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answered[answeredBy{provider, name}]
}

// wantMore waits until a listener has answered some more connections by a provider.
func (l *load) wantMore(t *testing.T, provider string, name byte) {
	t.Helper()
	const some = 10
	before := l.count(provider, name)
	waitFor(t, fmt.Sprintf("answers of %d by %s", name, provider), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.failed != nil || l.answered[answeredBy{provider, name}] >= before+some
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		t.Fatal(l.failed)
	}
}

// end ends the load.
func (l *load) end() {
	l.done.Store(true)
	l.dialing.Wait()
}

// answer serves connections until Accept fails, each by one byte, and waits for them.
func answer(l net.Listener, name byte) {
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		serving.Go(func() {
			defer c.Close()
			c.SetDeadline(time.Now().Add(testTimeout))
			b := make([]byte, 1)
			if _, err := c.Read(b); err == nil {
				c.Write([]byte{name})
			}
		})
	}
}
