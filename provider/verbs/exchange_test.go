package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// Without rdma_cm, a listener of IPv4 only does not accept IPv6 for the exchange.
func TestExchangeIsOfItsFamilyAlone(t *testing.T) {
	cfg := Config{WithoutCM: true}.withDefaults()
	l := &Listener{cfg: cfg, addr: netip.AddrPortFrom(netip.IPv4Unspecified(), freePort())}
	ctx, cancel := context.WithCancel(t.Context())
	defer l.work.Wait()
	defer cancel()
	l.ctx = ctx
	if err := l.followExchange(); err != nil {
		t.Fatal(err)
	}
	side := cfg.iwarpPort(l.addr.Port())
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), side)))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	c, err = net.DialTCP("tcp6", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv6Loopback(), side)))
	if err == nil {
		c.Close()
		t.Error("it takes IPv6")
	}
}

// If there are only iWARP devices, neither end can do without rdma_cm, and the error tells that.
func TestWithoutCMOnIWARP(t *testing.T) {
	_, to := cable(t)
	cfg := Config{WithoutCM: true}
	l, err := listenAt(netip.AddrPortFrom(to, freePort()), cfg)
	if testenv.Device() != "siw" {
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		return
	}
	if err == nil {
		l.Close()
	}
	if reasonOf(err) != session.ReasonNotServed || !strings.Contains(fmt.Sprint(err), "siw2 is an iWARP device") {
		t.Errorf("a listener: %v", err)
	}
	port := freePort()
	other, err := net.Listen("tcp", netip.AddrPortFrom(to, cfg.withDefaults().iwarpPort(port)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	nothingLeft(t)
	if _, err := Dial(patient(t), netip.Addr{}, netip.AddrPortFrom(to, port), cfg); reasonOf(err) != session.ReasonNotServed ||
		!strings.Contains(fmt.Sprint(err), "siw1 is an iWARP device") {
		t.Errorf("a dial: %v", err)
	}
}

// A dialer is refused if its queue pair has another address than its TCP connection, because the allowed
// subnets apply to queue pairs. So is one with another version. Nothing is kept of either, not even its
// TCP connection.
func TestRequestsThatAreRefused(t *testing.T) {
	from, to := cable(t)
	if testenv.Device() == "siw" {
		return // iWARP cannot do without rdma_cm
	}
	nothingLeft(t)
	l := listen(t, Config{WithoutCM: true})
	for _, tt := range []struct {
		version uint16
		gid     string
		want    refusal
	}{
		{protocolVersion, "::ffff:192.0.2.7", refusedSubnet},
		{protocolVersion + 1, "::ffff:" + from.String(), refusedVersion},
	} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
		conn, err := d.Dial("tcp", netip.AddrPortFrom(to, l.cfg.iwarpPort(l.addr.Port())).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		c := connParams{privateData: privateData{Version: tt.version}, MTU: 3, Served: 1}
		c.Peer.QPNum = 17
		c.Peer.GID = netip.MustParseAddr(tt.gid).As16()
		if _, err := conn.Write(c.bytes()); err != nil {
			t.Fatal(err)
		}
		if theirs, err := readParams(conn); err != nil || theirs.Refusal != tt.want {
			t.Errorf("%+v, %v, want it refused as %v", theirs.privateData, err, tt.want)
		}
		if n, err := conn.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("behind the refusal: %d, %v", n, err)
		}
	}
}

// A peer that sends no MTU breaks the protocol, whichever end it is.
func TestExchangeWithoutMTU(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // see TestReadsThatThePeerServes
	}
	_, to := cable(t)
	nothingLeft(t)
	cfg := Config{WithoutCM: true}.withDefaults()
	for _, replies := range []bool{false, true} {
		port := freePort()
		l, err := net.Listen("tcp", netip.AddrPortFrom(to, cfg.iwarpPort(port)).String())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		accepted := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				_, err = acceptExchange(patient(t), noMTU{conn, replies}, port, cfg)
			}
			accepted <- err
		}()
		_, dialed := Dial(patient(t), netip.Addr{}, netip.AddrPortFrom(to, port), cfg)
		finds, other := <-accepted, dialed
		if replies {
			finds, other = other, finds
		}
		if reasonOf(finds) != session.ReasonProtocol || !strings.Contains(fmt.Sprint(finds), "MTU") {
			t.Errorf("in a reply: %v; who finds it: %v", replies, finds)
		}
		if other == nil {
			t.Errorf("in a reply: %v; the other end has a connection", replies)
		}
	}
}

