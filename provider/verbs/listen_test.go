package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// If a listener refuses, the dialer gets the reason.
func TestRefusals(t *testing.T) {
	t.Run("too many at a time", func(t *testing.T) {
		l := listen(t, Config{})
		fill(l)
		refusedForRoom(t, l, Config{})
	})
	for _, withoutCM := range []bool{false, true} {
		if withoutCM && testenv.Device() == "siw" {
			continue // iWARP cannot do without rdma_cm
		}
		t.Run(fmt.Sprintf("subnet, without rdma_cm %v", withoutCM), func(t *testing.T) {
			l := listen(t, Config{WithoutCM: withoutCM, Subnets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
			if _, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{WithoutCM: withoutCM}); reasonOf(err) != session.ReasonPermission {
				t.Errorf("%v, want %v", err, session.ReasonPermission)
			}
		})
	}
}

// A listener on :: that does not accept IPv4 does not accept it over RDMA either.
func TestListenerOfIPv6Alone(t *testing.T) {
	cable(t)
	for _, alone := range []bool{true, false} {
		l, err := listenAt(netip.AddrPortFrom(netip.IPv6Unspecified(), freePort()), Config{V6Only: alone})
		if err != nil {
			t.Fatal(err)
		}
		var v4 []netip.AddrPort
		for _, a := range l.addrs() {
			if a.Addr().Is4() {
				v4 = append(v4, a)
			}
		}
		if alone != (len(v4) == 0) {
			t.Errorf("IPv6 alone: %v; it listens on %v", alone, v4)
		}
		l.Close()
	}
}

// fill makes a listener count as many connections in the making as it may have.
func fill(l *listener) {
	for range mostMaking {
		l.making <- struct{}{}
	}
}

// refusedForRoom expects a full listener to refuse, and to accept again once it has a place.
func refusedForRoom(t *testing.T, l *listener, cfg Config) {
	t.Helper()
	if _, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], cfg); reasonOf(err) != session.ReasonResources {
		t.Errorf("%v, want %v", err, session.ReasonResources)
	}
	<-l.making
	meetAt(t, l, l.addrs()[0], cfg)
}

// A peer that requests a connection, and does not complete it, keeps its place until a timeout at most,
// and leaves nothing behind.
func TestHalfOpenRequests(t *testing.T) {
	cable(t)
	if testenv.Device() == "siw" {
		return // there a request needs a queue pair, and establishes the listener's end at once
	}
	nothingLeft(t)
	l := listen(t, Config{})
	request(t, l, 1000) // the answer is never read, so librdmacm does not go on
	expectGivenUp(t, l, 1)
}

// expectGivenUp waits until a listener has given up n connections that their dialers do not complete.
func expectGivenUp(t *testing.T, l *listener, n int) {
	t.Helper()
	making := func(n int) {
		t.Helper()
		testenv.Eventually(t, patience, func() error {
			if have := len(l.making); have != n {
				return fmt.Errorf("%d connections are being made, want %d", have, n)
			}
			return nil
		})
	}
	making(n)
	began := time.Now()
	making(0)
	if took := time.Since(began); took > 3*acceptTime {
		t.Errorf("it took %v", took)
	}
	if len(l.came) != 0 {
		t.Error("it is handed out")
	}
}

