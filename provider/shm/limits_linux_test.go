package shm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

func wantReason(t *testing.T, err error, reason session.Reason) {
	t.Helper()
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != reason {
		t.Errorf("got %v, want %v", err, reason)
	}
}

func TestLimitsFollowTheRlimits(t *testing.T) {
	const none = math.MaxUint64 // RLIM_INFINITY
	most := limitsFor(none, none)
	for _, c := range []struct {
		files, space             uint64
		connections, descriptors int64
		addresses                int64
	}{
		{none, none, mostConnections, mostDescriptors, most.addressSpace},
		{1 << 20, 1 << 62, 1 << 20, mostDescriptors, most.addressSpace},
		{256, none, 256, 128, most.addressSpace},
		{256, 1 << 30, 256, 128, 1 << 29},
		{0, 0, 0, 0, 0},
	} {
		want := limits{c.connections, c.descriptors, c.addresses, mostMappings}
		if got := limitsFor(c.files, c.space); got != want {
			t.Errorf("RLIMIT_NOFILE %d, RLIMIT_AS %d: %+v, want %+v", c.files, c.space, got, want)
		}
	}
	if most.addressSpace < 4*halfSize(firstSlots) {
		t.Errorf("one user has no room for a link: %d bytes for all", most.addressSpace)
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil || startLimits.connections != int64(min(files.Cur, mostConnections)) {
		t.Errorf("%+v with RLIMIT_NOFILE %d, %v", startLimits, files.Cur, err)
	}
}

// One user gets half of the connections, however many links and descriptors it has. The rest is for
// others, and connections that are closed are free for everybody.
func TestConnectionsAreBoundedByUser(t *testing.T) {
	leaks(t)
	const share = firstSlots / 2
	limits := startLimits
	limits.connections = 2 * share
	withLimits(t, limits)
	l := listen(t, Config{})
	var all [2 * share]session.Endpoint
	for i := range share {
		all[2*i], all[2*i+1] = meet(t, l)
	}
	_, err := dial(l.at, Config{})
	wantReason(t, err, session.ReasonResources)
	_, err = dial(l.at, Config{ringMax: minRingMax}) // over another link
	wantReason(t, err, session.ReasonResources)
	other := quota.Holder(os.Geteuid() + 1)
	if held.connections.Used() != share || !held.connections.Take(other, share/2) {
		t.Errorf("it holds %d, and others get nothing", held.connections.Used())
	}
	held.connections.Return(other, share/2)
	end(all[0])
	end(all[1])
	all[0], all[1] = meet(t, l)
	for _, ep := range all {
		end(ep)
	}
}

// Rings are charged to their reader's user, except to this process's own user, who may stop the process
// anyway. In a directory that user's number is charged as well, as it may belong to another container.
func TestWhomRingsAreChargedTo(t *testing.T) {
	own, other := uint32(os.Geteuid()), uint32(os.Geteuid()+1)
	for _, tt := range []struct {
		uid  uint32
		dir  string
		want quota.Holder
	}{{own, "", quota.Own}, {other, "", quota.Holder(other)}, {own, "/a", quota.Holder(own)}} {
		l := link{peer: peerProcess{uid: tt.uid}, peerUser: accountOf(tt.uid), cfg: Config{Dir: tt.dir}}
		if got := l.ringUser(); got != tt.want {
			t.Errorf("user %d, directory %q: charged to %d, want %d", tt.uid, tt.dir, got, tt.want)
		}
	}
}

// A link's descriptors are also charged to the peer's user at the dialing end, if the peer may be
// another user's, because then the peer decides how long the link stays. In a directory that may be so.
func TestLinksToDialCountAsDescriptors(t *testing.T) {
	leaks(t)
	limits := startLimits
	limits.descriptors = 8 * linkDescriptors
	withLimits(t, limits)
	inDirectory := int64(2 * linkDescriptors)
	if mayWatch(t) {
		inDirectory += 2 // the halves, which are final
	}
	for dir, want := range map[string]int64{"": linkDescriptors, t.TempDir(): inDirectory} { // with one for the accepting end, here as well
		l := listen(t, Config{Dir: dir})
		a, err := dial(l.at, Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		defer end(a)
		counted := func(want int64) { // waits until the descriptors that were passed have been closed
			t.Helper()
			testenv.Eventually(t, patience, func() error {
				if n := held.descriptors.Used(); n != want {
					return fmt.Errorf("directory %q: %d descriptors count, want %d", dir, n, want)
				}
				return nil
			})
		}
		counted(want)
		end(a)
		b, err := l.accept()
		if err != nil {
			t.Fatal(err)
		}
		end(b)
		counted(0)
		rest := held.descriptors.Limit() - linkDescriptors
		held.descriptors.Take(quota.Own, rest) // then one user gets half a link
		_, err = Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{Dir: dir, timeout: patience})
		held.descriptors.Return(quota.Own, rest)
		if dir == "" {
			wantReason(t, err, session.ReasonResources) // from the accepting end
		} else if !errors.Is(err, errNoDescriptors) {
			t.Errorf("beyond what it may: %v", err)
		}
	}
}
