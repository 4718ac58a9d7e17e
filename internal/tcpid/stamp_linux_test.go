package tcpid

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

func dialerStamp(t testing.TB, c *net.TCPConn) Stamp {
	t.Helper()
	s, err := DialerStamps(c, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return s[0]
}

func mustAcceptorStamp(t testing.TB, c *net.TCPConn) Stamp {
	t.Helper()
	s, err := acceptorStamp(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantProof fails unless the two ends of a connection prove to each other that they have it. As a stamp
// is wrong now and then on a machine whose clocks are held up (DialerStamps), it tries several
// connections. It returns the last one.
func wantProof(t testing.TB, pair func() (dialed, accepted *net.TCPConn)) (dialed, accepted *net.TCPConn) {
	t.Helper()
	var d, a Stamp
	for range 5 {
		dialed, accepted = pair()
		if d, a = dialerStamp(t, dialed), mustAcceptorStamp(t, accepted); proven(d, a) {
			return dialed, accepted
		}
	}
	t.Errorf("the dialer's stamp is %d, %d ms more than the acceptor's", d, int32(d-a))
	return dialed, accepted
}

// letTheClockGo waits until the clock of the stamps is later than at the connection's beginning by more
// than stampSlack.
func letTheClockGo(t testing.TB, c *net.TCPConn) {
	t.Helper()
	began, err := control(c, timestampClock)
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		now, err := control(c, timestampClock)
		if err == nil && now-began < 100 {
			err = fmt.Errorf("the clock has gone from %d to %d", began, now)
		}
		return err
	})
}

func TestBothEndsKnowTheStamp(t *testing.T) {
	for _, tt := range []struct{ listen, dial string }{
		{"127.0.0.1", "127.0.0.1"}, {"::1", "::1"}, {"::", "127.0.0.1"}, {"::", "::1"},
	} {
		l := listen(t, "tcp", net.JoinHostPort(tt.listen, "0"))
		if err := SaveSYN(l); err != nil {
			t.Fatal(err)
		}
		_, a := wantProof(t, func() (dialed, accepted *net.TCPConn) {
			return dial(t, net.JoinHostPort(tt.dial, fmt.Sprint(l.Addr().(*net.TCPAddr).Port))), accept(t, l)
		})
		if _, err := acceptorStamp(a); err != errNoSYN {
			t.Errorf("read again: %v", err)
		}
	}
}

// The second and third stamps, for clocks that are not reliable, are those of a dial whose first SYN was
// answered, and had left at once, or later.
func TestWhenADialBeganIsItsStamp(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	if err := SaveSYN(l); err != nil {
		t.Fatal(err)
	}
	for i, before := range []time.Duration{0, 2 * stampSlack * time.Millisecond} { // how long before the SYN the dial began
		var began time.Time
		var d, a *net.TCPConn
		testenv.Eventually(t, time.Minute, func() error { // a dial that is held up before its SYN has another stamp
			began = time.Now()
			d = dial(t, l.Addr().String())
			took := time.Since(began)
			if a = accept(t, l); took > stampSlack/2*time.Millisecond {
				return fmt.Errorf("the dial took %v", took)
			}
			return nil
		})
		letTheClockGo(t, d)
		s, err := DialerStamps(d, began.Add(-before))
		if err != nil {
			t.Fatal(err)
		}
		if is := mustAcceptorStamp(t, a); len(s) != 3 || !proven(s[1+i], is) || proven(s[2-i], is) {
			t.Errorf("%v before the SYN: %d; it is %d", before, s, is)
		}
	}
}

// The dialer's stamp does not depend on when it is read.
func TestDialerStampMayBeLate(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	if err := SaveSYN(l); err != nil {
		t.Fatal(err)
	}
	d, _ := wantProof(t, func() (dialed, accepted *net.TCPConn) {
		d, a := connect(t, l)
		a.Write(make([]byte, 10_000)) // a server that sends first
		letTheClockGo(t, d)
		return d, a
	})
	d.Write([]byte{1})
	if _, err := DialerStamps(d, time.Time{}); err != errTooLate {
		t.Errorf("when something was sent: %v", err)
	}
}

func TestStampsBetweenNamespaces(t *testing.T) {
	a, b := newNamespace(t), newNamespace(t)
	join(t, a, b)
	for _, to := range []string{"10.0.0.2:7000", "[fd00::2]:7000", "[fe80::2%7]:7000"} {
		var l *net.TCPListener
		b.do(t, func() {
			l = listen(t, "tcp", to)
			if err := SaveSYN(l); err != nil {
				t.Fatal(err)
			}
		})
		wantProof(t, func() (dialed, accepted *net.TCPConn) {
			a.do(t, func() { dialed = dial(t, to) })
			b.do(t, func() { accepted = accept(t, l) })
			return dialed, accepted
		})
	}
}

// The acceptor keeps the SYN that arrives, and the dialer's stamp is that of the same SYN.
func TestStampOfASYNThatIsSentAgain(t *testing.T) {
	for _, lost := range []string{
		"tcp flags & (syn|ack) == syn",       // the SYN is lost, so the second one is kept
		"tcp flags & (syn|ack) == (syn|ack)", // the reply is lost, so the first SYN is kept
	} {
		n := newNamespace(t)
		n.need(t, `
			nft add table inet n
			nft 'add chain inet n in { type filter hook input priority 0; }'`)
		var l *net.TCPListener
		n.do(t, func() {
			l = listen(t, "tcp", "127.0.0.1:0")
			if err := SaveSYN(l); err != nil {
				t.Fatal(err)
			}
		})
		wantProof(t, func() (dialed, accepted *net.TCPConn) {
			n.need(t, `
				nft flush chain inet n in
				nft 'add rule inet n in `+lost+` numgen inc mod 1000 0 drop'`)
			n.do(t, func() {
				began := time.Now()
				dialed, accepted = connect(t, l)
				if time.Since(began) < 500*time.Millisecond {
					t.Error("nothing was sent again")
				}
			})
			return dialed, accepted
		})
	}
}

func TestNoStamp(t *testing.T) {
	for _, tt := range []struct {
		sysctl           string
		dialer, acceptor error
	}{
		{"net.ipv4.tcp_timestamps=0", errNoTimestamps, errNoTimestamps},
		{"net.ipv4.tcp_timestamps=2", errNotRandom, nil},
		{"net.ipv4.tcp_syncookies=2", nil, errNoSYN}, // for every connection
	} {
		n := newNamespace(t)
		n.need(t, "sysctl -qw "+tt.sysctl)
		n.do(t, func() {
			l := listen(t, "tcp", "127.0.0.1:0")
			if err := SaveSYN(l); err != nil {
				t.Fatal(err)
			}
			d, a := connect(t, l)
			if s, err := DialerStamps(d, time.Time{}); err != tt.dialer {
				t.Errorf("%s: the dialer's is %d, %v", tt.sysctl, s, err)
			}
			if s, err := acceptorStamp(a); err != tt.acceptor {
				t.Errorf("%s: the acceptor's is %d, %v", tt.sysctl, s, err)
			}
		})
	}
	_, a := connect(t, listen(t, "tcp", "127.0.0.1:0"))
	if s, err := acceptorStamp(a); err != errNoSYN || !errors.Is(err, errNoStamp) {
		t.Errorf("without SaveSYN: %d, %v", s, err)
	}
}

func TestTimestampsOfMicroseconds(t *testing.T) {
	const usec = 1 << 4 // include/uapi/linux/rtnetlink.h: RTAX_FEATURE_TCP_USEC_TS, since Linux 6.7
	_, to, _ := net.ParseCIDR("10.7.0.0/16")
	n := newNamespace(t)
	n.do(t, func() {
		err := netlink.RouteAdd(&netlink.Route{
			LinkIndex: loopbackIndex, Dst: to, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL,
			Scope: netlink.SCOPE_HOST, Features: usec,
		})
		if err != nil {
			testenv.Missing(t, fmt.Sprintf("timestamps of microseconds: %v", err))
		}
		d, _ := connect(t, listen(t, "tcp", "10.7.0.1:0"))
		if s, err := DialerStamps(d, time.Time{}); err != errMicroseconds {
			t.Errorf("%d, %v", s, err)
		}
	})
}

// Which other connections have the same random number: see Stamp. It is only logged, because kernels
// differ.
func TestWhoseRandomNumberItIs(t *testing.T) {
	connectFrom := func(port int) Stamp {
		l := listen(t, "tcp", "127.0.0.1:7000")
		if err := SaveSYN(l); err != nil {
			t.Fatal(err)
		}
		dialWith(t, &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}}, l.Addr().String())
		defer l.Close()
		return mustAcceptorStamp(t, accept(t, l))
	}
	var first, otherPort, otherNamespace Stamp
	newNamespace(t).do(t, func() { first, otherPort = connectFrom(6000), connectFrom(6001) })
	newNamespace(t).do(t, func() { otherNamespace = connectFrom(6000) })
	const elapsed = Stamp(limit / time.Millisecond)
	t.Logf("the same for another port: %t; for the same ports in another network namespace: %t",
		otherPort-first < elapsed, otherNamespace-first < elapsed)
}

