package san

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// envShut makes the unread role call CloseWrite.
const envShut = "SAN_TEST_SHUT"

func init() { roles["unread"] = roleUnread }

// roleUnread writes, reads a given number of bytes, and does nothing more.
func roleUnread(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(c, "last words"); err != nil {
		return err
	}
	take, err := strconv.Atoi(os.Getenv(envBytes))
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, take)); err != nil {
		return err
	}
	if os.Getenv(envShut) != "" {
		if err := c.(halfCloser).CloseWrite(); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	select {}
}

type halfCloser interface{ CloseWrite() error }

// unreadCase is what happens to a process before it ends.
type unreadCase struct {
	name   string
	writes []int // sizes of Writes to the process that ends
	shut   bool  // and then the writer calls CloseWrite
	take   int   // bytes that the process reads
	shuts  bool  // and then it calls CloseWrite
	want   error // what the peer finds; nil: EOF
}

// A process that ends with bytes unread resets the connection, after the peer has got what it has
// written. One that has read everything ends it in order.
func TestProcessThatEndsWithBytesUnread(t *testing.T) {
	for _, tt := range []unreadCase{
		{"nothing written", nil, false, 0, false, nil},
		{"all read", []int{100}, false, 100, false, nil},
		{"all read, several", []int{1, 100, 9000, 3}, false, 9104, false, nil},
		{"nothing read", []int{100}, false, 0, false, syscall.ECONNRESET},
		{"one Write read", []int{100, 100}, false, 100, false, syscall.ECONNRESET},
		{"a part of a Write read", []int{100}, false, 99, false, syscall.ECONNRESET},
		{"all read, CloseWrite", []int{100}, true, 100, false, nil},
		{"a part read, CloseWrite", []int{100}, true, 99, false, syscall.ECONNRESET},
		{"all read, its CloseWrite", []int{100}, false, 100, true, nil},
		{"a part read, its CloseWrite", []int{100}, false, 99, true, nil},
		{"a part read, CloseWrite of both", []int{100}, true, 99, true, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(envBytes, fmt.Sprint(tt.take))
			if tt.shuts {
				t.Setenv(envShut, "1")
			}
			eachLane(t, func(t *testing.T, l lane) {
				t.Run("killed", func(t *testing.T) { tt.run(t, l, func(p *process) { p.Process.Kill() }) })
				t.Run("exits", func(t *testing.T) { tt.run(t, l, func(p *process) { p.stdin.Close() }) })
			})
		})
	}
}

func (tt unreadCase) run(t *testing.T, l lane, end func(*process)) {
	ln := l.listen(t, l.here())
	p := startRole(t, "unread", l, ln.Addr().String())
	c := mustAccept(t, ln)
	l.carries(t, c)
	c.SetDeadline(time.Now().Add(testTimeout))
	for _, n := range tt.writes {
		if _, err := c.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	if tt.shut {
		if err := c.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	p.line(t)
	end(p)
	got, err := io.ReadAll(c)
	if l.provider == "verbs" { // bytes are lost with the process, and so may be its CloseWrite
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read %q, %v", got, err)
		}
		return
	}
	if string(got) != "last words" || !errors.Is(err, tt.want) {
		t.Errorf("read %q, %v; want %v", got, err, tt.want)
	}
	if tt.want != nil && !tt.shut {
		if _, err := c.Write([]byte("a")); !isPeerGone(err) {
			t.Errorf("a Write then fails with %v", err)
		}
	}
}
