//go:build unix

package trace

import (
	"fmt"
	"os"
	"syscall"
)

// openFile opens path by the rules of Open. O_NONBLOCK keeps a FIFO from blocking the process before it
// is refused.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.Mode().IsRegular() || st.Nlink != 1 || int(st.Uid) != os.Geteuid() {
			err = fmt.Errorf("open %s: not a regular file of this process's user, or a link", path)
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
