package shm

import (
	"context"
	"sync"
)

// dialed are the links of which this process is the dialing end.
var dialed linkCache

// linkCache holds one link per listener and configuration of endpoints.
type linkCache struct {
	mu    sync.Mutex // guards links
	links map[linkKey]*linkEntry
}

type linkKey struct {
	owner
	ringMax int
}

// linkEntry is a link, or the making of it.
type linkEntry struct {
	ready chan struct{} // closed when what follows is set
	link  *link
	err   error
	diag  *sharedDiag // kept until the entry is forgotten
}

// ended reports whether a new link is needed: this one failed, or takes no more
// connections.
func (e *linkEntry) ended() bool {
	select {
	case <-e.ready:
		return e.link == nil || e.link.ended() || e.link.listenerClosed.Load()
	default:
		return false
	}
}

// get returns the link to a listener, and makes it if need be. Making it is bounded by the
// cfg.Timeout of the first dial that asks, and does not depend on any dial's ctx. The link
// keeps what the dial has found the listener by.
func (c *linkCache) get(ctx context.Context, o owner, cfg Config, diag *sharedDiag) (*link, error) {
	key := linkKey{owner: o, ringMax: cfg.RingMax}
	c.mu.Lock()
	entry := c.links[key]
	if entry == nil || entry.ended() {
		entry = &linkEntry{ready: make(chan struct{}), diag: diags.keep(diag)}
		if c.links == nil {
			c.links = make(map[linkKey]*linkEntry)
		}
		c.links[key] = entry
		go c.make(key, entry, cfg)
	}
	c.mu.Unlock()
	select {
	case <-entry.ready:
		return entry.link, entry.err
	case <-ctx.Done():
		return nil, unavailable(ctx.Err())
	}
}

// make makes a link. Its entry is removed when that fails or when the link ends.
func (c *linkCache) make(key linkKey, entry *linkEntry, cfg Config) {
	entry.link, entry.err = connectLink(key.owner, cfg)
	if entry.err == nil {
		entry.link.whenClosed(func() { c.forget(key, entry) })
	} else {
		c.forget(key, entry)
	}
	close(entry.ready)
	if entry.err == nil {
		entry.link.release()
	}
}

// forget is called once for each entry.
func (c *linkCache) forget(key linkKey, entry *linkEntry) {
	defer diags.drop(entry.diag)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.links[key] == entry {
		delete(c.links, key)
	}
}

func connectLink(o owner, cfg Config) (*link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout)
	defer cancel()
	c, err := reach(o.inode)
	if err != nil {
		return nil, unavailable(err)
	}
	l, err := dialLink(ctx, c, o.uid, cfg)
	if err != nil {
		return nil, linkError(err)
	}
	return l, nil
}
