package san

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/sanconn"
)

// Processes whose operator has set SAN_TRACE leave lines of what they did. Where no line can be
// written, they say so once, and nothing else is different.
func TestTraceOfAProcess(t *testing.T) {
	run := func(path string) string {
		child := exec.Command(os.Args[0], "-test.run=^TestListenerRequireTakesWhatHasMoved$", "-test.timeout=2m")
		child.Env = append(os.Environ(), envTrace+"="+path)
		out, err := child.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return string(out)
	}
	path := t.TempDir() + "/trace"
	if out := run(path); strings.Contains(out, "no trace") {
		t.Error(out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{" - begins provider=fake ", " > Negotiate ", " - carries 127.0.0.1:", " > Data ", " < Data ", "stream=0+"} {
		if !bytes.Contains(b, []byte(want)) {
			t.Errorf("no %q in\n%s", want, b)
		}
	}
	if out := run(t.TempDir()); strings.Count(out, "san: no trace, as SAN_TRACE says: ") != 1 {
		t.Error(out)
	}
}

// Dump and Debug name a connection that has moved, with its session.
func TestDumpHasWhatHasMoved(t *testing.T) {
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	mustAccept(t, l)
	wantMoved(t, c, "shm")
	var dump bytes.Buffer
	if err := Dump(&dump); err != nil {
		t.Fatal(err)
	}
	debug := c.(interface{ Debug() string }).Debug()
	name := c.LocalAddr().String() + " " + c.RemoteAddr().String() + " by shm\n"
	if !strings.HasPrefix(dump.String(), "moves: 0 under way, 0 wait") || !strings.Contains(dump.String(), name) || !strings.HasPrefix(debug, name) {
		t.Errorf("no %q in\n%s\nor\n%s", name, dump.String(), debug)
	}
	for _, want := range []string{"  state   SAN; read by the SAN from byte 0 on; written by the SAN", "\nsession ", "  read    idle", "  endpoint slot "} {
		if !strings.Contains(debug, want) {
			t.Errorf("no %q in\n%s", want, debug)
		}
	}
}

// Debug tells both directions apart: how far each came by TCP, where it moved, which has ended,
// and which deadline is whose.
func TestDebugTellsDirectionsApart(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{Policy: Prefer}, "tcp", "127.0.0.1:0")
	c := mustDial(t, &Dialer{Policy: Prefer}, l.Addr().String())
	s := mustAccept(t, l)
	for piece := strings.Repeat("x", 16<<10); InfoOf(c).Provider != "shm"; {
		send(t, c, s, piece)
	}
	send(t, c, s, "moved")
	send(t, s, c, "moved")
	n := c.(*sanconn.Conn).Stats().TCPBytesSent
	if err := c.(*sanconn.Conn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{c, s} {
		c.SetDeadline(time.Time{})
	}
	c.SetReadDeadline(time.Now().Add(time.Hour))
	s.SetWriteDeadline(time.Now().Add(time.Hour))
	for _, tt := range []struct {
		c     net.Conn
		has   []string
		lacks string
	}{
		{c, []string{fmt.Sprintf("  tcp     0 bytes read, %d written\n", n), "  read deadline in ",
			fmt.Sprintf("read by the SAN from byte 0 on; written by the SAN from byte %d on, shut\n", n)}, "write deadline"},
		{s, []string{fmt.Sprintf("  tcp     %d bytes read, 0 written\n", n), "  write deadline in ",
			fmt.Sprintf("read by the SAN from byte %d on; written by the SAN from byte 0 on\n", n)}, "read deadline"},
	} {
		debug := tt.c.(*sanconn.Conn).Debug()
		for _, want := range tt.has {
			if !strings.Contains(debug, want) {
				t.Errorf("no %q in\n%s", want, debug)
			}
		}
		if strings.Contains(debug, tt.lacks) {
			t.Errorf("a %s in\n%s", tt.lacks, debug)
		}
	}
	c.Close()
	if debug := c.(*sanconn.Conn).Debug(); !strings.Contains(debug, "  closed  by the program\n") {
		t.Error(debug)
	}
}
