package verbs

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// When the budget for buffers is used up, at whichever end, the dialer gets
// a reason, which package san counts; and when connections have gone there is
// room again.
func TestBudgetUsedUp(t *testing.T) {
	for _, tt := range []struct {
		name string
		room int64
	}{
		{"nothing", 16 << 10},
		{"half a connection", restBytes / 2},
		{"one and a half", restBytes + restBytes/2},
	} {
		for _, which := range []string{"dialer", "listener", "dialer without rdma_cm", "listener without rdma_cm"} {
			which, withoutCM := strings.CutSuffix(which, " without rdma_cm")
			if withoutCM && testenv.Device() == "siw" {
				continue // iWARP has no such way
			}
			t.Run(fmt.Sprintf("%s, %s, without rdma_cm %v", tt.name, which, withoutCM), func(t *testing.T) {
				nothingLeft(t)
				ofDialer, ofListener := Config{WithoutCM: withoutCM}, Config{WithoutCM: withoutCM}
				arena := regcache.NewArena(16<<10, tt.room)
				if which == "dialer" {
					ofDialer.control = arena
				} else {
					ofListener.control = arena
				}
				l := listen(t, ofListener)
				refused := func() {
					t.Helper()
					e, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], ofDialer)
					if reasonOf(err) != session.ReasonResources {
						t.Errorf("%v, want %v", err, session.ReasonResources)
					}
					if err == nil {
						e.discard()
					}
				}
				for range 2 {
					if tt.room > restBytes {
						a, b, err := connect(l, ofDialer)
						if err != nil {
							t.Fatal(err)
						}
						refused()
						a.discard()
						b.discard()
					} else {
						refused()
					}
				}
				l.Close() // waits for what it was refusing
				if _, used := arena.Bytes(); used != 0 {
					t.Errorf("%d bytes are in use", used)
				}
			})
		}
	}
}
