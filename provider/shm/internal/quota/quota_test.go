package quota

import (
	"math/rand"
	"sync"
	"testing"
)

// share returns how many units one user can get at most.
func (p *Pool) share() int64 { return p.limit / 2 }

// held returns how many units a user holds.
func (p *Pool) held(user Holder) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.by[user]
}

// takeAll takes single units for a user until it gets no more, and returns how many it holds.
func takeAll(p *Pool, user Holder) int64 {
	for p.Take(user, 1) {
	}
	return p.held(user)
}

// Each user gets at most half of what is free when it comes: a half, a quarter, and so on. Users that
// come at the same time get the same.
func TestShares(t *testing.T) {
	p := New(120)
	for user, want := range []int64{p.share(), 30, 15} {
		if got := takeAll(p, Holder(user)); got != want {
			t.Errorf("user %d got %d, want %d", user, got, want)
		}
	}
	p = New(120)
	for took := true; took; {
		took = false
		for user := range Holder(3) {
			took = p.Take(user, 1) || took
		}
	}
	for user := range Holder(3) {
		if got := p.held(user); got != 30 {
			t.Errorf("user %d of three got %d", user, got)
		}
	}
}

// A user that is refused gets nothing, and what one user returns is free for another.
func TestTakeAndReturn(t *testing.T) {
	p := New(10)
	if p.Take(1, 6) || p.Used() != 0 || p.held(1) != 0 {
		t.Error("more than the share")
	}
	if !p.Take(1, 5) || p.Take(1, 1) || !p.Take(2, 2) || p.Take(2, 1) {
		t.Error("not to the share")
	}
	p.Return(1, 5)
	if !p.Take(2, 2) || p.held(2) != 4 || p.Used() != 4 {
		t.Errorf("%d of %d are held", p.held(2), p.Used())
	}
	p.Return(2, 4)
	if len(p.by) != 0 {
		t.Errorf("users who hold nothing are remembered: %v", p.by)
	}
}

// What a user was charged with counts against it, even beyond the limit.
func TestCharge(t *testing.T) {
	p := New(10)
	p.Charge(1, 12)
	if p.Take(1, 1) || p.Take(2, 1) || p.Take(Own, 1) {
		t.Error("more than there is")
	}
	p.Return(1, 8)
	if !p.Take(1, 1) || p.Take(1, 1) || !p.Take(2, 2) {
		t.Error("not what is left")
	}
}

// The process itself may take everything, and users share the rest.
func TestOwn(t *testing.T) {
	p := New(10)
	if !p.Take(Own, 6) || p.Take(1, 3) || !p.Take(1, 2) || !p.Take(Own, 2) || p.Take(Own, 1) {
		t.Error("not what is free")
	}
	p.Return(Own, 8)
	if p.Used() != p.held(1) || !p.Take(1, 3) {
		t.Errorf("%d are in use", p.Used())
	}
}

// Whatever users do, none holds more than its share, all together never hold more than there is, and at
// the end all is accounted for.
func TestManyUsers(t *testing.T) {
	p := New(1000)
	var users sync.WaitGroup
	for user := range Holder(8) {
		users.Go(func() {
			rnd := rand.New(rand.NewSource(int64(user)))
			held := int64(0)
			for range 2000 {
				if n := 1 + rnd.Int63n(50); p.Take(user, n) {
					held += n
				}
				if held > p.share() || p.Used() > p.Limit() {
					t.Errorf("user %d holds %d, all %d", user, held, p.Used())
				}
				if n := rnd.Int63n(held + 1); rnd.Intn(2) == 0 {
					p.Return(user, n)
					held -= n
				}
			}
			p.Return(user, held)
		})
	}
	users.Wait()
	if p.Used() != 0 || len(p.by) != 0 {
		t.Errorf("%d are left, by %v", p.Used(), p.by)
	}
}
