package siege

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

func init() { roles["confined"] = confinedRole }

// confinedArgs are the limits of a confined process, and the address that it dials.
type confinedArgs struct {
	Address string
	Forbid  call           // Number 0: no call
	Limits  map[int]uint64 // by RLIMIT_…
	Space   uint64         // RLIMIT_AS, in bytes beyond what is in use
	Files   uint64         // RLIMIT_NOFILE, beyond what is in use
}

// confinedRole dials, and then listens for one connection, within its limits. It prints the result of
// each.
func confinedRole(r *roleIO) error {
	var args confinedArgs
	if err := r.args(&args); err != nil {
		return err
	}
	// Objects that Go's runtime creates only once are created before, so that the limits do not affect
	// them.
	if warm, err := net.Listen("tcp4", "127.0.0.1:0"); err == nil {
		go net.Dial("tcp4", warm.Addr().String())
		warm.Accept()
		warm.Close()
	}
	if err := args.confine(); err != nil {
		return err
	}
	r.say("dialed", dialConfined(args.Address))
	// Each process has its own address, because a failed search for the process at an address is
	// remembered for a second.
	pid := os.Getpid()
	ln, err := san.Listen("tcp4", fmt.Sprintf("127.%d.%d.%d:0", 1+pid>>16&0x7f, pid>>8&0xff, pid&0xff))
	if err != nil {
		r.say("listening", "error "+err.Error())
		return nil
	}
	go func() {
		for {
			c, err := ln.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				go func() {
					defer c.Close()
					io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
					r.say("accepted", san.InfoOf(c).Fallback.String())
				}()
			}
		}
	}()
	r.say("listening", ln.Addr().String())
	r.untilEnd()
	return nil
}

func (a *confinedArgs) confine() error {
	if a.Files > 0 {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return err
		}
		n := uint64(len(fds)) - 1 + a.Files
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	if a.Space > 0 {
		var pages uint64
		b, err := os.ReadFile("/proc/self/statm")
		if err == nil {
			_, err = fmt.Sscan(string(b), &pages)
		}
		if err != nil {
			return err
		}
		n := pages*uint64(os.Getpagesize()) + a.Space
		if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	for what, n := range a.Limits {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	if a.Forbid.Number != 0 {
		return forbid(a.Forbid)
	}
	return nil
}

// dialConfined dials and echoes. It returns the provider, with the reason if that is TCP, or the error.
func dialConfined(address string) string {
	var d san.Dialer
	d.Options.AttemptTimeout = 8 * time.Second // for a busy machine; a dial that hangs still shows
	d.Options.MoveAtOnce = true
	c, err := dialMovedBy(&d, "tcp4", address)
	if err != nil {
		if errors.Is(err, syscall.EMFILE) {
			return "descriptors"
		}
		return "error " + err.Error()
	}
	defer c.Close()
	if err := echoOnce(c, 1); err != nil {
		return "error " + err.Error()
	}
	info := san.InfoOf(c)
	if info.Provider == "shm" {
		return "shm"
	}
	return info.Provider + ": " + info.Fallback.String()
}

// echoServer echoes in this process, over shared memory and over TCP.
func echoServer(t *testing.T) (address string) {
	t.Helper()
	var lc san.ListenConfig
	lc.Options.Disable = sanconn.FeaturePoll // so that each end wakes the other for each message
	ln, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			}()
		}
	}()
	return ln.Addr().String()
}

// confined runs a process within limits. It returns the result of its dial to this process, and of this
// process's dial to it.
func confined(t *testing.T, args confinedArgs) (there, here string) {
	t.Helper()
	p := start(t, spec{role: "confined", args: args})
	defer p.kill()
	p.hear("dialed", &there)
	var at string
	if p.hear("listening", &at); strings.HasPrefix(at, "error") {
		return there, at
	}
	if here = dialConfined(at); strings.HasSuffix(here, "stays on TCP") { // this end does not know why
		var why string
		p.hear("accepted", &why)
		here += ", at the acceptor " + why
	}
	return there, here
}

// Possible results for a connection: on shared memory without the mechanism, or on TCP with a reason.
var (
	asBefore = []string{"shm"}
	without  = []string{"shm", "tcp: permission", "tcp: no provider", "tcp: resources", "tcp: no SAN listener", "tcp: stays on TCP, at the acceptor permission", "tcp: stays on TCP, at the acceptor no provider"}
)

// Whatever system call is forbidden, and with whatever error it fails, dials succeed.
func TestForbiddenSystemCalls(t *testing.T) {
	address := echoServer(t)
	var mu sync.Mutex
	shm, dials := 0, 0
	t.Run("each", func(t *testing.T) {
		for name, c := range calls {
			errnos := []syscall.Errno{syscall.EPERM, syscall.ENOSYS}
			switch {
			case c.Number == unix.SYS_SOCKET: // as with systemd's RestrictAddressFamilies, or a kernel without sock_diag
				errnos = append(errnos, syscall.EAFNOSUPPORT, syscall.EPROTONOSUPPORT)
			case c.Number == unix.SYS_GETSOCKOPT: // as on gVisor
				errnos = append(errnos, syscall.ENOPROTOOPT)
			case name == "fcntl F_ADD_SEALS":
				errnos = append(errnos, syscall.EINVAL) // as on a kernel that does not know one of the flags
			}
			for _, errno := range errnos {
				t.Run(fmt.Sprintf("%s %v", name, errno), func(t *testing.T) {
					t.Parallel()
					c := c
					c.Errno = uint32(errno)
					there, here := confined(t, confinedArgs{Address: address, Forbid: c})
					t.Logf("without %s (%v) it dials by %s, and is dialed by %s", name, errno, there, here)
					for _, how := range []string{there, here} {
						if !slices.Contains(without, how) {
							t.Errorf("a dial by %q", how)
						}
						mu.Lock()
						dials++
						if how == "shm" {
							shm++
						}
						mu.Unlock()
					}
					if why := map[syscall.Errno]string{syscall.EPERM: "tcp: permission", syscall.ENOSYS: "tcp: no provider"}[errno]; name == "memfd_create" && there != why {
						t.Errorf("it dials by %q, want %q", there, why)
					}
				})
			}
		}
	})
	if shm == 0 || shm == dials {
		t.Errorf("%d of %d dials went by shared memory", shm, dials)
	}
}

