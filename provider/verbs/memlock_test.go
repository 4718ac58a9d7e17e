package verbs

import (
	"os"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// With a smaller limit the control buffers are smaller, but never smaller than the session needs. What
// can be exposed shrinks to nothing.
func TestMemlockChoosesSizes(t *testing.T) {
	usual := Config{}.withDefaults()
	for _, tt := range []struct {
		memlock int
		buffer  int // bytes of one buffer
		expose  int
	}{
		{0, defaultBufferSize, maxExpose},
		{1 << 30, defaultBufferSize, maxExpose},
		{64 << 20, defaultBufferSize, 16 << 20},
		{8 << 20, defaultBufferSize, 2 << 20},
		{connectionShare * restBytes, defaultBufferSize, 256 << 10},
		{connectionShare*restBytes - 1, 512, 0},
		{MinMemlock, session.MaxControl, 0},
		{1, session.MaxControl, 0},
	} {
		c := usual.fitting(tt.memlock, 0)
		if c.bufferSize != tt.buffer || exposeLimit(tt.memlock) != tt.expose {
			t.Errorf("%d bytes: buffers of %d and exposures of %d, want %d and %d",
				tt.memlock, c.bufferSize, exposeLimit(tt.memlock), tt.buffer, tt.expose)
		}
	}

	// The smallest limit has room for both ends of a connection, rounded up to pages, and for one more
	// end.
	c := usual.fitting(MinMemlock, 0)
	sends, all := c.sendBytes(), c.sendBytes()+c.receiveBytes()
	page := os.Getpagesize()
	if n := roundUp(sends, page) + roundUp(all, page) - sends/page*page; 3*n > MinMemlock {
		t.Errorf("three ends take %d bytes each, by the pages of both registrations", n)
	}
}

func TestSmallerControlBuffersComeToAnEnd(t *testing.T) {
	for _, c := range []Config{
		{},
		{buffers: 1000, bufferSize: 100_000, sendBuffer: 1 << 20},
		{buffers: minBuffers, bufferSize: session.MaxControl, sendBuffer: 1},
		{bufferSize: 300, sendBuffer: 7777},
	} {
		c = c.withDefaults()
		for steps := 0; ; steps++ {
			if c.buffers < minBuffers || c.bufferSize < session.MaxControl || c.sendBuffer < 4*c.bufferSize || c.sendBuffer%cacheLine != 0 {
				t.Errorf("too small: %+v", c)
			}
			smaller, ok := c.smaller()
			if !ok {
				break
			}
			if smaller.receiveBytes() >= c.receiveBytes() || smaller.sendBytes() > c.sendBytes() || steps > 30 {
				t.Fatalf("not smaller: %+v, then %+v", c, smaller)
			}
			c = smaller
		}
		if c.buffers != minBuffers || c.bufferSize != session.MaxControl {
			t.Errorf("the smallest is %d of %d bytes", c.buffers, c.bufferSize)
		}
	}
}

// The memory that mlx5 locks for its queues is charged: connections get smaller buffers because of it,
// and it is released with them.
func TestLockedQueuesOfMLX5(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to mlx5
	}
	const limit = connectionShare * restBytes // without the queues, buffers of the usual size would fit
	memlock = func() int { return limit }
	const queues = 32<<10 + 4<<10 + 8<<10 // 70 sends of 448 bytes, receives and completions
	nothingLeft(t)
	before := memlockAvailable()
	a, b, err := connect(listen(t, Config{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*Endpoint{a, b} {
		if room := limit/connectionShare - queues; e.cfg.sendBytes()+e.cfg.receiveBytes() > room {
			t.Errorf("buffers of %d and %d bytes, beside queues within %d", e.cfg.sendBytes(), e.cfg.receiveBytes(), room)
		}
		if e.locked != queues {
			t.Errorf("queues of %d bytes, want %d", e.locked, queues)
		}
	}
	if left := memlockAvailable(); before-left < a.locked+b.locked {
		t.Errorf("%d bytes left of %d, with queues of %d at each end", left, before, a.locked)
	}
	a.discard()
	b.discard()
	if n := lockedQueues.Load(); n != 0 {
		t.Errorf("%d bytes of queues are left", n)
	}
}
