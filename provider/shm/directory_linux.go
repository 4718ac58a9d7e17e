package shm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// In a directory (Config.Dir) the names are socket files, which processes of other network
// namespaces find if both have the directory mounted. Next to each is a file that its process has
// locked for as long as it lives, so the file of a process that has died is replaced, and that
// of one that lives is not.
//
// Who the peer is the kernel may not tell here: its user may have no number in this user
// namespace. Who may enter the directory may be asked, and who may write to it may answer.

const (
	// socketMode lets the directory's owner and its group connect (where it has the
	// set-group-ID bit, files in it are its group's). lockMode lets them look whether the
	// owner lives.
	socketMode = 0o660
	lockMode   = 0o640

	// lockTries is how often a lock is taken whose file was removed meanwhile, before the
	// name counts as taken.
	lockTries = 3
)

// directory is an open directory.
type directory struct{ *os.File }

// openDirectory opens a directory and checks who may change it.
func openDirectory(path string) (directory, error) {
	bad := func(format string, args ...any) (directory, error) {
		return directory{}, &session.Unavailable{Reason: session.ReasonPermission,
			Err: fmt.Errorf("%w: %s %w", ErrDirectory, path, fmt.Errorf(format, args...))}
	}
	if !filepath.IsAbs(path) {
		return bad("is no absolute path")
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return bad("cannot be opened: %w", err)
	}
	d := directory{os.NewFile(uintptr(fd), path)}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		me := uint32(os.Geteuid())
		switch {
		case st.Uid != 0 && (st.Uid != me || !oneUser(me)):
			err = fmt.Errorf("is user %d's, and neither root's nor user %d's", st.Uid, me)
		case st.Mode&unix.S_IWOTH != 0:
			err = fmt.Errorf("is writable by everybody (mode %04o)", st.Mode&^unix.S_IFMT)
		}
	}
	if err != nil {
		d.Close()
		return bad("%w", err)
	}
	return d, nil
}

// path is the path of a file in the directory that was opened, whatever has its name by now. It
// is short, as a unix socket's address has to be.
func (d directory) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd(), name)
}

func (d directory) fd() int { return int(d.Fd()) }

func fileOf(port uint16, number int) string {
	return fmt.Sprintf("san-shm-%d-%d-%d", version, port, number)
}

// takeFile takes the first name of a port that is free in a directory. giveUp has to be called
// when nobody accepts any more.
func takeFile(dir string, port uint16) (u *net.UnixListener, number int, giveUp func(), err error) {
	d, err := openDirectory(dir)
	if err != nil {
		return nil, 0, nil, err
	}
	// Where this process may not write, each number would fail for that.
	// Other errors are of kernels before 5.8, and of filters of system calls; x/sys then goes by mode bits alone.
	if err := unix.Faccessat2(d.fd(), ".", unix.W_OK|unix.X_OK, unix.AT_EACCESS); err == unix.EACCES || err == unix.EROFS {
		d.Close()
		return nil, 0, nil, fmt.Errorf("shm: %s: %w", dir, os.NewSyscallError("access", err))
	}
	for number := range Numbers {
		var unlock func()
		name := fileOf(port, number)
		if unlock, err = d.lock(name + ".lock"); err != nil {
			continue // taken, or a file that others have put there
		}
		if u, err = d.listen(name); err == nil {
			return u, number, func() {
				unix.Unlinkat(d.fd(), name, 0)
				unlock()
				d.Close()
			}, nil
		}
		unlock()
	}
	d.Close()
	return nil, 0, nil, fmt.Errorf("shm: no name of port %d to be had in %s: %w", port, dir, err)
}

// lock creates and locks a file. unlock removes it.
func (d directory) lock(name string) (unlock func(), err error) {
	for range lockTries {
		const flags = unix.O_CREAT | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK // it may be a pipe by now
		fd, err := unix.Openat(d.fd(), name, unix.O_RDONLY|flags, lockMode)
		if err != nil {
			return nil, os.NewSyscallError("open", err)
		}
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
			unix.Close(fd)
			return nil, os.NewSyscallError("flock", err)
		}
		var mine, there unix.Stat_t
		if unix.Fstat(fd, &mine) == nil && unix.Fstatat(d.fd(), name, &there, unix.AT_SYMLINK_NOFOLLOW) == nil &&
			mine.Dev == there.Dev && mine.Ino == there.Ino {
			return func() {
				unix.Unlinkat(d.fd(), name, 0)
				unix.Close(fd)
			}, nil
		}
		unix.Close(fd) // of a file that its owner has removed
	}
	return nil, unix.EAGAIN
}

// listen makes a socket that listens, under a name whose lock this process has. It makes it in
// a directory of its own, so that nobody can have it change the mode of another file.
func (d directory) listen(name string) (u *net.UnixListener, err error) {
	const inside = "socket"
	own := name + "." + rand.Text()
	if err := unix.Mkdirat(d.fd(), own, 0o700); err != nil {
		return nil, os.NewSyscallError("mkdir", err)
	}
	defer unix.Unlinkat(d.fd(), own, unix.AT_REMOVEDIR)
	fd, err := unix.Openat(d.fd(), own, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open", err)
	}
	private := directory{os.NewFile(uintptr(fd), own)}
	defer private.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Uid != uint32(os.Geteuid()) || st.Mode&0o077 != 0 {
		return nil, fmt.Errorf("shm: %s was exchanged: %w", own, unix.EPERM)
	}
	l, err := listenConfig.Listen(context.Background(), "unixpacket", private.path(inside))
	if err != nil {
		return nil, err
	}
	u = l.(*net.UnixListener)
	u.SetUnlinkOnClose(false) // it will have another name
	err = unix.Fchmodat(fd, inside, socketMode, 0)
	if err == nil {
		err = unix.Renameat(fd, inside, d.fd(), name)
	}
	if err != nil {
		u.Close()
		unix.Unlinkat(fd, inside, 0)
		return nil, fmt.Errorf("shm: %s: %w", name, err)
	}
	return u, nil
}

// connectFile connects to the process that has a name in a directory, without waiting.
func connectFile(dir string, port uint16, number int) (*net.UnixConn, error) {
	d, err := openDirectory(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	name := fileOf(port, number)
	c, err := connectUnix(d.path(name), filepath.Join(dir, name), func(uint32) error { return nil })
	if errors.Is(err, unix.ENOENT) {
		return nil, &session.Unavailable{Reason: session.ReasonNoListener, Err: err}
	}
	return c, err
}
