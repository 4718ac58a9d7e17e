package verbs

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

func TestPrivateData(t *testing.T) {
	want := privateData{Magic: privateMagic, Version: 7, Refusal: refusedSubnet}
	// rdma_cm pads private data with zeros.
	if got, ours := parsePrivateData(append(want.bytes(), make([]byte, 44)...)); !ours || got != want {
		t.Errorf("%+v, %v; want %+v", got, ours, want)
	}
	for _, b := range [][]byte{nil, make([]byte, 56), want.bytes()[:len(want.bytes())-1]} {
		if _, ours := parsePrivateData(b); ours {
			t.Errorf("%x is taken for ours", b)
		}
	}
}

// Results of connecting are translated into the reason why there is no SAN.
func TestMeaningOfResults(t *testing.T) {
	private := func(r refusal, version uint16) ibv.ConnParam {
		return ibv.ConnParam{PrivateData: privateData{Version: version, Refusal: r}.bytes()}
	}
	refused := -int(syscall.ECONNREFUSED)
	reset := -int(syscall.ECONNRESET)
	for _, tt := range []struct {
		name string
		ev   ibv.Event
		want session.Reason
	}{
		{"other version", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedVersion, protocolVersion+1)}, session.ReasonVersion},
		{"no resources", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedResources, protocolVersion)}, session.ReasonResources},
		{"not from here", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedSubnet, protocolVersion)}, session.ReasonPermission},
		{"a foreign program", ibv.Event{Type: ibv.Rejected, Status: 28}, session.ReasonProtocol},
		{"a foreign program, iWARP", ibv.Event{Type: ibv.Rejected, Status: reset}, session.ReasonProtocol},
		{"nobody, RoCE", ibv.Event{Type: ibv.Rejected, Status: rejectNoListener}, session.ReasonNoListener},
		{"nobody, iWARP", ibv.Event{Type: ibv.Rejected, Status: refused}, session.ReasonNoListener},
		{"no resources of the kernel's", ibv.Event{Type: ibv.Rejected, Status: rejectNoResources}, session.ReasonResources},
		{"a path that is not allowed", ibv.Event{Type: ibv.Rejected, Status: 14}, session.ReasonUnreachable},
		{"given up there", ibv.Event{Type: ibv.Rejected, Status: rejectTimeout}, session.ReasonTimeout},
		{"silence", ibv.Event{Type: ibv.Unreachable, Status: -int(syscall.ETIMEDOUT)}, session.ReasonTimeout},
		{"no neighbour", ibv.Event{Type: ibv.AddrError, Status: -int(syscall.EHOSTUNREACH)}, session.ReasonUnreachable},
		{"no path", ibv.Event{Type: ibv.RouteError, Status: -int(syscall.ETIMEDOUT)}, session.ReasonUnreachable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := eventError(tt.ev)
			if got := reasonOf(err); got != tt.want {
				t.Errorf("%v (%v), want %v", got, err, tt.want)
			}
			if errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%v is about TCP's port", err)
			}
		})
	}
	if err := eventError(ibv.Event{Type: ibv.Rejected, Status: 14}); !strings.Contains(err.Error(), "invalid primary service level") {
		t.Errorf("the reason is not in words: %v", err)
	}
	// An ECONNREFUSED of the call itself (siw) does not mean that TCP's port refuses.
	if err := callError(&ibv.Error{Verb: "rdma_connect", Errno: syscall.ECONNREFUSED}); reasonOf(err) != session.ReasonNoListener || errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v", err)
	}
}

// The reasons with which a listener refuses are translated into the dialer's.
func TestMeaningOfRefusals(t *testing.T) {
	for refusal, want := range map[refusal]session.Reason{
		1:                session.ReasonProtocol,
		refusedVersion:   session.ReasonProtocol, // the version is the same
		refusedResources: session.ReasonResources,
		refusedSubnet:    session.ReasonPermission,
		refusedClosed:    session.ReasonNoListener,
		refusedAddress:   session.ReasonUnreachable,
		refusedDevice:    session.ReasonUnreachable,
		refusedUnknown:   session.ReasonNoListener,
		refusedOther:     session.ReasonOwner,
		77:               session.ReasonProtocol,
	} {
		h, ok := parsePrivateData(privateData{Version: protocolVersion, Refusal: refusal}.bytes())
		err := h.err()
		if !ok || reasonOf(err) != want || errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("refusal %d: %v", refusal, err)
		}
	}
	for _, tt := range []struct {
		err  error
		want refusal
	}{
		{fmt.Errorf("a device: %w", syscall.EINVAL), refusedDevice},
		{errors.New("unheard of"), refusedDevice},
		{fmt.Errorf("control buffers: %w", syscall.ENOMEM), refusedResources},
		{fmt.Errorf("an arena: %w", syscall.ENOBUFS), refusedResources},
		{errNoneServed, refusedAddress},
		{unavailable(session.ReasonUnreachable, fmt.Errorf("no GID: %w", syscall.EINVAL)), refusedAddress},
		{unavailable(session.ReasonResources, fmt.Errorf("being closed: %w", syscall.EBUSY)), refusedResources},
	} {
		if got := refusalFor(tt.err); got != tt.want {
			t.Errorf("for %q it refuses with %d, want %d", tt.err, got, tt.want)
		}
	}
	if h, _ := parsePrivateData(privateData{Version: protocolVersion + 1}.bytes()); reasonOf(h.err()) != session.ReasonVersion {
		t.Errorf("another version: %v", h.err())
	}
}

// The error that ended a connection names its queue pair and the device's own code.
func TestMeaningOfCompletions(t *testing.T) {
	for status, want := range map[ibv.Status]syscall.Errno{
		ibv.RetryExcErr: syscall.ETIMEDOUT,
		ibv.LocProtErr:  syscall.ECONNRESET,
	} {
		err := statusError(&ibv.WC{Status: status, QPNum: 4711, VendorErr: 0x81})
		if !errors.Is(err, want) || !errors.Is(err, status) {
			t.Errorf("%v is not %v", err, want)
		}
		for _, part := range []string{"4711", "0x81", status.String()} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v lacks %s", err, part)
			}
		}
	}
}
