package shm

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// bells returns both ends of a doorbell, over memory of their own.
func bells(t *testing.T) (near, far *doorbell) {
	t.Helper()
	var ends [2]doorbell
	said := [2]*bell{new(bell), new(bell)}
	for i := range ends {
		ends[i].peer = -1
		if err := ends[i].create(); err != nil {
			t.Fatal(err)
		}
		ends[i].own, ends[i].peers = said[i], said[1-i]
		ends[i].seen.most.Store(linkSlots)
	}
	for i := range ends {
		fd, err := unix.Dup(ends[1-i].toPass)
		if err != nil {
			t.Fatal(err)
		}
		if err := ends[i].setPeer(fd); err != nil {
			t.Fatal(err)
		}
	}
	for i := range ends {
		ends[i].passed()
		t.Cleanup(func() { ends[i].close(accountOf(0)) })
	}
	return &ends[0], &ends[1]
}

func TestRingDeliversItsNews(t *testing.T) {
	t.Run("eventfd", testRingDelivers)
	t.Run("socket", func(t *testing.T) {
		bySocket(t)
		testRingDelivers(t)
	})
}

// bellsBySocket makes the test's doorbells sockets instead of eventfds.
var bellsBySocket bool

func bySocket(t *testing.T) {
	bellsBySocket = true
	openEventfd = func() (at, pass int, err error) { return -1, -1, unix.EOPNOTSUPP }
	t.Cleanup(func() { bellsBySocket, openEventfd = false, newEventfd })
}

func testRingDelivers(t *testing.T) {
	near, far := bells(t)
	if near.socket != bellsBySocket || far.drains != bellsBySocket {
		t.Fatalf("the doorbell is a socket: %v", near.socket)
	}
	type news struct {
		slot int
		ev   session.Events
	}
	got := make(chan news, 1)
	served := make(chan struct{})
	var a waiters
	a.init(far, func(slot int, ev session.Events) { got <- news{slot, ev} })
	go func() {
		defer close(served)
		a.run()
	}()
	for i := range 1000 {
		want := news{i * 7 % linkSlots, session.Events(1 + i%3)}
		near.ring(want.slot, want.ev)
		select {
		case n := <-got:
			if n != want {
				t.Fatalf("%+v, want %+v", n, want)
			}
		case <-time.After(patience):
			t.Fatalf("nobody was woken for %+v", want)
		}
	}
	a.stop()
	<-served
}

// A ring wakes the peer, however many rings nobody has waited for: an end that looks at the counters
// also empties the queue.
func TestRingAfterMoreThanTheQueueHolds(t *testing.T) {
	bySocket(t)
	near, far := bells(t)
	for range 10_000 {
		far.own.asleep.Set(0)
		near.ring(1, session.RecvReady)
	}
	seen := make(chan struct{})
	served := make(chan struct{})
	var a waiters
	a.init(far, func(int, session.Events) { seen <- struct{}{} })
	go func() {
		defer close(served)
		a.run()
	}()
	for range 1000 { // the first wait finds the news of all
		near.ring(1, session.RecvReady)
		select {
		case <-seen:
		case <-time.After(patience):
			t.Fatal("nobody was woken")
		}
	}
	a.stop()
	for {
		select {
		case <-seen:
		case <-served:
			return
		}
	}
}

func setBlocking(fd int) error { return unix.SetNonblock(fd, false) }

// A peer may change the descriptor that it has passed in any way: ringing never blocks.
func TestRingDoesNotBlockOnASocket(t *testing.T) {
	for name, change := range map[string]func(fd int) error{
		"full":           func(int) error { return nil },
		"full, blocking": setBlocking,
		"shut down":      func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RDWR) },
		"slow to send": func(fd int) error {
			return errors.Join(setBlocking(fd),
				unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 3600}))
		},
	} {
		t.Run(name, func(t *testing.T) { ringOften(t, doorbellEnd(t), change) })
	}
}

func TestRingDoesNotBlockOnAnEventfd(t *testing.T) {
	for name, change := range map[string]func(fd int) error{
		"as passed": func(int) error { return nil },
		"blocking":  setBlocking,
		"empty, blocking": func(fd int) error {
			for range 2 { // empties the semaphore
				unix.Read(fd, make([]byte, 8))
			}
			return setBlocking(fd)
		},
		"full, blocking": func(fd int) error {
			full := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}
			unix.Write(fd, full[:])
			return setBlocking(fd)
		},
	} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Eventfd(2, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK|unix.EFD_SEMAPHORE)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			ringOften(t, fd, change)
		})
	}
}

// ringOften rings at fd, after its owner has changed it with change.
func ringOften(t *testing.T, fd int, change func(fd int) error) {
	t.Helper()
	d := doorbell{own: new(bell), peers: new(bell), peer: -1, toPass: -1}
	if err := d.create(); err != nil {
		t.Fatal(err)
	}
	defer func() { d.at.Close(); d.passed() }()
	if err := d.setPeer(fd); err != nil {
		t.Fatal(err)
	}
	if err := change(fd); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 10_000 { // far more than its queue holds
			d.peers.asleep.Set(0)
			d.ring(1, session.RecvReady)
		}
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("it blocks")
	}
}

// Only descriptors that cannot block are accepted as doorbells.
func TestOtherDescriptorsAreNoDoorbells(t *testing.T) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC) // blocking
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(event)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeAll(pipe[:])
	if _, err := unix.Write(pipe[1], make([]byte, 8)); err != nil { // which a read could take without blocking
		t.Fatal(err)
	}
	packets, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(packets)
	tcp, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(tcp)
	d := doorbell{peer: -1}
	if err := d.create(); err != nil {
		t.Fatal(err)
	}
	defer func() { d.at.Close(); d.passed() }()
	for name, fd := range map[string]int{
		"an eventfd without a count": event, "a pipe": pipe[1], "a pipe's other end": pipe[0], "TCP": tcp, "packets": packets, "nothing": -1,
	} {
		if err := d.setPeer(fd); !errors.Is(err, errDoorbell) || d.peer != -1 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A doorbell is a socket, to which the peer sends a socket whose closing takes a minute. Neither the
// goroutine that waits at the doorbell nor the one that ends that wait closes it, even if there is no
// free descriptor.
func TestLingeringSocketAtADoorbell(t *testing.T) {
	withLimits(t, startLimits) // its closing is charged
	bySocket(t)
	near, far := bells(t)
	fd := lingering(t)
	if err := unix.Sendmsg(near.peer, one[:1], unix.UnixRights(fd), nil, unix.MSG_DONTWAIT); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd) // not the last reference
	got, served := make(chan int, 2), make(chan struct{})
	var a waiters
	a.init(far, func(slot int, _ session.Events) { got <- slot })
	go func() {
		defer close(served)
		a.run()
	}()
	for slot := range 2 {
		near.ring(slot, session.RecvReady)
		select {
		case <-got:
		case <-time.After(patience):
			t.Fatal("nobody was woken")
		}
	}
	began := time.Now()
	testenv.WithoutDescriptors(t, func() {
		a.stop()
		<-served
		far.close(accountOf(0))
	})
	if d := time.Since(began); d > patience/2 {
		t.Errorf("the end took %v", d)
	}
	far.peer = -1 // so that it is not closed twice
}
