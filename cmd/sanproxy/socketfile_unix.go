//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
)

// socketFile is a listener whose Close removes the file that it has made, but not one that another
// process has put in its place.
type socketFile struct {
	*net.UnixListener
	path string
	made fs.FileInfo
	once sync.Once
}

func (l *socketFile) Close() error {
	l.once.Do(func() { // after the first Close, the file's inode number may be another file's
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(l.made, now) {
			os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}

// listenUnix listens on a socket file or, if path begins with @, on an abstract name. It removes a
// socket file without a listener, which a process has left behind. If mode is not nil, the file has it
// from its creation on.
func listenUnix(ctx context.Context, path string, mode *fs.FileMode) (net.Listener, error) {
	var lc net.ListenConfig
	if path[0] == '@' {
		return lc.Listen(ctx, "unix", path)
	}
	if mode != nil {
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) {
				// Linux creates the socket file with the descriptor's mode, less the umask; elsewhere
				// this fails.
				syscall.Fchmod(int(fd), uint32(*mode))
			})
		}
	}
	l, err := lc.Listen(ctx, "unix", path)
	if errors.Is(err, syscall.EADDRINUSE) {
		if err := removeStale(ctx, path); err != nil {
			return nil, err
		}
		l, err = lc.Listen(ctx, "unix", path)
	}
	if err != nil {
		return nil, err
	}
	if mode != nil {
		if err := os.Chmod(path, *mode); err != nil {
			l.Close()
			return nil, err
		}
	}
	made, err := os.Lstat(path)
	if err != nil {
		l.Close()
		return nil, err
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	return &socketFile{UnixListener: u, path: path, made: made}, nil
}

// removeStale removes a socket file without a listener.
func removeStale(ctx context.Context, path string) error {
	before, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if before.Mode().Type() != fs.ModeSocket {
		return errors.New("the file is there, and is no socket; choose another path")
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		c.Close()
		return errors.New("another process listens there; end it, or choose another path")
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("the socket file is there, and may be in use: %w", err)
	}
	if now, err := os.Lstat(path); err != nil || !os.SameFile(before, now) {
		return errors.New("another process is opening it")
	}
	return os.Remove(path)
}
