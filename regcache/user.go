package regcache

import (
	"sync/atomic"
	"time"
)

// unusedFor is how long what the last user has left stays cached, at least; it is twice that at most.
// A client that connects for each request mostly uses the same buffers for the next
// (docs/notes/registration-cache.md).
const unusedFor = time.Second

// A User is one of those that share a Cache, such as a connection. What is cached goes with the
// last one that has used it.
type User struct {
	cache *Cache
	left  atomic.Pointer[time.Time] // when it has left; nil: it has not
}

// NewUser returns one that has used nothing yet.
func (c *Cache) NewUser() *User { return &User{cache: c} }

// Acquire is that of the cache. What stays cached, which for a peer's region is that below it, is
// noted to be this user's, too.
func (u *User) Acquire(b []byte, access Access) (*Region, error) {
	return u.cache.acquire(b, access, u)
}

func (r *Region) note(u *User) {
	r.users.LoadOrStore(u, nil) // without a lock if it is there
	r.lastUser.Store(u)
}

// Leave has the cache give up what no other user has used, one to two seconds later; what is in use
// then is deregistered when it is released. No Acquire is under way, and none follows.
func (u *User) Leave() {
	now := time.Now()
	u.left.Store(&now)
	u.cache.sweepLater()
}

// sweepLater has a sweep follow, unless one is to come: it looks at every region, so there is one for
// all users that leave until then.
func (c *Cache) sweepLater() {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	if c.sweeper == nil && !c.closed.Load() {
		c.sweeper = time.AfterFunc(unusedFor, c.sweep)
	}
}

// sweep gives up what has had no user for unusedFor. Users that left later are the next one's.
func (c *Cache) sweep() {
	c.budget.mu.Lock()
	c.sweeper = nil
	c.budget.mu.Unlock()
	now, again := time.Now(), false
	for _, r := range c.all.list() {
		unused := true
		for user := range r.users.Range {
			left := user.(*User).left.Load()
			if left != nil && now.Sub(*left) >= unusedFor {
				r.users.Delete(user)
				continue
			}
			unused = false
			again = again || left != nil
		}
		if unused {
			r.invalidate(UsersLeft)
		}
	}
	if again {
		c.sweepLater()
	}
}
