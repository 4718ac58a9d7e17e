package san

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/test/hwsim"
)

var killRounds = flag.Int("kills", 12, "processes to kill per role and lane")

// leaveHolder starts a child that keeps all descriptors open, and returns its pid, or 0 if it has
// started none: over TCP or a queue pair the peer would then not notice the end of the process.
func (l lane) leaveHolder() int {
	if l.provider != "shm" || l.policy != Require {
		return 0
	}
	return holdDescriptors()
}

// killSize is the size of the writing role's Writes.
const killSize = 100_000

func roleWrite(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	fmt.Println("ready", l.leaveHolder())
	b := make([]byte, killSize)
	for total := 0; ; total += len(b) {
		position(b, total)
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
}

func roleRead(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	fmt.Println("ready", l.leaveHolder())
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 300_000))
	return err
}

func roleIdle(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(c, "last words"); err != nil {
		return err
	}
	fmt.Println("ready", l.leaveHolder())
	_, err = c.Read(make([]byte, 1))
	return err
}

// roleLeave returns from main without Close, as TCP allows, after it was accepted. (Over RDMA bytes in
// transit are lost then; before the accept that would also end the move of a connection to a listener
// with Require.)
func roleLeave(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return err
	}
	_, err = io.WriteString(c, "last words")
	return err
}

// roleDrop ends without Close after SetLinger(0), which makes that a reset.
func roleDrop(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	if err := c.(interface{ SetLinger(int) error }).SetLinger(0); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil { // it waits until it was accepted, as roleLeave does
		return err
	}
	_, err = io.WriteString(c, "last words")
	return err
}

// When a process is killed, at any moment, the other one gets the bytes that had arrived and then soon
// an error, and nothing is left behind.
func TestKilledProcess(t *testing.T) {
	rounds := *killRounds
	if testing.Short() {
		rounds = min(rounds, 3)
	}
	rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
	eachLane(t, func(t *testing.T, l lane) {
		for _, role := range []string{"write", "read", "idle"} {
			t.Run(role, func(t *testing.T) {
				ln := l.listen(t, l.here())
				killOne(t, ln, role, l, 0) // for what a first connection sets up permanently
				before := resources(t)
				if inGuest == hwsim.Lane {
					before.objects = math.MaxInt // the device's counts belong to the killed process, and nobody corrects them
				}
				for range rounds {
					killOne(t, ln, role, l, time.Duration(rnd.IntN(30_000))*time.Microsecond)
				}
				wantResources(t, before)
			})
		}
	})
}

func killOne(t *testing.T, ln net.Listener, role string, l lane, after time.Duration) {
	t.Helper()
	p := startRole(t, role, l, ln.Addr().String())
	c := mustAccept(t, ln)
	defer c.Close()
	l.carries(t, c)
	var holder int
	if _, err := fmt.Sscanf(p.line(t), "ready %d", &holder); err != nil {
		t.Fatal(err)
	}
	if holder != 0 {
		if h, err := os.FindProcess(holder); err == nil {
			defer h.Kill()
		}
	}
	killed := make(chan struct{})
	time.AfterFunc(after, func() {
		p.Process.Kill()
		close(killed)
	})
	c.SetDeadline(time.Now().Add(testTimeout))
	var err error
	switch role {
	case "read":
		b := make([]byte, 200_000)
		for err == nil {
			_, err = c.Write(b)
		}
	default:
		var n, total int
		for b := make([]byte, 150_000); err == nil; total += n {
			n, err = c.Read(b)
			if role == "write" {
				wantPositions(t, b[:n], total)
			}
		}
		switch {
		case l.provider == "verbs" && errors.Is(err, syscall.ECONNRESET): // bytes in transit are lost with the process
		case role == "idle" && total != len("last words"):
			t.Errorf("%d bytes of the last words arrived, then %v", total, err)
		case role == "write" && err == io.EOF && total%killSize != 0 && l.policy == Require: // TCP does not keep Writes together
			t.Errorf("EOF after %d bytes, in the middle of a Write", total)
		}
	}
	<-killed
	if err != io.EOF && !isPeerGone(err) {
		t.Errorf("error %v", err)
	}
	p.ended(t)
}

// When a program ends without Close, the peer gets what it wrote, and then EOF. Over RDMA the peer finds
// an error instead, because bytes are lost with the process.
func TestProcessThatLeavesWithoutClose(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		startRole(t, "leave", l, ln.Addr().String())
		c := mustAccept(t, ln)
		c.SetDeadline(time.Now().Add(testTimeout))
		c.Write([]byte("!"))
		got, err := io.ReadAll(c)
		if l.provider == "verbs" && errors.Is(err, syscall.ECONNRESET) && strings.HasPrefix("last words", string(got)) {
			return
		}
		if string(got) != "last words" || err != nil {
			t.Errorf("read %q, %v", got, err)
		}
	})
}

// After SetLinger(0), a process that ends without Close resets its connections, as over TCP.
func TestProcessThatEndsAfterSetLinger0(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		startRole(t, "drop", l, ln.Addr().String())
		c := mustAccept(t, ln)
		l.carries(t, c)
		c.SetDeadline(time.Now().Add(testTimeout))
		c.Write([]byte("!"))
		got, err := io.ReadAll(c)
		if !errors.Is(err, syscall.ECONNRESET) || !strings.HasPrefix("last words", string(got)) {
			t.Errorf("read %q, %v", got, err)
		}
	})
}
