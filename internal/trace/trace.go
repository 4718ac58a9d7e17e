// Package trace has the file of SAN_TRACE: lines about what connections do, of all processes
// that name it.
package trace

import (
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"
)

// Log takes lines, and writes them behind its callers' backs: they hold locks, and a file may
// block. Its methods are safe for concurrent use.
type Log struct {
	out io.Writer

	mu      sync.Mutex // guards what follows; nothing is written under it
	lines   []byte     // not written yet
	spare   []byte     // lines' next memory
	lost    int        // lines that found no room since the last that did
	failed  bool       // no more is written
	written chan struct{}
}

// mostWaiting bounds the bytes of lines that wait: a second's, of a connection that does
// nothing but send messages.
const mostWaiting = 16 << 20

// Open returns a log to a file, which is made if it is not there. The file has to be a regular
// one that belongs to the process's user, and neither a link nor linked elsewhere: whoever can
// write to its directory cannot have a server of another user write to a third one's.
func Open(path string) (*Log, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, err
	}
	return New(f), nil
}

// New returns a log to w, each of whose Writes gets whole lines.
func New(w io.Writer) *Log { return &Log{out: w} }

// Printf adds a line about a connection, behind the time, the process and the connection. It
// does not wait for the file.
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
		go l.write(l.written) // ends when all is written; Flush waits for it
	}
}

var pid = os.Getpid()

// write writes until nothing waits. What cannot be is reported once.
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

// Flush waits until all lines so far are written, for at most so long.
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
