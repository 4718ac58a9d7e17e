//go:build linux && cgo

package hwsim_test

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
)

// The normal form of a trace (docs/DEBUGGING.md) is what must be the same in each run. It has each end's
// own steps in their order and, of what comes from the peer, only that on which this end's steps depend.

// traceEnd is the trace of one end of a connection, without times, process ids and session numbers.
type traceEnd struct {
	lines    []string
	sessions int // how many sessions were for this connection
}

// traced returns the traces of both ends of the connection between two addresses.
func traced(trace, dialer, acceptor string) (d, a *traceEnd) {
	byNumber := make(map[string][]string)
	var numbers []string
	for line := range strings.Lines(trace) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(f) < 4 {
			continue // a line that is not completely written yet
		}
		if byNumber[f[2]] == nil {
			numbers = append(numbers, f[2])
		}
		byNumber[f[2]] = append(byNumber[f[2]], f[3])
	}
	find := func(local, remote string) *traceEnd {
		e := new(traceEnd)
		for _, n := range numbers {
			if slices.Contains(byNumber[n], "- carries "+local+" "+remote) {
				e.lines = byNumber[n]
				e.sessions++
			}
		}
		return e
	}
	return find(dialer, acceptor), find(acceptor, dialer)
}

// has reports whether a line begins with one of these words.
func (e *traceEnd) has(begins ...string) bool {
	return slices.ContainsFunc(e.lines, func(line string) bool {
		return slices.ContainsFunc(begins, func(b string) bool { return strings.HasPrefix(line, b) })
	})
}

// messages returns the messages of one direction.
func (e *traceEnd) messages(dir string) (ms []string) {
	for _, line := range e.lines {
		if m, ok := strings.CutPrefix(line, dir+" "); ok {
			ms = append(ms, m)
		}
	}
	return ms
}

// disagrees compares the messages that e has sent with those that the other end has received, and
// describes a difference. The last ones may be missing there, because an end closes once it has what it
// waits for.
func (e *traceEnd) disagrees(other *traceEnd) string {
	sent, got := e.messages(">"), other.messages("<")
	if len(got) <= len(sent) && slices.Equal(sent[:len(got)], got) {
		return ""
	}
	return cmp.Diff(sent, got)
}

var (
	// The credit depends on how many messages the sender has processed by then.
	credit = regexp.MustCompile(` credit=\d+`)
	// The keys depend on the device.
	key = regexp.MustCompile(`key=(0x[0-9a-f]+)`)

	inStream = regexp.MustCompile(`^> (Data|Fill) .*stream=(\d+)\+(\d+)$`)
	written  = regexp.MustCompile(`^- write id=\d+ bytes=(\d+) `)
	read     = regexp.MustCompile(`^- read id=(\d+) bytes=(\d+) at=(\d+) `)
)

// timely reports whether a line depends on timing. Credit and Emptied are flow control, and tell what
// was read by then. The end of a transfer is seen by whichever goroutine looks next. Of what comes from
// the peer, only that counts on which this end's next step depends.
func timely(line string) bool {
	f := strings.Fields(line)
	switch f[0] {
	case ">":
		return f[1] == "Credit" || f[1] == "Emptied"
	case "<":
		return !slices.Contains([]string{"Negotiate", "OfferRead", "ReadDone"}, f[1])
	}
	return f[1] == "carries" || f[1] == "over:" || len(f) > 2 && f[2] == "done"
}

// former builds a normal form, line by line.
type former struct {
	form []string
	size int64 // the size of each Write

	// The present run of stream bytes: by Data messages or by RDMA writes with their Fills, which follow
	// the Data messages that went before the inbox was there.
	stream struct {
		by       string // "": there is no run
		from, to int64
	}
	written int64 // bytes of RDMA writes for which there was no Fill yet
	// The present run of RDMA reads of one offer, and their bytes.
	reads struct {
		id   string // "": there is no run
		to   int64
		near bool // NearDone was sent during the run
	}
}

