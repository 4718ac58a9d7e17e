package verbs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
)

// cmHub is the process's event channel of rdma_cm and the goroutine that reads it. It exists as long as
// there are ids.
type cmHub struct {
	mu      sync.Mutex
	users   int               // guarded by mu
	channel *ibv.EventChannel // guarded by mu
	done    chan struct{}     // guarded by mu
}

var hub cmHub

// use returns the channel for one more id, which needs a release. A channel that ends is not used
// again.
func (h *cmHub) use() (*ibv.EventChannel, error) {
	if err := nodesRefused(); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users == 0 {
		channel, err := ibv.NewEventChannel()
		if err != nil {
			return nil, err
		}
		h.channel, h.done = channel, make(chan struct{})
		go readEvents(channel, h.done)
	}
	h.users++
	return h.channel, nil
}

func (h *cmHub) release() {
	h.mu.Lock()
	h.users--
	channel, done := h.channel, h.done
	last := h.users == 0
	if last {
		h.channel = nil // then adopt refuses a request that readEvents has just received
	}
	h.mu.Unlock()
	if last {
		channel.SetDeadline(time.Now())
		<-done
		channel.Close()
	}
}

// cmOwner handles an id's events. It must not block.
type cmOwner interface{ event(ibv.Event) }

func readEvents(channel *ibv.EventChannel, done chan<- struct{}) {
	defer close(done)
	for {
		ev, err := channel.Event()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return
		case err != nil:
			time.Sleep(time.Millisecond) // for lack of memory, for instance
			continue
		}
		if o, ok := ev.ID.Owner.(cmOwner); ok {
			o.event(ev)
		}
	}
}

// cmID is an id of rdma_cm. While its connection is being made, its events go to a channel; afterwards
// to the endpoint.
type cmID struct {
	id       *ibv.ID
	events   chan ibv.Event
	endpoint atomic.Pointer[Endpoint]

	mu     sync.Mutex // guards calls on id, and closed
	closed bool
}

// connectEvents is more than rdma_cm reports of one attempt to connect.
const connectEvents = 16

func newID() (*cmID, error) {
	channel, err := hub.use()
	if err != nil {
		return nil, err
	}
	c := &cmID{events: make(chan ibv.Event, connectEvents)}
	if c.id, err = channel.NewID(); err != nil {
		hub.release()
		return nil, err
	}
	c.id.Owner = c
	return c, nil
}

// adopt takes over the id of a connect request that came through channel. readEvents calls it. It
// returns nil if the channel's last user, the listener, has just gone.
func (h *cmHub) adopt(id *ibv.ID, channel *ibv.EventChannel) *cmID {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.channel != channel {
		return nil
	}
	h.users++
	c := &cmID{id: id, events: make(chan ibv.Event, connectEvents)}
	id.Owner = c
	return c
}

func (c *cmID) event(ev ibv.Event) {
	if e := c.endpoint.Load(); e != nil {
		err := fmt.Errorf("verbs: %v: %w", ev.Type, syscall.ECONNRESET)
		switch {
		case ev.Type == ibv.Disconnected && !e.dev.iwarp():
			// The queue pair stays up until this end disconnects as well (rxe).
			e.q.hangUp(err, c.disconnect)
		case ev.Type == ibv.Disconnected || ev.Type == ibv.DeviceRemoval:
			e.q.fail(err)
		}
	}
	select {
	case c.events <- ev:
	default: // once connected, nobody receives events (for example UNREACHABLE)
	}
}

// wait returns the next event of an id that is being connected.
func (c *cmID) wait(ctx context.Context) (ibv.Event, error) {
	select {
	case ev := <-c.events:
		return ev, nil
	case <-ctx.Done():
		return ibv.Event{}, ctx.Err()
	}
}

// reject rejects a connect request.
func (c *cmID) reject(why refusal) {
	c.id.Reject(privateData{Version: protocolVersion, Refusal: why}.bytes())
}

// refuse rejects a connect request and destroys its id.
func (c *cmID) refuse(why refusal) {
	c.reject(why)
	c.close()
}

// call calls f on the id, unless it has been destroyed.
func (c *cmID) call(f func(*ibv.ID) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		f(c.id)
	}
}

// disconnect ends the connection; it may block on iWARP.
func (c *cmID) disconnect() { c.call((*ibv.ID).Disconnect) }

// communicated is called when the queue pair has received something before rdma_cm has reported the
// connection: the dialer's confirmation was lost, and would be repeated only after seconds.
func (c *cmID) communicated() { c.call((*ibv.ID).Notify) }

// close destroys the id. Its queue pair must have been destroyed.
func (c *cmID) close() {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	if first {
		c.id.Close()
	}
	c.mu.Unlock()
	if first {
		hub.release() // waits for readEvents, which may wait for mu
	}
}

// threads run calls of librdmacm that may block for most of a minute, on iWARP: connect, disconnect and
// destroy wait for TCP. Each call occupies a thread, so their number is limited. Calls that must not be
// skipped wait for their turn. The channel holds a token for each running call.
type threads chan struct{}

// maxBlocked bounds the threads that are blocked in librdmacm.
const maxBlocked = 16

var blocking = make(threads, maxBlocked)

// try starts f if there is a free token, and reports whether it did.
func (p threads) try(f func()) bool {
	select {
	case p <- struct{}{}:
		go func() {
			f()
			<-p
		}()
		return true
	default:
		return false
	}
}

// run runs f, now or later, and waits until it has ended, at most for limit.
func (p threads) run(limit time.Duration, f func()) {
	done := make(chan struct{})
	go func() {
		p <- struct{}{}
		f()
		<-p
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