// With any resource limit, dials succeed, or fail where TCP's do, too.
func TestResourceLimits(t *testing.T) {
	address := echoServer(t)
	few := []string{"shm", "tcp: resources", "tcp: no SAN listener", "tcp: no provider", "descriptors"}
	for _, tc := range []struct {
		name        string
		args        confinedArgs
		there, here []string
	}{
		{"none", confinedArgs{}, asBefore, asBefore},
		{"RLIMIT_MEMLOCK 0", confinedArgs{Limits: map[int]uint64{unix.RLIMIT_MEMLOCK: 0}}, asBefore, asBefore},
		// Each end makes half of a segment, which has 64 MiB.
		{"RLIMIT_FSIZE 1 MiB", confinedArgs{Limits: map[int]uint64{unix.RLIMIT_FSIZE: 1 << 20}}, []string{"tcp: resources"}, []string{"tcp: resources"}},
		{"RLIMIT_FSIZE 0", confinedArgs{Limits: map[int]uint64{unix.RLIMIT_FSIZE: 0}}, []string{"tcp: resources"}, []string{"tcp: resources"}},
		// A segment takes 128 MiB of addresses.
		{"RLIMIT_AS 100 MiB more", confinedArgs{Space: 100 << 20}, []string{"tcp: resources"}, []string{"tcp: resources"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.args.Address = address
			t.Setenv("MALLOC_ARENA_MAX", "1") // otherwise glibc sometimes maps 128 MiB, and returns most of it
			there, here := confined(t, tc.args)
			if !slices.Contains(tc.there, there) || !slices.Contains(tc.here, here) {
				t.Errorf("it dials by %q, and is dialed by %q", there, here)
			}
		})
	}
	for files := range uint64(14) {
		t.Run(fmt.Sprintf("RLIMIT_NOFILE %d more", files+1), func(t *testing.T) {
			t.Parallel()
			there, here := confined(t, confinedArgs{Address: address, Files: files + 1})
			t.Logf("it dials by %s, and is dialed by %s", there, here)
			if !slices.Contains(few, there) {
				t.Errorf("it dials by %q", there)
			}
			if !slices.Contains(few, here) && !strings.Contains(here, "too many open files") && !strings.Contains(here, "timeout") {
				t.Errorf("it is dialed by %q", here)
			}
		})
	}
}

func init() { roles["confinedLater"] = confinedLaterRole }

// confinedLaterRole dials. Once the connection has moved, it forbids itself a system call, and goes on
// echoing. It prints the provider before that, the result on this connection, and the result of another
// dial.
func confinedLaterRole(r *roleIO) error {
	var args confinedArgs
	if err := r.args(&args); err != nil {
		return err
	}
	var d san.Dialer
	d.Options.MoveAtOnce = true
	d.Options.Disable = sanconn.FeaturePoll // so that each end wakes the other for each message
	c, err := dialMovedBy(&d, "tcp4", args.Address)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := echoOnce(c, 1); err != nil {
		return err
	}
	r.say("moved", san.InfoOf(c).Provider)
	if err := args.confine(); err != nil {
		return err
	}
	r.say("went", echoOn(c))
	r.say("dialed", dialConfined(args.Address))
	return nil
}

// echoOn echoes messages, and then a stream that is long enough to make rings grow, to its end. It
// returns "ok" or the error.
func echoOn(c net.Conn) string {
	for n := range 100 {
		if err := echoOnce(c, n); err != nil {
			return fmt.Sprintf("echo %d: %v", n, err)
		}
	}
	c.SetDeadline(time.Now().Add(patience / 2))
	sent := bytes.Repeat([]byte("0123456789abcde"), 512<<10)
	go func() {
		c.Write(sent)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(struct{ io.Reader }{c})
	if err != nil || !bytes.Equal(got, sent) {
		return fmt.Sprintf("%d bytes of %d, %v", len(got), len(sent), err)
	}
	return "ok"
}

// If a process forbids itself a system call after its connections have moved, no byte of theirs is lost.
// But without preadv2 it no longer wakes its peers (docs/LIMITS.md).
func TestForbiddenBehindTheMove(t *testing.T) {
	address := echoServer(t)
	for name, c := range calls {
		if name == "preadv2" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := c
			c.Errno = uint32(syscall.EPERM)
			p := start(t, spec{role: "confinedLater", args: confinedArgs{Address: address, Forbid: c}})
			defer p.kill()
			var provider, went, dialed string
			p.hear("moved", &provider)
			p.hear("went", &went)
			p.hear("dialed", &dialed)
			if provider != "shm" || went != "ok" || !slices.Contains(without, dialed) {
				t.Errorf("it moved to %s, and went on: %s; another dial by %q", provider, went, dialed)
			}
		})
	}
}