// normal returns the normal form of the trace of an end that has written, or read, in pieces of size
// bytes. It ends with CloseAck, or with the close that CloseAck allows: how the other end's endpoint
// ends afterwards depends on timing. The revocation of memory that was exposed for writing comes last,
// because a worker does that.
func (e *traceEnd) normal(size int) string {
	f := former{size: int64(size)}
	inbox := "no key"
	var last []string
	for _, line := range e.lines {
		line = credit.ReplaceAllString(line, "")
		switch {
		case timely(line):
			continue
		case strings.HasPrefix(line, "- expose ") && strings.Contains(line, " rights=write"):
			inbox = key.FindString(line)
		case strings.HasPrefix(line, "- revoke") && key.FindString(line) == inbox:
			last = append(last, line)
			continue
		}
		f.add(line)
	}
	f.flush()
	if i := slices.IndexFunc(f.form, func(l string) bool { return strings.HasPrefix(l, "> CloseAck") }); i >= 0 {
		f.form = f.form[:i+1]
	}
	return strings.Join(append(f.form, last...), "\n") + "\n"
}

func (f *former) add(line string) {
	switch {
	case inStream.MatchString(line):
		f.addStream(inStream.FindStringSubmatch(line))
	case written.MatchString(line):
		f.flushReads()
		f.written += number(written.FindStringSubmatch(line)[1])
	case read.MatchString(line):
		f.addRead(read.FindStringSubmatch(line))
	case strings.HasPrefix(line, "> NearDone") && f.reads.id != "":
		f.reads.near = true // how often depends on timing, but it comes before the last byte
	default:
		f.flush()
		f.form = append(f.form, line)
	}
}

func (f *former) addStream(m []string) {
	f.flushReads()
	s, from, n := &f.stream, number(m[2]), number(m[3])
	if s.by != "" && (from != s.to || from%f.size == 0 || s.by == "Fill" && m[1] == "Data") {
		f.flushStream()
	}
	if s.by == "" {
		s.from = from
	}
	s.by, s.to = m[1], from+n
	if m[1] == "Fill" && f.written != n {
		f.form = append(f.form, fmt.Sprintf("> Fill of %d bytes behind RDMA writes of %d", n, f.written))
	}
	f.written = 0
}

func (f *former) addRead(m []string) {
	f.flushStream()
	r, at := &f.reads, number(m[3])
	if r.id != m[1] || at != r.to {
		f.flushReads()
		r.to = 0
	}
	if r.id == "" && at != 0 {
		f.form = append(f.form, fmt.Sprintf("- read id=%s begins at %d", m[1], at))
	}
	r.id, r.to = m[1], at+number(m[2])
}

func (f *former) flush() {
	f.flushStream()
	f.flushReads()
}

func (f *former) flushStream() {
	s := &f.stream
	if s.by == "Fill" {
		f.form = append(f.form, "- write, by as many as it takes")
	}
	if s.by != "" {
		f.form = append(f.form, fmt.Sprintf("> %s stream=%d+%d", s.by, s.from, s.to-s.from))
	}
	f.stream = former{}.stream
}

func (f *former) flushReads() {
	if r := &f.reads; r.id != "" {
		f.form = append(f.form, fmt.Sprintf("- read id=%s bytes=%d, by as many as it takes", r.id, r.to))
		if r.near {
			f.form = append(f.form, "> NearDone, before the last byte")
		}
	}
	f.reads = former{}.reads
}

// number returns the number whose digits a pattern has found.
func number(digits string) int64 {
	n, _ := strconv.ParseInt(digits, 10, 64)
	return n
}

// named replaces keys by names, in the order in which they appear.
func named(form string) string {
	var keys []string
	return key.ReplaceAllStringFunc(form, func(k string) string {
		if !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
		return fmt.Sprintf("key=%d", 1+slices.Index(keys, k))
	})
}