func mustHex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

func TestParseSYN(t *testing.T) {
	const (
		ip4     = "4500003c00004000400600007f0000017f000001"
		ip4opts = "4600004000004000400600007f0000017f00000101010101"
		ip6     = "6000000000280640" + "00000000000000000000000000000001" + "00000000000000000000000000000001"
		ip6hop  = "6000000000300040" + "00000000000000000000000000000001" + "00000000000000000000000000000001" + "0600010400000000"
		tcp     = "c350115c0000000000000000a002ffff00000000"
		options = "0204ffd7" + "0402" + "080a123456780000000001030307"
	)
	for _, tt := range []struct {
		name, packet string
		want         Stamp
		err          error
	}{
		{"IPv4", ip4 + tcp + options, 0x12345678, nil},
		{"IPv4 with options", ip4opts + tcp + options, 0x12345678, nil},
		{"IPv6", ip6 + tcp + options, 0x12345678, nil},
		{"IPv6 with an extension header", ip6hop + tcp + options, 0x12345678, nil},
		{"no timestamp", ip4 + tcp + "0204ffd7" + "0402" + "0101" + "0101010101010101" + "01030307", 0, errNoTimestamps},
		{"a timestamp behind the end", ip4 + tcp + "0204ffd7" + "0001" + "080a123456780000000001030307", 0, errNoTimestamps},
		{"an option of no length", ip4 + tcp + "0200" + options[4:], 0, errBadSYN},
		{"an option beyond the header", ip4 + tcp + "02ff" + options[4:], 0, errBadSYN},
		{"cut options", ip4 + tcp + options[:20], 0, errBadSYN},
		{"no TCP header", ip4, 0, errBadSYN},
		{"IPv6 with something else", "6000000000281140" + ip6[16:] + tcp + options, 0, errBadSYN},
		{"IPv6 with an extension header that is cut", ip6hop[:84], 0, errBadSYN},
		{"neither", "00" + ip4[2:] + tcp + options, 0, errBadSYN},
		{"nothing", "", 0, errBadSYN},
	} {
		if got, err := parseSYN(mustHex(tt.packet)); got != tt.want || err != tt.err {
			t.Errorf("%s: %#x, %v", tt.name, got, err)
		}
	}
}

func FuzzParseSYN(f *testing.F) {
	f.Add(mustHex("4500003c00004000400600007f0000017f000001" + "c350115c0000000000000000a002ffff00000000" + "0204ffd70402080a123456780000000001030307"))
	f.Add(mustHex("6000000000300040" + "00000000000000000000000000000001" + "00000000000000000000000000000001" + "0600010400000000"))
	f.Fuzz(func(t *testing.T, b []byte) { parseSYN(b) })
}

func BenchmarkDialerStamps(b *testing.B) {
	d, _ := connect(b, listen(b, "tcp", "127.0.0.1:0"))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DialerStamps(d, time.Time{}); err != nil {
			b.Fatal(err)
		}
	}
}

// The kernel returns the SYN only once. Later calls do the same without its 60 bytes.
func BenchmarkAcceptorStamp(b *testing.B) {
	_, a := connect(b, listen(b, "tcp", "127.0.0.1:0"))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := acceptorStamp(a); err != errNoSYN {
			b.Fatal(err)
		}
	}
}
