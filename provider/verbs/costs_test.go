package verbs

import (
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

func init() { testenv.SlowCopies() }

// fastCopies is the time for 1 MiB on a host that copies faster than any line carries bytes.
const fastCopies = 10 * time.Microsecond

// A Write is offered if that takes no more time than copying it.
func TestOfferPays(t *testing.T) {
	for copying, from := range map[time.Duration]int{
		100 * time.Microsecond: 90_500,    // there an offer takes as long as the send buffer: 12 µs, and 1.8 on the line
		18 * time.Microsecond:  1_607_000, // 12 and 32 µs
		fastCopies:             6_284_000, // 12 and the 84 µs for which the Write polls
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
