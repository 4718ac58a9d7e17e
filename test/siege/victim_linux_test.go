package siege

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san"
)

func init() { roles["victim"] = victimRole }

// victimArgs are the victim's settings.
type victimArgs struct {
	Address string // default 127.0.0.1:0
	Device  string // the interface that the listener is bound to
}

// Modes: what a client's first byte makes the victim do with the connection.
const (
	modeEcho = 'e' // echo
	modeHold = 'h' // read nothing more
	modeSend = 'w' // send without end
	modeFill = 'f' // send until there is no room, and close
	modeWait = 'd' // read with a deadline, and report how long that took
)

// victimReport is what the victim reports about itself.
type victimReport struct {
	Accepted  int64 // connections since the start
	Failed    int64 // how often accept or open failed for lack of descriptors
	Open      int   // connections that have moved to shared memory
	Heap      uint64
	Waiting   int           // connections with operations that have deadlines
	Ended     int           // Reads, or Writes, that deadlines have ended, on the connection with the fewest
	Longest   time.Duration // the longest time of such an operation, including one in progress
	Late      time.Duration // how long after their deadlines operations ended, at the median
	Overslept time.Duration // how long after their time sleeps ended, at the median
}

type victim struct {
	accepted atomic.Int64
	failed   atomic.Int64

	mu        sync.Mutex // guards what follows
	waiters   []*waiter
	longest   time.Duration // of operations that have ended
	late      []time.Duration
	overslept []time.Duration
}

// waiter is a connection with operations that have deadlines.
type waiter struct {
	begun time.Time // when the present operation has begun; zero: there is none
	ended [2]int    // Reads and Writes that deadlines have ended
}

// victimRole is a server.
func victimRole(r *roleIO) error {
	var args victimArgs
	if err := r.args(&args); err != nil {
		return err
	}
	if args.Address == "" {
		args.Address = "127.0.0.1:0"
	}
	var lc san.ListenConfig
	if args.Device != "" {
		lc.NetListenConfig.Control = func(_, _ string, c syscall.RawConn) (err error) {
			c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), args.Device) })
			return err
		}
	}
	ln, err := lc.Listen(context.Background(), "tcp4", args.Address)
	if err != nil {
		return err
	}
	if got := ln.(*san.Listener).Providers(); len(got) == 0 || got[0] != "shm" {
		return errors.New("the victim does not listen on shared memory")
	}
	if err := growDescriptors(); err != nil {
		return err
	}
	v := new(victim)
	go v.serve(ln)
	r.say("listening", ln.Addr().String())
	for {
		switch r.command() {
		case "report":
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			r.say("report", v.report(m.HeapInuse))
		case "close":
			begun := time.Now()
			ln.Close()
			r.say("closed", time.Since(begun))
		default:
			return nil
		}
	}
}

// growDescriptors makes the kernel enlarge the table of descriptors to its full size. Enlarging it later
// waits for a grace period of RCU (fs/file.c, expand_fdtable), and each thread that needs a descriptor
// waits with it: the siege would count these threads.
func growDescriptors() error {
	var most unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &most); err != nil {
		return err
	}
	fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, int(min(most.Cur, 4096))-1)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func (v *victim) report(heap uint64) victimReport {
	v.mu.Lock()
	defer v.mu.Unlock()
	r := victimReport{v.accepted.Load(), v.failed.Load(), san.Stats().Open["shm"], heap, len(v.waiters), math.MaxInt, v.longest, median(v.late), median(v.overslept)}
	for _, w := range v.waiters {
		r.Ended = min(r.Ended, w.ended[0], w.ended[1])
		if !w.begun.IsZero() {
			r.Longest = max(r.Longest, time.Since(w.begun))
		}
	}
	return r
}

func (v *victim) serve(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			v.failed.Add(1)
			time.Sleep(5 * time.Millisecond) // as net/http does
			continue
		}
		v.accepted.Add(1)
		go v.client(c)
	}
}

func (v *victim) client(c net.Conn) {
	defer c.Close()
	if f, err := os.Open(os.DevNull); err == nil { // opens a file, as a file server does
		f.Close()
	} else {
		v.failed.Add(1)
	}
	var b [256]byte
	if _, err := io.ReadFull(c, b[:1]); err != nil {
		return
	}
	switch b[0] {
	case modeEcho:
		for {
			n, err := c.Read(b[:])
			if err != nil {
				return
			}
			if _, err := c.Write(b[:n]); err != nil {
				return
			}
		}
	case modeHold:
		select {}
	case modeSend:
		for err := error(nil); err == nil; {
			_, err = c.Write(b[:])
		}
	case modeFill:
		large := make([]byte, 64<<10)
		for n, err := 1, error(nil); err == nil || n > 0 && errors.Is(err, os.ErrDeadlineExceeded); {
			c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
			n, err = c.Write(large)
		}
	case modeWait:
		v.wait(c)
	}
}

// wait makes operations with deadlines, until the connection ends. At the same time it sleeps for the
// same times, which shows for how long the machine keeps this process from running.
func (v *victim) wait(c net.Conn) {
	const limit = 200 * time.Millisecond
	w := new(waiter)
	v.mu.Lock()
	v.waiters = append(v.waiters, w)
	v.mu.Unlock()
	large := make([]byte, 1<<20)
	ops := []func() error{
		func() error { c.SetReadDeadline(time.Now().Add(limit)); _, err := io.ReadFull(c, large); return err },
		func() error { c.SetWriteDeadline(time.Now().Add(limit)); _, err := c.Write(large); return err },
	}
	for {
		begun := time.Now()
		time.Sleep(limit)
		v.mu.Lock()
		v.overslept = append(v.overslept, time.Since(begun)-limit)
		v.mu.Unlock()
		for i, op := range ops {
			begun := time.Now()
			v.mu.Lock()
			w.begun = begun
			v.mu.Unlock()
			err := op()
			took := time.Since(begun)
			v.mu.Lock()
			w.begun = time.Time{}
			v.longest = max(v.longest, took)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				v.late = append(v.late, took-limit)
				w.ended[i]++
				err = nil
			}
			v.mu.Unlock()
			if err != nil {
				return
			}
		}
	}
}