// A listener listens again on a device that was removed and has come back, both on its own address and
// on all. A software device is not really gone, and cannot come back, before the processes that have it
// open have ended: so here there is only the event. The same holds if an address has moved to another
// device (as with a bond).
func TestListenerOutlivesItsDevice(t *testing.T) {
	at := cableOfAll(t)
	for _, where := range []netip.Addr{at, netip.IPv4Unspecified()} {
		addr := netip.AddrPortFrom(at, freePort())
		l, err := listenAt(netip.AddrPortFrom(where, addr.Port()), Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for _, event := range []ibv.EventType{ibv.DeviceRemoval, ibv.DeviceRemoval, ibv.AddrChange} {
			l.mu.Lock()
			x := l.ids[at]
			l.mu.Unlock()
			if x == nil {
				t.Fatalf("listening on %v: %v is not listened on", where, at)
			}
			x.event(ibv.Event{Type: event, ID: x.id})
			testenv.Eventually(t, patience, func() error {
				l.mu.Lock()
				defer l.mu.Unlock()
				if y := l.ids[at]; y == nil || y == x {
					return fmt.Errorf("it does not listen again, behind the event %v", event)
				}
				return nil
			})
			a, err := Dial(patient(t), netip.Addr{}, addr, Config{})
			if err != nil {
				t.Fatalf("listening on %v: %v", where, err)
			}
			b, err := accept(l)
			if err != nil {
				t.Fatal(err)
			}
			a.discard()
			b.discard()
		}
	}
}

// A listener whose device has gone no longer lists it, and can be closed.
func TestListenerWithoutItsDevice(t *testing.T) {
	_, rdma, at := ownCable(t)
	l, err := listenAt(netip.AddrPortFrom(at, freePort()), Config{})
	if err != nil {
		t.Fatal(err)
	}
	del := exec.Command("rdma", "link", "delete", rdma[:len(rdma)-1]+"2") // the device of the listener's end
	if err := del.Start(); err != nil {                                   // the command returns when this process has closed the device
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		if len(l.addrs()) != 0 {
			return fmt.Errorf("it still lists %v", l.addrs())
		}
		return nil
	})
	ended := make(chan struct{})
	go func() {
		l.Close()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
}

// A connect request may arrive while the last id of its channel is closed. It is not taken over, because
// the channel is about to be destroyed, and there may be a new one.
func TestRequestOfAnEndingChannel(t *testing.T) {
	ending, fresh := new(ibv.EventChannel), new(ibv.EventChannel)
	for _, h := range []*cmHub{{}, {users: 1, channel: fresh}} {
		users := h.users
		if l := h.adopt(new(ibv.ID), ending); l != nil || h.users != users {
			t.Errorf("adopted, with %d users", users)
		}
	}
	if h := (&cmHub{users: 1, channel: fresh}); h.adopt(new(ibv.ID), fresh) == nil || h.users != 2 {
		t.Error("not adopted")
	}
}

// Nothing is made for a request that Admit refuses: a listener without any room refuses others for lack
// of room. Admit gets the two addresses of the TCP connection, and the dialer's proof.
func TestAdmit(t *testing.T) {
	for _, withoutCM := range []bool{false, true} {
		if withoutCM && testenv.Device() == "siw" {
			continue // iWARP cannot do without rdma_cm
		}
		for _, want := range []error{nil, ErrUnknown, ErrOther} {
			t.Run(fmt.Sprintf("without rdma_cm %v, %v", withoutCM, want), func(t *testing.T) {
				nothingLeft(t)
				type request struct {
					local, remote netip.AddrPort
					proof         uint16
				}
				asked := make(chan request, 1)
				l := listen(t, Config{
					WithoutCM: withoutCM, control: regcache.NewArena(16<<10, 16<<10),
					Admit: func(local, remote netip.AddrPort, proof uint16) error {
						asked <- request{local, remote, proof}
						return want
					},
				})
				at := l.addrs()[0]
				_, err := Dial(patient(t), netip.Addr{}, at, Config{WithoutCM: withoutCM, Claim: Claim{Port: 4711, Proof: 0xbeef}})
				if want == nil {
					if reasonOf(err) != session.ReasonResources {
						t.Errorf("%v, want %v", err, session.ReasonResources)
					}
				} else if !errors.Is(err, want) {
					t.Errorf("%v, want %v", err, want)
				}
				select {
				case got := <-asked:
					if got.local != at || got.remote.Port() != 4711 || !got.remote.Addr().IsValid() || got.proof != 0xbeef {
						t.Errorf("asked about %v at %v", got, at)
					}
				default:
					t.Error("not asked")
				}
			})
		}
	}
}
