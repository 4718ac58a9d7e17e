package siege

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
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
	Device  string // that the listener is bound to
}

// What a client's first byte has the victim do with the connection.
const (
	modeEcho = 'e' // send all back
	modeHold = 'h' // read no more
	modeSend = 'w' // send without end
	modeFill = 'f' // send until there is no room, and close
	modeWait = 'd' // read with a deadline, and report how long that took
)

// victimReport is what the victim knows of itself.
type victimReport struct {
	Accepted int64 // connections, since the start
	Failed   int64 // accepts and opens, for lack of descriptors
	Open     int   // that have moved to shared memory
	Heap     uint64
	Waited   time.Duration // the longest that an operation took beyond its deadline
	Slept    time.Duration // the longest that a sleep took beyond its time, meanwhile
}

type victim struct {
	accepted atomic.Int64
	failed   atomic.Int64
	late     atomic.Int64 // nanoseconds
	slept    atomic.Int64 // nanoseconds
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
			r.say("report", victimReport{v.accepted.Load(), v.failed.Load(), san.Stats().Open["shm"], m.HeapInuse, time.Duration(v.late.Load()), time.Duration(v.slept.Load())})
		case "close":
			begun := time.Now()
			ln.Close()
			r.say("closed", time.Since(begun))
		default:
			return nil
		}
	}
}

// growDescriptors has the kernel make the table of descriptors as large as it gets. Growing it later
// waits for a grace period of RCU (fs/file.c, expand_fdtable), and every thread that wants a
// descriptor with it: the siege would count these threads.
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
	if f, err := os.Open(os.DevNull); err == nil { // as who serves files does
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
		for err := error(nil); err == nil; {
			c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
			_, err = c.Write(large)
		}
	case modeWait:
		v.wait(c)
	}
}

// wait has operations with deadlines, until the connection ends, and sleeps of the same length,
// which show how long the machine keeps this process from running.
func (v *victim) wait(c net.Conn) {
	const limit = 200 * time.Millisecond
	large := make([]byte, 1<<20)
	for {
		begun := time.Now()
		time.Sleep(limit)
		raise(&v.slept, time.Since(begun)-limit)
		for _, op := range []func() error{
			func() error { c.SetReadDeadline(time.Now().Add(limit)); _, err := io.ReadFull(c, large); return err },
			func() error { c.SetWriteDeadline(time.Now().Add(limit)); _, err := c.Write(large); return err },
		} {
			begun := time.Now()
			err := op()
			raise(&v.late, time.Since(begun)-limit)
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
		}
	}
}

// raise makes a at least d.
func raise(a *atomic.Int64, d time.Duration) {
	for was := a.Load(); was < int64(d) && !a.CompareAndSwap(was, int64(d)); was = a.Load() {
	}
}
