package sanconn_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// link is a link of provider shm with both ends in this process.
type link struct {
	t    *testing.T
	l    *shm.Listener
	port uint16
	name string
	came chan session.Endpoint
	once sync.Once
	used chan struct{} // closed when a connection first moves over it

	dials uint64 // the number of the last connection
}

// newLink makes a link, on a port for which no other process has a name.
func newLink(t *testing.T) (k *link, err error) {
	k = &link{t: t, came: make(chan session.Endpoint, 1), used: make(chan struct{})}
	for k.name == "" {
		k.port = uint16(rand.Uint32())
		if k.l, err = shm.Listen(k.port, shm.Config{}, func(e session.Endpoint) { k.came <- e }); err != nil {
			return nil, err
		}
		names, err := shm.Names(t.Context(), k.port, uint32(os.Geteuid()), shm.Config{})
		switch {
		case err != nil:
			k.l.Close()
			return nil, err
		case len(names) == 1:
			k.name = names[0]
		default:
			k.l.Close()
		}
	}
	a, b, err := k.pair() // so that the link exists when a session is wanted
	if err != nil {
		k.close()
		return nil, err
	}
	discard(a)
	discard(b)
	return k, nil
}

func discard(ep session.Endpoint) {
	ep.Abort()
	ep.Retire()
}

// pair makes a connection over the link. If that fails meanwhile, a connection may have been accepted for
// which no dial waits any more. So each has its number as its first message.
func (k *link) pair() (dialed, accepted session.Endpoint, err error) {
	if dialed, err = shm.Dial(k.t.Context(), k.port, k.name, uint32(os.Geteuid()), shm.Config{}); err != nil {
		return nil, nil, err
	}
	k.dials++
	if room := dialed.ReserveControl(8); room != nil { // otherwise it has ended
		binary.LittleEndian.PutUint64(room, k.dials)
		dialed.CommitControl(8)
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		select {
		case accepted = <-k.came:
			if k.isLast(accepted) {
				return dialed, accepted, nil
			}
			discard(accepted)
		case <-time.After(time.Millisecond):
		}
		if err = dialed.Err(); err != nil { // it does not come any more either
			break
		}
	}
	discard(dialed)
	return nil, nil, fmt.Errorf("it was not accepted: %w", err)
}

// isLast reports whether a connection that was accepted is the last that was dialed. It takes its number.
func (k *link) isLast(e session.Endpoint) bool {
	var ev session.Event
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Microsecond) {
		over := e.Err() != nil
		if e.Poll(&ev) {
			n := binary.LittleEndian.Uint64(ev.Msg)
			e.Drop()
			return n == k.dials
		}
		if over {
			break
		}
	}
	return false
}

func (k *link) close() {
	k.l.Close()
	for len(k.came) > 0 {
		discard(<-k.came)
	}
}

// fail sends an invalid packet to the dialing end (role 0) or the accepting end (1).
func (k *link) fail(role int) error {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	from := []func(int) (unix.Sockaddr, error){unix.Getsockname, unix.Getpeername}[role] // of the other end's socket
	for _, f := range fds {
		fd, _ := strconv.Atoi(f.Name())
		fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) // between two calls the number may become another file's
		if err != nil {
			continue
		}
		name, err := from(fd)
		u, ok := name.(*unix.SockaddrUnix)
		sent := err == nil && ok && u.Name == k.name && unix.Sendto(fd, []byte("no message"), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil) == nil
		unix.Close(fd)
		if sent {
			return nil
		}
	}
	return errors.New("it has ended")
}
