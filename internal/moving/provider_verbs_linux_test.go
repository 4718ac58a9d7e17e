package moving

import (
	"testing"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Without descriptors it is not known whether a device serves a destination. A connection's stamp is
// recorded then, because a device might. For the same reason the connection does not move meanwhile.
func TestVerbsWithoutDescriptors(t *testing.T) {
	rdmalink.Simulated = map[string]string{"lo": "sim0"}
	t.Cleanup(func() { rdmalink.Simulated = nil })
	tcp, _, h, _ := stampedPair(t)
	testenv.WithoutDescriptors(t, func() {
		if !(verbsProvider{}).NeedsStamp(tcp, Settings{}) {
			t.Error("no stamp is noted")
		}
		if err := (verbsProvider{}).Move(t.Context(), h, Settings{}); reason.Of(err).Reason != session.ReasonResources {
			t.Error(err)
		}
	})
}
