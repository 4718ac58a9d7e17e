package regcache

import (
	"sync/atomic"
	"time"
)

// unusedFor is the least time that memory stays cached after its last user has left; the most is twice
// that. A client that makes a connection for each request mostly uses the same buffers again
// (docs/notes/registration-cache.md).
const unusedFor = time.Second

// A User is one of the users of a shared Cache, such as a connection. Cached memory goes with the last
// user that has used it.
type User struct {
	cache *Cache
	left  atomic.Pointer[time.Time] // when it has left; nil: it has not
}

// NewUser returns a user that has used nothing yet.
func (c *Cache) NewUser() *User { return &User{cache: c} }

// Acquire is Cache.Acquire. It also notes that this user has used the region, or for a peer's region
// the cached one below it.
func (u *User) Acquire(b []byte, access Access) (*Region, error) {
	return u.cache.acquire(b, access, u)
}

func (r *Region) note(u *User) {
	r.users.LoadOrStore(u, nil) // takes no lock if u is in the map
	r.lastUser.Store(u)
}

// Leave makes the cache deregister, one to two seconds later, what no other user has used; what is in
// use then is deregistered when it is released. No Acquire may be in progress, or follow.
func (u *User) Leave() {
	now := time.Now()
	u.left.Store(&now)
	u.cache.sweepLater()
}

// sweepLater schedules a sweep, unless one is scheduled: a sweep looks at every region, so one serves
// all users that leave until then.
func (c *Cache) sweepLater() {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	if c.sweeper == nil && !c.closed.Load() {
		c.sweeper = time.AfterFunc(unusedFor, c.sweep)
	}
}

// sweep deregisters what has had no user for unusedFor. Later leaves are for the next sweep.
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
