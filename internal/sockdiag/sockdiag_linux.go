// Package sockdiag queries the kernel's lists of sockets by netlink (sock_diag).
package sockdiag

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"syscall"

	"golang.org/x/sys/unix"
)

var ne = binary.NativeEndian

// Open returns a socket for queries about the calling thread's network namespace.
func Open() (fd int, err error) {
	return unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_SOCK_DIAG)
}

// Ask sends a request, whose first byte is an address family, and returns the kernel's messages: one
// about a socket, or with NLM_F_DUMP one about each socket. It does not block. Messages are read into
// room. Those that answer an earlier request, with another seq, are skipped.
func Ask(fd int, flags uint16, seq uint32, request, room []byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		m := append(make([]byte, unix.SizeofNlMsghdr, 128), request...)
		ne.PutUint32(m[0:], uint32(len(m)))
		ne.PutUint16(m[4:], unix.SOCK_DIAG_BY_FAMILY)
		ne.PutUint16(m[6:], unix.NLM_F_REQUEST|flags)
		ne.PutUint32(m[8:], seq)
		_, err := unix.Write(fd, m)
		for err == nil {
			n, failed := unix.Read(fd, room)
			answers, wrong := syscall.ParseNetlinkMessage(room[:max(n, 0)])
			err = cmp.Or(failed, wrong)
			for _, a := range answers {
				switch kind := a.Header.Type; {
				case a.Header.Seq != seq || err != nil:
				case kind == unix.NLMSG_DONE, kind == unix.SOCK_DIAG_BY_FAMILY && !yield(a.Data, nil):
					return
				case kind == unix.NLMSG_ERROR && len(a.Data) >= 4:
					err = unix.Errno(-int32(ne.Uint32(a.Data)))
				case kind != unix.SOCK_DIAG_BY_FAMILY:
					err = errors.New("a message of another kind")
				}
			}
		}
		yield(nil, err)
	}
}

// UnixListeners calls each for every listening unix socket of the calling thread's network namespace:
// with the socket's name, which begins with a zero byte if it is abstract, and with the user that owns
// the socket, or -1 before Linux 5.3, which does not tell. It ends with an error when ctx ends: any
// user may have made a hundred thousand sockets, which take half a microsecond each.
func UnixListeners(ctx context.Context, each func(name []byte, user int64)) error {
	fd, err := Open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)                                                                // and the rest of the answer with it
	request := [24]byte{0: unix.AF_UNIX}                                                // include/uapi/linux/unix_diag.h: unix_diag_req
	ne.PutUint32(request[4:], 1<<10)                                                    // TCP_LISTEN
	ne.PutUint32(request[12:], 1|1<<6)                                                  // UDIAG_SHOW_NAME, UDIAG_SHOW_UID
	for m, err := range Ask(fd, unix.NLM_F_DUMP, 0, request[:], make([]byte, 32<<10)) { // the most that the kernel sends at once
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		each(parseUnix(m))
	}
	return nil
}

// parseUnix reads a unix_diag_msg, which has 16 bytes, and the attributes that follow it.
func parseUnix(m []byte) (name []byte, user int64) {
	user = -1
	for m = m[min(16, len(m)):]; len(m) >= unix.SizeofNlAttr; {
		size := max(int(ne.Uint16(m)), unix.SizeofNlAttr)
		switch value := m[unix.SizeofNlAttr:min(size, len(m))]; ne.Uint16(m[2:]) {
		case 0: // UNIX_DIAG_NAME
			name = value
		case 7: // UNIX_DIAG_UID
			if len(value) == 4 {
				user = int64(ne.Uint32(value))
			}
		}
		m = m[min((size+3)&^3, len(m)):]
	}
	return name, user
}
