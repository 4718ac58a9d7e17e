// Package trace writes the file of SAN_TRACE: lines about connections, from all processes that have
// this file in their environment.
package trace

import (
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"
)

// Log collects lines, and writes them in the background, because its callers hold locks and a file may
// block. Its methods are safe for concurrent use.
type Log struct {
	out io.Writer

	mu      sync.Mutex // guards the fields below; not held during a write to out
	lines   []byte     // not yet written
	spare   []byte     // memory for the next lines
	lost    int        // lines dropped for lack of room since the last line that was kept
	failed  bool       // out has failed; nothing more is written
	written chan struct{}
}

// mostWaiting bounds the bytes of lines that wait: about one second's lines of a connection that only
// sends messages.
const mostWaiting = 16 << 20

// Open returns a log to a file, which is created if it does not exist. The file must be a regular file
// of this process's user, not a symbolic link, and have no other hard link. Otherwise whoever can write
// to its directory could make this process write to a file of another user.
func Open(path string) (*Log, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, err
	}
	return New(f), nil
}

// New returns a log to w. Each Write to w is of whole lines.
func New(w io.Writer) *Log { return &Log{out: w} }

// Printf adds a line about a connection, which begins with the time, the process and the connection's
// number. It does not wait for the file.
func (l *Log) Printf(conn uint64, format string, args ...any) {
	now := time.Now().UnixMicro()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.failed:
		return
	case len(l.lines) >= mostWaiting:
		l.lost++
		return
	case l.lost > 0:
		l.lines = fmt.Appendf(l.lines, "%d.%06d %d 0 - lost %d lines\n", now/1e6, now%1e6, pid, l.lost)
		l.lost = 0
	}
	l.lines = fmt.Appendf(l.lines, "%d.%06d %d %d ", now/1e6, now%1e6, pid, conn)
	l.lines = fmt.Appendf(l.lines, format, args...)
	l.lines = append(l.lines, '\n')
	if l.written == nil {
		l.written = make(chan struct{})
		go l.write(l.written) // ends when all lines are written; Flush waits for that
	}
}

var pid = os.Getpid()

// write writes until no line waits. It reports an error once.
func (l *Log) write(written chan<- struct{}) {
	defer close(written)
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.lines) > 0 {
		b := l.lines
		l.lines, l.spare = l.spare[:0], nil
		l.mu.Unlock()
		_, err := l.out.Write(b)
		if err != nil {
			log.Printf("san: the trace ends here, the connections go on: %v", err)
		}
		l.mu.Lock()
		if l.spare = b; err != nil {
			l.failed, l.lines, l.spare = true, nil, nil
		}
	}
	l.written = nil
}

// Flush waits until all lines added so far are written, at most for the time given.
func (l *Log) Flush(most time.Duration) {
	l.mu.Lock()
	written := l.written
	l.mu.Unlock()
	if written == nil {
		return
	}
	select {
	case <-written:
	case <-time.After(most):
	}
}
