package sockdiag

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// All listening sockets are reported, with their names and users, and nothing else.
func TestUnixListeners(t *testing.T) {
	prefix := fmt.Sprintf("\x00sockdiag-%d-", os.Getpid())
	path := filepath.Join(t.TempDir(), "s")
	var want []string
	for _, name := range []string{
		prefix, prefix + "a", prefix + "\x00\x00", prefix + "a\x00b", prefix + "@", prefix + "\xff\xfe",
		prefix + strings.Repeat("x", 107-len(prefix)), // the longest that x/sys binds
		path,
	} {
		for _, kind := range []int{unix.SOCK_SEQPACKET, unix.SOCK_STREAM} {
			if name == path && kind == unix.SOCK_STREAM {
				continue
			}
			fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
				t.Fatalf("%q: %v", name, err)
			}
			if kind == unix.SOCK_STREAM { // such a socket does not listen
				continue
			}
			if err := unix.Listen(fd, 1); err != nil {
				t.Fatal(err)
			}
			want = append(want, name)
		}
	}
	var got []string
	if err := UnixListeners(t.Context(), func(name []byte, user int64) {
		s := strings.TrimSuffix(string(name), "\x00") // a path ends with one
		if strings.HasPrefix(string(name), prefix) {
			s = string(name)
		}
		if strings.HasPrefix(s, prefix) || s == path {
			got = append(got, s)
			if user != int64(os.Geteuid()) {
				t.Errorf("%q is user %d's", s, user)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}

// All sockets are reported even if they do not fit into one reply of the kernel. The end of the context
// ends the query.
func TestManyUnixListeners(t *testing.T) {
	const many = 1000
	prefix := fmt.Sprintf("\x00sockdiag-many-%d-", os.Getpid())
	for i := range many {
		l, err := net.Listen("unixpacket", fmt.Sprintf("@%s%d", prefix[1:], i))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	got := map[string]bool{}
	all := func(name []byte, _ int64) {
		if strings.HasPrefix(string(name), prefix) {
			got[string(name)] = true
		}
	}
	if err := UnixListeners(t.Context(), all); err != nil || len(got) != many {
		t.Errorf("%d of %d, %v", len(got), many, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	seen := 0
	err := UnixListeners(ctx, func([]byte, int64) {
		if seen++; seen == 10 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || seen != 10 {
		t.Errorf("after the context's end: %d of them, %v", seen, err)
	}
}

// message returns a netlink message, whose size field may be wrong.
func message(size uint32, kind uint16, seq uint32, data string) []byte {
	b := make([]byte, unix.SizeofNlMsghdr)
	ne.PutUint32(b[0:], size)
	ne.PutUint16(b[4:], kind)
	ne.PutUint32(b[8:], seq)
	return append(b, data...)
}

func TestAnswers(t *testing.T) {
	const socket = unix.SOCK_DIAG_BY_FAMILY
	join := func(m ...[]byte) []byte { return slices.Concat(m...) }
	done := message(20, unix.NLMSG_DONE, 7, "\x00\x00\x00\x00")
	refused := message(20, unix.NLMSG_ERROR, 7, string(ne.AppendUint32(nil, ^uint32(unix.ENOENT)+1)))
	for _, tt := range []struct {
		name    string
		answers [][]byte
		want    []string
		err     error // nil: none; ErrUnsupported: any
	}{
		{"one", [][]byte{message(20, socket, 7, "abcd"), done}, []string{"abcd"}, nil},
		{"two at once", [][]byte{join(message(20, socket, 7, "abcd"), message(20, socket, 7, "efgh"), done)}, []string{"abcd", "efgh"}, nil},
		{"what an earlier request has left", [][]byte{message(20, socket, 6, "abcd"), message(20, unix.NLMSG_ERROR, 6, "abcd"), done}, nil, nil},
		{"none", [][]byte{refused}, nil, unix.ENOENT},
		{"no more", [][]byte{join(message(20, socket, 7, "abcd"), refused, message(20, socket, 7, "efgh"))}, []string{"abcd"}, unix.ENOENT},
		{"no end", [][]byte{message(20, socket, 7, "abcd")}, []string{"abcd"}, unix.EAGAIN},
		{"of another kind", [][]byte{message(20, 99, 7, "abcd")}, nil, errors.ErrUnsupported},
		{"an error that is cut", [][]byte{message(18, unix.NLMSG_ERROR, 7, "ab\x00\x00")}, nil, errors.ErrUnsupported},
		{"longer than it is", [][]byte{message(24, socket, 7, "abcd")}, nil, errors.ErrUnsupported},
		{"of no size", [][]byte{message(0, socket, 7, "abcd")}, nil, errors.ErrUnsupported},
		{"of all sizes", [][]byte{message(1<<32-1, socket, 7, "abcd")}, nil, errors.ErrUnsupported},
		{"cut in its header", [][]byte{message(20, socket, 7, "abcd")[:10]}, nil, unix.EAGAIN},
	} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range tt.answers {
			if _, err := unix.Write(fds[1], a); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		err = nil
		for m, e := range Ask(fds[0], 0, 7, []byte{unix.AF_UNIX}, make([]byte, 100)) {
			if err = e; e == nil {
				got = append(got, string(m))
			}
		}
		unix.Close(fds[0])
		unix.Close(fds[1])
		if !slices.Equal(got, tt.want) || (err == nil) != (tt.err == nil) || tt.err != nil && tt.err != errors.ErrUnsupported && err != tt.err {
			t.Errorf("%s: %q, %v", tt.name, got, err)
		}
	}
}

// attr returns an attribute, whose size field may be wrong.
func attr(size, kind uint16, value string) string {
	return string(ne.AppendUint16(ne.AppendUint16(nil, size), kind)) + value
}

var uid513 = string(ne.AppendUint32(nil, 513))

func TestParseUnix(t *testing.T) {
	head := strings.Repeat("h", 16)
	for _, tt := range []struct {
		m, name string
		user    int64
	}{
		{head + attr(7, 0, "\x00ab\x00") + attr(8, 7, uid513), "\x00ab", 513},
		{head + attr(7, 0, "\x00ab\x00"), "\x00ab", -1}, // as before Linux 5.3
		{head + attr(6, 7, "ab"), "", -1},
		{head + attr(0, 0, "") + attr(8, 7, uid513), "", 513},
		{head, "", -1},
		{"", "", -1},
	} {
		if name, user := parseUnix([]byte(tt.m)); string(name) != tt.name || user != tt.user {
			t.Errorf("%q: %q, %d", tt.m, name, user)
		}
	}
}

func FuzzParseUnix(f *testing.F) {
	head := strings.Repeat("h", 16)
	f.Add([]byte(head + attr(7, 0, "\x00ab\x00") + attr(8, 7, uid513)))
	f.Add([]byte(head + attr(0, 0, "abcd")))
	f.Add([]byte(head + attr(65535, 7, "abcd")))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if name, user := parseUnix(b); len(name) > len(b) || user < -1 || user > 1<<32-1 {
			t.Errorf("%q, %d", name, user)
		}
	})
}
