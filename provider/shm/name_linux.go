package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/sockdiag"
	"github.com/sanconn/san/session"
)

// prefixOf returns the beginning of all names for a port: of abstract unix addresses, which belong to
// the network namespace like TCP's ports, or of files in a directory. The rest of a name is random, so
// that nobody can take it in advance.
func prefixOf(dir string, port uint16) string {
	if dir != "" {
		return fmt.Sprintf("%s%d-", anyPort, port)
	}
	return fmt.Sprintf("@san-shm/%d/%d/", version, port)
}

// anyPort is the beginning of all names in a directory.
var anyPort = fmt.Sprintf("san-shm-%d-", version)

// Names returns the names for a port that processes of this host have, in no order: those whose owner,
// by what the kernel reports, may be the user uid; with cfg.Dir, all in that directory. The error is a
// *session.Unavailable.
func Names(ctx context.Context, port uint16, uid uint32, cfg Config) (names []string, err error) {
	if cfg.Dir != "" {
		d, err := openDirectory(cfg.Dir)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		prefix := prefixOf(cfg.Dir, port)
		names, err = d.names(prefix)
		return slices.DeleteFunc(names, func(name string) bool { return !areDigits(name[len(prefix):]) }), err
	}
	prefix := []byte("\x00" + prefixOf("", port)[1:])
	err = sockdiag.UnixListeners(ctx, func(name []byte, user int64) {
		if digits, ok := bytes.CutPrefix(name, prefix); ok && areDigits(string(digits)) && (user < 0 || mayBe(uint32(user), uid)) {
			names = append(names, "@"+string(name[1:]))
		}
	})
	if err != nil {
		err = unavailable(fmt.Errorf("shm: sock_diag of unix sockets: %w", err))
	}
	return names, err
}

// Linked returns the names for a port by which this process has links. Mostly these are all that Names
// would return. Linked costs nothing, whereas Names takes longer the more unix sockets the host has.
func Linked(port uint16, uid uint32, cfg Config) []string {
	key := keyOf(port, "", uid, cfg)
	dialed.mu.Lock()
	defer dialed.mu.Unlock()
	return dialed.besideLocked(key)
}

// areDigits reports whether digits is the end of a Listener's name. Other names do not belong to this
// library, and would get into the texts of errors unchecked.
func areDigits(digits string) bool {
	return len(digits) == 16 && strings.Trim(digits, "0123456789abcdef") == ""
}

// mayBe reports whether a process may belong to uid, by the user that made its socket or called listen:
// root may have dropped its privileges since (identify).
func mayBe(user, uid uint32) bool { return user == uid || user == 0 }

// listenUnix listens at an address. The socket is made by the calling thread, which may be in a network
// namespace of its own.
func listenUnix(address string) (*net.UnixListener, error) {
	l, err := listenConfig.Listen(context.Background(), "unixpacket", address)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// listenConfig makes the kernel attach the sender's credentials to all messages of a listener's
// sockets.
var listenConfig = net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
	if e := rc.Control(func(fd uintptr) { err = passCredentials(int(fd)) }); e != nil {
		return e
	}
	return err
}}

// connect connects to the process that has a name, without waiting, and fails if that process cannot be
// the user's. The socket is made by the calling thread, as in listenUnix.
func (k linkKey) connect() (*net.UnixConn, error) {
	address := k.name
	if k.dir != "" {
		d, err := openDirectory(k.dir)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		address = d.path(k.name)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "link")
	defer f.Close()
	if err := passCredentials(fd); err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: address}); err != nil {
		err = fmt.Errorf("shm: %s: %w", filepath.Join(k.dir, k.name), os.NewSyscallError("connect", err))
		if k.dir != "" && errors.Is(err, unix.ENOENT) {
			err = &session.Unavailable{Reason: session.ReasonNoListener, Err: err}
		}
		return nil, err
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	if k.dir == "" && !mayBe(cred.Uid, k.user) {
		f.Close() // not its last close, as the process may have sent something by now
		accountOf(cred.Uid).closeLater(func() { c.Close() })
		return nil, errOwner(cred.Uid, k.user)
	}
	return c.(*net.UnixConn), nil
}

func errOwner(got, want uint32) error {
	return &session.Unavailable{Reason: session.ReasonOwner,
		Err: fmt.Errorf("shm: the process is user %d's, and not user %d's", got, want)}
}

// NetworkNamespace returns a number that identifies the calling thread's network namespace, or 0 if it
// is not known, without /proc.
func NetworkNamespace() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &st) != nil {
		return 0
	}
	return st.Ino
}