// A queue pair has no more RDMA reads in progress than the peer serves at a time: more would end the
// connection.
func TestReadsThatThePeerServes(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // there both ends have addresses of their own, which the parameters would have to contain
	}
	_, to := cable(t)
	nothingLeft(t)
	cfg := Config{WithoutCM: true}.withDefaults()
	port := freePort()
	l, err := net.Listen("tcp", netip.AddrPortFrom(to, cfg.iwarpPort(port)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // a peer with the dialer's own parameters, except that it serves only one read
		conn, err := l.Accept()
		if err != nil {
			return
		}
		if theirs, err := readParams(conn); err == nil {
			theirs.Served = 1
			conn.Write(theirs.bytes())
		}
		conn.Read(make([]byte, 2)) // until the dialer hangs up
		conn.Close()
	}()
	e, err := Dial(patient(t), netip.Addr{}, netip.AddrPortFrom(to, port), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer e.discard()
	if a, err := e.q.qp.Query(ibv.MaskMaxReadAtomic); err != nil || a.MaxReadAtomic != 1 {
		t.Errorf("it issues %d reads at a time, want 1 (%v)", a.MaxReadAtomic, err)
	}
}

// A device that has failed, and may be back by now, is opened again for the next connection, although
// the program still has a connection from before.
func TestFailedDeviceIsOpenedAnew(t *testing.T) {
	if testenv.Device() == "siw" {
		return // iWARP cannot do without rdma_cm
	}
	nothingLeft(t)
	l := listen(t, Config{WithoutCM: true})
	a, b := pair(t, l, Config{WithoutCM: true})
	for _, e := range []*Endpoint{a, b} { // the ends may have one device or two
		e.dev.fail(deviceError(syscall.EIO))
		if err := e.Err(); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the connection of a device that has failed: %v", err)
		}
	}
	c, d := pair(t, l, Config{WithoutCM: true})
	if c.dev == a.dev || d.dev == b.dev {
		t.Error("a device that has failed is used again")
	}
}

// Decoding any parameters does not panic. Parameters that were decoded are encoded to the same bytes,
// with a PSN of 24 bits.
func FuzzConnParams(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := readParams(bytes.NewReader(b))
		if err != nil {
			if !errors.As(err, new(*session.Unavailable)) {
				t.Fatalf("the error is %v", err)
			}
			return
		}
		want := bytes.Clone(b[:paramsLen])
		want[19] = 0 // the unused byte of the PSN
		if again := c.bytes(); !bytes.Equal(again, want) {
			t.Fatalf("% x became % x", b, again)
		}
	})
}

// noMTU is the acceptor's connection of an exchange. It removes the MTU from the dialer's parameters or,
// with replies, from the acceptor's own.
type noMTU struct {
	net.Conn
	replies bool
}

func (c noMTU) Read(b []byte) (n int, err error) {
	if n, err = io.ReadFull(c.Conn, b); n == paramsLen && !c.replies {
		b[38] = 0
	}
	return n, err
}

func (c noMTU) Write(b []byte) (n int, err error) {
	if c.replies {
		b = slices.Clone(b)
		b[38] = 0
	}
	return c.Conn.Write(b)
}

// The encoding is that of the protocol: each field has its position.
func TestEncodingOfParams(t *testing.T) {
	c := connParams{
		privateData: privateData{Version: 0x0201, Refusal: 0x0403, Claim: Claim{Port: 0x0605, Proof: 0x0807}},
		Peer:        ibv.QPPeer{QPNum: 0x0c0b0a09, PSN: 0x000f0e0d, LID: 0x2221},
		MTU:         0x23, Served: 0x24,
	}
	for i := range c.Peer.GID {
		c.Peer.GID[i] = byte(0x11 + i)
	}
	want := []byte("SANv")
	for i := range paramsLen - len(want) {
		want = append(want, byte(i+1))
	}
	want[19], want[36], want[37], want[38], want[39] = 0, 0x21, 0x22, 0x23, 0x24
	if got := c.bytes(); !bytes.Equal(got, want) {
		t.Errorf("% x, want % x", got, want)
	}
	if p := c.privateData.bytes(); !bytes.Equal(p, want[:12]) {
		t.Errorf("% x, want % x", p, want[:12])
	}
	if theirs, err := readParams(bytes.NewReader(want)); err != nil || !bytes.Equal(theirs.bytes(), want) {
		t.Errorf("% x, %v", theirs.bytes(), err)
	}
}

// A peer that resets the connection during the exchange has gone. It must not be taken for a foreign
// program.
func TestResetInTheExchange(t *testing.T) {
	_, err := readParams(iotest.ErrReader(os.NewSyscallError("read", syscall.ECONNRESET)))
	var why *session.Unavailable
	if !errors.As(err, &why) || why.Reason != session.ReasonUnreachable {
		t.Errorf("%v", err)
	}
	if _, err = readParams(iotest.ErrReader(io.EOF)); !errors.As(err, &why) || why.Reason != session.ReasonProtocol {
		t.Errorf("%v", err)
	}
}
