package trace

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// patience bounds waits that should take no time.
const patience = time.Minute

// Lines of many goroutines are written whole, once each, with time, process and connection.
func TestLinesComeWhole(t *testing.T) {
	path := t.TempDir() + "/trace"
	const logs, each = 4, 200
	var wg sync.WaitGroup
	for i := range logs { // as if of so many processes
		l, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for n := range each {
				l.Printf(uint64(i), "> step %d", n)
			}
			l.Flush(patience)
		})
	}
	wg.Wait()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	next := make(map[string]int)
	form := regexp.MustCompile(fmt.Sprintf(`^\d+\.\d{6} %d (\d) > step (\d+)$`, os.Getpid()))
	for line := range strings.Lines(string(b)) {
		m := form.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil || m[2] != fmt.Sprint(next[m[1]]) {
			t.Fatalf("%q", line)
		}
		next[m[1]]++
	}
	if bytes.Count(b, []byte("\n")) != logs*each {
		t.Errorf("%d lines", bytes.Count(b, []byte("\n")))
	}
}

// writer stands for a file that blocks, and then fails.
type writer struct {
	calls   int
	blocked chan struct{}
	err     error
}

func (w *writer) Write(p []byte) (int, error) {
	w.calls++
	<-w.blocked
	return len(p), w.err
}

// captured returns what the log package writes during f.
func captured(f func()) string {
	var b bytes.Buffer
	log.SetOutput(&b)
	defer log.SetOutput(os.Stderr)
	f()
	return b.String()
}

// A file that blocks delays nothing; lines for which there is no room then are counted.
func TestFullLogLosesLines(t *testing.T) {
	w := &writer{blocked: make(chan struct{})}
	l := New(w)
	l.Printf(1, "first")
	testenv.Eventually(t, patience, func() error { // until the file has the line, and accepts no more with it
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.lines) > 0 {
			return errors.New("it waits")
		}
		return nil
	})
	long := strings.Repeat("x", 1<<20)
	for range mostWaiting>>20 + 8 {
		l.Printf(1, "%s", long)
	}
	l.mu.Lock()
	lost, waiting := l.lost, len(l.lines)
	l.mu.Unlock()
	if lost == 0 || waiting > mostWaiting+2<<20 {
		t.Errorf("%d lines lost, %d bytes wait", lost, waiting)
	}
	began := time.Now()
	l.Flush(time.Millisecond)
	if time.Since(began) > patience {
		t.Error("Flush has waited for a file that blocks")
	}
	close(w.blocked)
	l.Flush(patience)
	var b bytes.Buffer
	l.out = &b
	l.Printf(1, "next")
	l.Flush(patience)
	if want := fmt.Sprintf("- lost %d lines\n", lost); !strings.Contains(b.String(), want) {
		t.Errorf("%q lacks %q", b.String(), want)
	}
}

// A failure to write is reported once, and ends the trace.
func TestFailureIsSaidOnce(t *testing.T) {
	w := &writer{blocked: make(chan struct{}), err: errors.New("disk full")}
	close(w.blocked)
	l := New(w)
	said := captured(func() {
		for range 3 {
			l.Printf(1, "line")
			l.Flush(patience)
		}
	})
	if strings.Count(said, "disk full") != 1 || w.calls != 1 {
		t.Errorf("%d writes, and it says %q", w.calls, said)
	}
}
