package regcache

import (
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// inASecond runs a test with its own cache in virtual time, which passes when all goroutines wait.
func inASecond(t *testing.T, test func(t *testing.T, c *Cache, d *fakeDevice)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDevice{}
		test(t, newCache(t, d, Config{Budget: NewBudget(64<<20, 4096)}), d)
	})
}

// pass lets that much time pass, and waits until what is due has been done.
func pass(t time.Duration) {
	time.Sleep(t)
	synctest.Wait()
}

func (u *User) use(t *testing.T, b []byte, access Access) {
	t.Helper()
	usedBefore(u.cache, b)
	r, err := u.Acquire(b, access)
	if err != nil {
		t.Fatal(err)
	}
	release(t, r)
}

// expectRegistered fails unless the device holds n registrations.
func expectRegistered(t *testing.T, d *fakeDevice, when string, n int) {
	t.Helper()
	if here, _ := d.registered(); here != n {
		t.Errorf("%s: %d registrations, want %d", when, here, n)
	}
}

// A cached region goes when the last user that has used it has left, and only then.
func TestCachedGoesWithItsLastUser(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		first, second, other := c.NewUser(), c.NewUser(), c.NewUser()
		both, own, exposed := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
		for range 2 {
			first.use(t, both, LocalRead)
			second.use(t, both, LocalRead)
			first.use(t, own, LocalRead)
		}
		first.use(t, exposed, RemoteRead) // leaves a region that pins its pages
		expectRegistered(t, d, "used", 3)
		other.use(t, both, LocalRead)
		other.Leave()
		pass(2 * unusedFor)
		expectRegistered(t, d, "another has left", 3)
		first.Leave()
		pass(2 * unusedFor)
		expectRegistered(t, d, "the first has left", 1)
		usedBefore(c, own)
		r, err := second.Acquire(own, LocalRead)
		if err != nil {
			t.Fatal(err)
		}
		expectRegistered(t, d, "used again", 2)
		second.Leave()
		pass(2 * unusedFor)
		if err := d.covers(r.LKey(), own, LocalRead); err != nil {
			t.Errorf("in use: %v", err)
		}
		release(t, r)
		expectEmpty(t, d)
		if n := c.Stats().Invalidated[UsersLeft]; n != 4 {
			t.Errorf("%d regions counted, want 4", n)
		}
		runtime.KeepAlive([][]byte{both, own, exposed})
	})
}

// A region stays for a second after its user has left, even if another user has left before, and is gone
// after two. A new user that uses it meanwhile keeps it.
func TestCachedStaysForASecond(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		early, late := c.NewUser(), c.NewUser()
		mem, kept := make([]byte, 64<<10), make([]byte, 64<<10)
		early.Leave()
		pass(unusedFor * 9 / 10)
		late.use(t, mem, LocalRead)
		late.use(t, kept, LocalRead)
		late.Leave()
		pass(unusedFor * 9 / 10)
		expectRegistered(t, d, "for less than a second", 2)
		next := c.NewUser()
		next.use(t, kept, LocalRead)
		pass(unusedFor * 11 / 10)
		expectRegistered(t, d, "after two", 1)
		runtime.KeepAlive([][]byte{mem, kept})
	})
}

// A region that was cached for an Acquire that failed, or that worked without it, has a user too.
func TestCachedForAFailedAcquireGoes(t *testing.T) {
	for name, refused := range map[string]map[int]error{
		"fails":           {2: syscall.EINVAL},
		"does without it": {2: syscall.ENOMEM, 3: syscall.ENOMEM},
	} {
		t.Run(name, func(t *testing.T) {
			inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
				calls := 0
				d.onRegister = func(int) error {
					calls++
					return refused[calls]
				}
				u, mem := c.NewUser(), make([]byte, 64<<10)
				usedBefore(c, mem)
				if r, err := u.Acquire(mem, RemoteRead); err == nil {
					release(t, r)
				}
				expectRegistered(t, d, "tried", 1)
				u.Leave()
				pass(2 * unusedFor)
				expectEmpty(t, d)
				runtime.KeepAlive(mem)
			})
		})
	}
}

// A region that replaces another one has its users too.
func TestAMergedRegionKeepsTheUsers(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		reader, writer := c.NewUser(), c.NewUser()
		mem := make([]byte, 64<<10)
		reader.use(t, mem, LocalRead)
		writer.use(t, mem, LocalWrite)
		writer.Leave()
		pass(2 * unusedFor)
		expectRegistered(t, d, "the reader is there", 1)
		reader.use(t, mem, LocalRead)
		expectRegistrations(t, d, 2)
		reader.Leave()
		pass(2 * unusedFor)
		expectEmpty(t, d)
		runtime.KeepAlive(mem)
	})
}

