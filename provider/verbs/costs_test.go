package verbs

import (
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

func init() { testenv.SlowCopies() }

// fastCopies is what 1 MiB takes on a host that copies faster than any line takes bytes.
const fastCopies = 10 * time.Microsecond

// A Write is offered where that takes no more time than to copy it.
func TestOfferPays(t *testing.T) {
	for copying, from := range map[time.Duration]int{
		100 * time.Microsecond: 90_500,    // 12 µs, and 1.8 of the line, are the way by the send buffer
		18 * time.Microsecond:  1_607_000, // … and 32
		fastCopies:             6_284_000, // … and the 84 for which the Write polls
	} {
		d := new(costs)
		d.copying.Store(int64(copying))
		if d.offerPays(from * 9 / 10) {
			t.Errorf("where 1 MiB is copied in %v, less than %d bytes are offered", copying, from)
		}
		if !d.offerPays(from * 11 / 10) {
			t.Errorf("where 1 MiB is copied in %v, more than %d bytes are not offered", copying, from)
		}
	}
	if d := new(costs); !d.offerPays(1) {
		t.Error("nothing is offered as long as nothing is known")
	}
}
