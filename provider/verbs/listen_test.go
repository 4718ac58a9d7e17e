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

// What a listener refuses, and why, reaches the dialer.
func TestRefusals(t *testing.T) {
	t.Run("too many at a time", func(t *testing.T) {
		l := listen(t, Config{})
		fill(l)
		refusedForRoom(t, l, Config{})
	})
	for _, withoutCM := range []bool{false, true} {
		if withoutCM && testenv.Device() == "siw" {
			continue // iWARP has no such way
		}
		t.Run(fmt.Sprintf("subnet, without rdma_cm %v", withoutCM), func(t *testing.T) {
			l := listen(t, Config{WithoutCM: withoutCM, Subnets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
			if _, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{WithoutCM: withoutCM}); reasonOf(err) != session.ReasonPermission {
				t.Errorf("%v, want %v", err, session.ReasonPermission)
			}
		})
	}
}

// A listener on :: that takes no IPv4 takes none over RDMA either.
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

// fill has a listener believe that it makes as many connections as it may.
func fill(l *listener) {
	for range mostMaking {
		l.making <- struct{}{}
	}
}

// refusedForRoom expects a full listener to refuse, and to go on once it has a place.
func refusedForRoom(t *testing.T, l *listener, cfg Config) {
	t.Helper()
	if _, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], cfg); reasonOf(err) != session.ReasonResources {
		t.Errorf("%v, want %v", err, session.ReasonResources)
	}
	<-l.making
	meetAt(t, l, l.addrs()[0], cfg)
}

// Who asks for a connection and does not go on to make it keeps its place until its time is up
// at most, and leaves nothing.
func TestHalfOpenRequests(t *testing.T) {
	cable(t)
	if testenv.Device() == "siw" {
		return // asking takes a queue pair, and the listener's end is established with it
	}
	nothingLeft(t)
	l := listen(t, Config{})
	request(t, l, 1000) // whose answer is never taken, so that librdmacm does not go on
	expectGivenUp(t, l, 1)
}

// expectGivenUp waits until a listener has given up so many connections that their dialers do not
// make.
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

// A device that goes and comes back is listened on again, on its own address as
// well as on all of them. A software device is not gone, and cannot come back, before
// the processes that have it open have ended: here it is the event that comes alone. So it is where an
// address has gone over to another device (a bond's).
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

// One whose device has gone does not list it any more, and ends.
func TestListenerWithoutItsDevice(t *testing.T) {
	_, rdma, at := ownCable(t)
	l, err := listenAt(netip.AddrPortFrom(at, freePort()), Config{})
	if err != nil {
		t.Fatal(err)
	}
	del := exec.Command("rdma", "link", "delete", rdma[:len(rdma)-1]+"2") // the listener's end
	if err := del.Start(); err != nil {                                   // it ends with this process
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

// A connect request that is taken while its channel's last id goes is not adopted: the
// channel is about to be destroyed, and there may be another.
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

// Nothing is made for a request that is not admitted: a listener without any room refuses others
// for that. Admit hears the ends that the TCP connection would have, and the dialer's proof.
func TestAdmit(t *testing.T) {
	for _, withoutCM := range []bool{false, true} {
		if withoutCM && testenv.Device() == "siw" {
			continue // iWARP has no such way
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
