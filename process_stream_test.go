package san

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"
	"time"
)

var streamBytes = flag.Int64("stream", 256<<20, "bytes each way of the stream between two processes")

func roleStream(l lane) error {
	c, err := l.dialRole()
	if err != nil {
		return err
	}
	defer disturb()()
	total, err := strconv.ParseInt(os.Getenv(envBytes), 10, 64)
	if err != nil {
		return err
	}
	e := streamEnd{conn: c, seed: 2}
	t := new(failures)
	e.both(t, total)
	if err := t.err(); err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(e.sum()), hex.EncodeToString(e.gotSum()), e.got)
	return c.Close()
}

// disturb runs the garbage collector and the scavenger until stop is called.
func disturb() (stop func()) {
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		var keep [16][]byte
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
				keep[i%len(keep)] = make([]byte, 1<<20)
				debug.FreeOSMemory()
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

// failures takes the place of a testing.TB in a process that runs no test.
type failures struct {
	testing.TB
	mu   sync.Mutex
	errs []error
}

func (f *failures) Helper() {}

func (f *failures) Error(args ...any) { f.Errorf("%s", fmt.Sprint(args...)) }

func (f *failures) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}

func (f *failures) err() error { return errors.Join(f.errs...) }

func TestTwoProcessesStream(t *testing.T) {
	total := *streamBytes
	if testing.Short() {
		total = min(total, 16<<20)
	}
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		t.Setenv(envBytes, fmt.Sprint(total))
		p := startRole(t, "stream", l, ln.Addr().String())
		c := mustAccept(t, ln)
		l.carries(t, c)
		defer disturb()()
		e := streamEnd{conn: c, seed: 1}
		e.both(t, total)
		var sent, got string
		var n int64
		if _, err := fmt.Sscan(p.line(t), &sent, &got, &n); err != nil {
			t.Fatal(err)
		}
		if want := hex.EncodeToString(e.sum()); got != want || n != total {
			t.Errorf("sent %d bytes, %d arrived, checksums equal: %v", total, n, got == want)
		}
		if mine := hex.EncodeToString(e.gotSum()); mine != sent || e.got != total {
			t.Errorf("received %d of %d bytes, checksums equal: %v", e.got, total, mine == sent)
		}
	})
}
