package shm

import (
	"context"
	"fmt"
	"sync"

	"github.com/sanconn/san/session"
)

// dialed has the links of which this process is the dialing end.
var dialed = linkCache{links: make(map[linkKey]*linkEntry)}

// linkCache holds one link for each name that was dialed.
type linkCache struct {
	mu    sync.Mutex // guards links
	links map[linkKey]*linkEntry
}

type linkKey struct {
	port uint16
	name string
	dir  string // the directory of the name; "": the name is in the network namespace

	// Only for a name in the network namespace:
	namespace uint64
	user      uint32 // the process's user
}

// linkEntry is a link that is there or is being made.
type linkEntry struct {
	ready chan struct{} // closed when the fields below are set
	link  *link
	err   error
}

// over reports whether a new link is needed, because this one failed or takes no more connections.
func (e *linkEntry) over() bool {
	select {
	case <-e.ready:
		return e.link == nil || e.link.over() || e.link.listenerClosed.Load()
	default:
		return false
	}
}

// get returns the link to the process that has a name, and makes one if necessary. Making it is bounded
// by cfg.timeout of the first dial that needs it, and does not depend on any dial's ctx.
func (c *linkCache) get(ctx context.Context, key linkKey, cfg Config) (*link, error) {
	c.mu.Lock()
	entry, beside := c.links[key], 0
	first := entry == nil || entry.over()
	if first {
		beside = len(c.besideLocked(key))
		entry = &linkEntry{ready: make(chan struct{})}
		c.links[key] = entry
	}
	c.mu.Unlock()
	if first && beside >= MostNames {
		c.made(key, entry, nil, &session.Unavailable{Reason: session.ReasonResources,
			Err: fmt.Errorf("shm: links with %d processes of port %d", beside, key.port)})
	} else if first {
		c.begin(key, entry, cfg)
	}
	select {
	case <-entry.ready:
		return entry.link, entry.err
	case <-ctx.Done():
		return nil, unavailable(ctx.Err())
	}
}

// besideLocked returns the names of key's port and user by which there are links, other than key's own.
func (c *linkCache) besideLocked(key linkKey) (names []string) {
	for k := range c.links {
		name := k.name
		if k.name = key.name; name != key.name && k == key {
			names = append(names, name)
		}
	}
	return names
}

// begin connects in the calling thread, hence in its network namespace, and makes the link in the
// background.
func (c *linkCache) begin(key linkKey, entry *linkEntry, cfg Config) {
	conn, err := key.connect()
	if err != nil {
		c.made(key, entry, nil, unavailable(err))
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), cfg.timeout)
		defer cancel()
		l, err := dialLink(ctx, conn, key.user, cfg)
		if err != nil {
			err = linkError(err)
		}
		c.made(key, entry, l, err)
	}()
}

// made ends the making of a link. Its entry is removed at once if that failed, or when the link ends.
func (c *linkCache) made(key linkKey, entry *linkEntry, l *link, err error) {
	forget := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.links[key] == entry {
			delete(c.links, key)
		}
	}
	entry.link, entry.err = l, err
	if err == nil {
		l.start(forget)
	} else {
		forget()
	}
	close(entry.ready)
}