// A region has its user from the time when it is cached, so that the end of another user does not remove
// it before.
func TestARegionHasItsUserAtOnce(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		reader, writer := c.NewUser(), c.NewUser()
		mem := make([]byte, 64<<10)
		reader.use(t, mem, LocalRead)
		d.onDeregister = func(registration) { // the reader's region, which the writer's has replaced
			d.onDeregister = nil
			reader.Leave()
			pass(2 * unusedFor)
		}
		writer.use(t, mem, LocalWrite)
		if n := c.Stats().Entries; n != 1 {
			t.Errorf("%d regions are cached, want 1", n)
		}
		runtime.KeepAlive(mem)
	})
}

// When many users leave together, all regions are looked at only once, and once more.
func TestUsersThatLeaveTogether(t *testing.T) {
	const regions, users = 2000, 500
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		stays := c.NewUser()
		mem := make([][]byte, regions)
		for i := range mem {
			mem[i] = make([]byte, 8<<10)
			stays.use(t, mem[i], LocalRead)
		}
		all := make([]*User, users)
		for i := range all {
			all[i] = c.NewUser()
			for j := range regions / users {
				all[i].use(t, mem[i*regions/users+j], LocalRead)
			}
		}
		expectRegistered(t, d, "used", regions)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for _, u := range all {
			u.Leave()
		}
		pass(2 * unusedFor)
		runtime.ReadMemStats(&after)
		expectRegistered(t, d, "one is left", regions)
		// One look at all regions allocates 16 KiB.
		if n := after.TotalAlloc - before.TotalAlloc; n > users*16<<10/4 {
			t.Errorf("%d users left %d regions with %d bytes allocated", users, regions, n)
		}
		stays.Leave()
		pass(2 * unusedFor)
		expectEmpty(t, d)
		runtime.KeepAlive(mem)
	})
}

// A closed cache has no timer that would keep it alive, or look at its device's registrations.
func TestClosedCacheHasNoTimer(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		mem := make([]byte, 64<<10)
		u := c.NewUser()
		u.use(t, mem, LocalRead)
		u.Leave()
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		expectEmpty(t, d)
		if c.sweeper.Stop() {
			t.Error("a user that had left has a timer")
		}
		c = newCache(t, d, Config{})
		u = c.NewUser()
		u.use(t, mem, LocalRead)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if u.Leave(); c.sweeper != nil {
			t.Error("a user that leaves has a timer")
		}
		runtime.KeepAlive(mem)
	})
}

// Close waits until a sweep has deregistered its regions, because the protection domain is closed next.
func TestCloseWaitsForASweep(t *testing.T) {
	inASecond(t, func(t *testing.T, c *Cache, d *fakeDevice) {
		u, mem, hung := c.NewUser(), make([]byte, 64<<10), make(chan struct{})
		d.onDeregister = func(registration) { <-hung }
		u.use(t, mem, LocalRead)
		u.Leave()
		pass(2 * unusedFor)
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }()
		synctest.Wait()
		select {
		case err := <-closed:
			t.Errorf("Close has returned (%v) while the device deregisters", err)
		default:
		}
		close(hung)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		expectEmpty(t, d)
		runtime.KeepAlive(mem)
	})
}

// Users come and go while other users use the same memory. When all have left, nothing is cached.
func TestUsersComeAndGo(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	var buffers [4][64 << 10]byte
	for i := range buffers {
		usedBefore(c, buffers[i][:])
	}
	var going sync.WaitGroup
	for g := range 8 {
		going.Go(func() {
			for round := range 200 {
				u := c.NewUser()
				for i := range 1 + (g+round)%4 {
					b := buffers[(g*round+i)%len(buffers)][:]
					r, err := u.Acquire(b, LocalRead)
					if err != nil {
						t.Error(err)
						return
					}
					if err := d.covers(r.LKey(), b, LocalRead); err != nil {
						t.Error(err)
					}
					r.Release()
				}
				past := time.Now().Add(-unusedFor)
				u.left.Store(&past)
				c.sweep()
			}
		})
	}
	going.Wait()
	expectEmpty(t, d)
	if made := d.registrations(); made == 0 {
		t.Error("nothing was registered")
	}
}

func BenchmarkUserHit(b *testing.B) {
	for _, n := range []int{1, 2, 100} {
		b.Run(fmt.Sprintf("%d users", n), func(b *testing.B) {
			c, buffers := cachedBuffers(b, 1, 64<<10)
			users := make([]*User, n)
			for i := range users {
				users[i] = c.NewUser()
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r, err := users[i%n].Acquire(buffers[0], LocalRead)
				if err != nil {
					b.Fatal(err)
				}
				r.Release()
			}
		})
	}
}
