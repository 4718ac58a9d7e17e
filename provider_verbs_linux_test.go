package san

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/verbs"
)

// shell runs a script in the guest.
func shell(t testing.TB, script string) {
	t.Helper()
	if out, err := exec.Command("bash", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, script, out)
	}
}

// iwarpPort returns the port that belongs to a TCP port on an iWARP device.
func iwarpPort(t testing.TB, address string) string {
	t.Helper()
	port, err := strconv.Atoi(portOf(address))
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(1024 + (port-1024+10000)%(1<<16-1024)) // verbs.Config.IWARPOffset
}

// Dialer.RDMA and ListenConfig.RDMA take effect: the ends connect only if the settings agree.
func TestRDMASettings(t *testing.T) {
	testenv.NeedDevice(t)
	set := RDMA{WithoutCM: true}
	if inGuest == "siw" { // siw cannot do without rdma_cm, and its ports are TCP's
		set = RDMA{IWARPOffset: 12000}
	}
	l := systemLanes[0]
	ln := mustListen(t, &ListenConfig{Policy: Require, Options: l.options, RDMA: set}, "tcp", l.here())
	d := l.dialer()
	d.RDMA = set
	c := mustDial(t, d, ln.Addr().String())
	wantProvider(t, c, l.provider)
	send(t, c, mustAccept(t, ln), "settled")

	if _, err := l.dialer().Dial("tcp", ln.Addr().String()); reasonOf(err) != ReasonNoListener {
		t.Errorf("a dialer with other settings: %v", err)
	}
	set.IWARPOffset = -1
	if l, err := (&ListenConfig{Policy: Require, Providers: []string{verbs.Name}, RDMA: set}).Listen(t.Context(), "tcp", l.here()); err == nil {
		l.Close()
		t.Error("a listener without a port to connect by")
	} else if reasonOf(err) != ReasonNotServed {
		t.Errorf("a listener without a port to connect by: %v", err)
	}
}

// Connections between link-local addresses of IPv6 use the interfaces of their zones. (On the simulated
// device: test/hwsim.)
func TestRDMALinkLocal(t *testing.T) {
	testenv.NeedDevice(t)
	ends, known := map[string][2]string{"rxe": {"ve1", "ve2"}, "siw": {"wi1", "wi2"}}[inGuest]
	if !known {
		return
	}
	l := systemLanes[0]
	l.pipe(t) // the first use of the libraries takes long in the guest
	host := linkLocal(t, ends[1])
	ln := l.listen(t, net.JoinHostPort(host+"%"+ends[1], "0"))
	c := mustDial(t, l.dialer(), net.JoinHostPort(host+"%"+ends[0], portOf(ln.Addr().String())))
	wantProvider(t, c, l.provider)
	send(t, c, mustAccept(t, ln), "by link-local addresses")
}

// fallbackLane is a lane for tests in which a move to RDMA fails.
func fallbackLane(t *testing.T) lane {
	t.Helper()
	testenv.NeedDevice(t)
	// On iWARP, TCP's retries decide how long an abandoned rdma_connect takes.
	shell(t, "sysctl -qw net.ipv4.tcp_syn_retries=2")
	l := systemLanes[0]
	l.pipe(t) // the first use of the libraries takes long in the guest
	return l
}

// wantRDMAFallback dials twice. With Require the dial fails with the reason; without it the connection
// works, and has the reason. The attempts leave nothing behind.
func wantRDMAFallback(t *testing.T, address string, why Reason) {
	t.Helper()
	d := atOnce()
	d.Providers, d.Policy = []string{verbs.Name}, Require
	if why == ReasonTimeout {
		// With a timeout of one second, the first dial in a busy guest did not reach the device. So it
		// was the second dial that left the descriptor which librdmacm keeps of a device.
		d.Options.AttemptTimeout = 5 * time.Second
	}
	began := time.Now()
	_, err := d.Dial("tcp", address)
	if got := reasonOf(err); got != why {
		t.Errorf("with Require the reason is %v: %v", got, err)
	}
	if took := time.Since(began); took > testTimeout { // without a bound it would be a minute or more
		t.Errorf("it took %v", took)
	}
	before := resources(t) // librdmacm keeps the devices open that it has used once
	d.Policy = Prefer
	c, err := d.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	wantStays(t, c, why)
	c.Close()
	wantResources(t, before)
}

// A firewall drops RDMA's packets, and no others.
func TestRDMADroppedByAFirewall(t *testing.T) {
	l := fallbackLane(t)
	ln := mustListen(t, &ListenConfig{Providers: []string{verbs.Name}}, "tcp", l.here())
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(io.Discard, c) // a connection that is closed at once would not move
			}()
		}
	}()
	address := ln.Addr().String()
	shell(t, "nft add table inet san; nft add chain inet san in '{ type filter hook input priority 0; }'")
	fall := sync.OnceFunc(func() { shell(t, "nft delete table inet san") })
	defer fall()
	shell(t, "nft add rule inet san in udp dport 4791 drop; nft add rule inet san in tcp dport "+iwarpPort(t, address)+" drop")
	wantRDMAFallback(t, address, ReasonTimeout)
	fall()
	wantProvider(t, mustDial(t, l.dialer(), address), l.provider)
}

func TestRDMAMissingAtTheOtherEnd(t *testing.T) {
	fallbackLane(t)
	shell(t, `ip netns add plain
		ip link add va1 mtu 9000 type veth peer name va2 mtu 9000 netns plain
		ip addr add 10.8.9.1/24 dev va1
		ip link set va1 up
		ip -n plain addr add 10.8.9.2/24 dev va2
		ip -n plain link set va2 up
		ip -n plain link set lo up
		rdma link add rva1 type `+inGuest+` netdev va1`)
	p := startRole(t, "plain", plainTCP, "10.8.9.2:0", "ip", "netns", "exec", "plain")
	why := ReasonTimeout
	if inGuest == "siw" { // on siw it is a port of TCP's, which is refused
		why = ReasonNoListener
	}
	wantRDMAFallback(t, p.line(t), why)
}

func TestRDMAWithoutAListener(t *testing.T) {
	l := fallbackLane(t)
	plain := plainListen(t, l.here())
	wantRDMAFallback(t, plain.Addr().String(), ReasonNoListener)
}

// Nobody listens, neither over RDMA nor on TCP.
func TestRDMARefusedAsTCPIs(t *testing.T) {
	l := fallbackLane(t)
	before := resources(t)
	plain, err := net.Listen("tcp", l.here())
	if err != nil {
		t.Fatal(err)
	}
	plain.Close()
	_, err = new(Dialer).Dial("tcp", plain.Addr().String())
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	wantResources(t, before)
}
