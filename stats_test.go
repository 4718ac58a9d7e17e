package san

import (
	"sync"
	"testing"
)

func TestStatsIsASnapshot(t *testing.T) {
	var wg sync.WaitGroup
	l := plainListen(t, "127.0.0.1:0")
	before := Stats().Dialed["tcp"]
	for range 8 {
		wg.Go(func() {
			if c, err := (&Dialer{Policy: Never}).Dial("tcp", l.Addr().String()); err == nil {
				c.Close()
			}
			Stats().Dialed["tcp"]++ // changes only the returned copy
		})
	}
	wg.Wait()
	if n := Stats().Dialed["tcp"] - before; n != 8 {
		t.Errorf("%d connections counted, want 8", n)
	}
}
