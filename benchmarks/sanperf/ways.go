package main

import (
	"fmt"
	"io"
	"net"

	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/sanconn"
)

// ways tell how the bytes went that one or more processes sent by package san, from the beginning of a
// measurement to its end, and what that cost.
type ways struct {
	OwnMemory uint64 `json:"own_memory_bytes"` // by RDMA straight from the program's memory
	Box       uint64 `json:"box_bytes"`        // copied once to registered memory, by RDMA from there
	Messages  uint64 `json:"message_bytes"`    // in messages, or through a ring
	TCP       uint64 `json:"tcp_bytes"`

	Registrations uint64 `json:"registrations"` // of memory that bytes come from or go to
	Hits          uint64 `json:"hits"`          // uses of memory that was registered already
	Unregistered  uint64 `json:"unregistered"`  // large Writes and Reads that were copied because memory could not be registered
	Windows       uint64 `json:"windows"`       // times that a memory window was bound
	Sleeps        uint64 `json:"sleeps"`        // times that a Read or Write slept
}

// waysSoFar returns the ways of connections, some of which package san has made, and of the process.
func waysSoFar(conns []net.Conn) (w ways) {
	for _, c := range conns {
		c, ok := c.(*sanconn.Conn)
		if !ok {
			continue
		}
		st := c.Stats()
		w.OwnMemory += st.DirectBytesSent
		w.Box += st.OfferedBytesSent - st.DirectBytesSent
		w.TCP += st.TCPBytesSent
		w.Messages += st.BytesSent - st.TCPBytesSent - st.OfferedBytesSent
		w.Sleeps += st.Sleeps
		w.Unregistered += st.Unregistered
	}
	cached := regcache.DefaultBudget().Stats()
	w.Registrations, w.Hits, w.Windows = cached.Registrations, cached.Hits, verbs.WindowsBound()
	return w
}

// each calls f with each of the figures.
func (w *ways) each(other *ways, f func(own *uint64, other uint64)) {
	theirs := other.figures()
	for i, own := range w.figures() {
		f(own, *theirs[i])
	}
}

func (w *ways) figures() []*uint64 {
	return []*uint64{&w.OwnMemory, &w.Box, &w.Messages, &w.TCP, &w.Registrations, &w.Hits, &w.Unregistered, &w.Windows, &w.Sleeps}
}

func (w *ways) add(other ways) { w.each(&other, func(own *uint64, n uint64) { *own += n }) }

// since is what has been added to an earlier value.
func (w ways) since(earlier ways) ways {
	w.each(&earlier, func(own *uint64, n uint64) { *own -= n })
	return w
}

// carried reports whether package san carried any bytes.
func (w ways) carried() bool { return w.sum() > 0 }

func (w ways) sum() uint64 { return w.OwnMemory + w.Box + w.Messages + w.TCP }

// cells returns the figures of a line: the parts of the bytes, and how often the rest happened.
func (w ways) cells() []string {
	all := max(float64(w.sum()), 1)
	var list []string
	for i, n := range w.figures() {
		if i < len(waysOfBytes) {
			list = append(list, fmt.Sprintf("%.1f %%", 100*float64(*n)/all))
		} else {
			list = append(list, whole(*n))
		}
	}
	return list
}

// whole formats a counter, without decimals if it is small.
func whole(n uint64) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return count(float64(n))
}

// The names of the cells.
var (
	waysOfBytes = []string{"own memory", "box", "messages", "TCP"}
	waysTook    = []string{"registrations", "hits", "unregistered", "windows", "sleeps"}
)

// print writes one line.
func (w ways) print(out io.Writer) {
	cells := w.cells()
	fmt.Fprint(out, "how bytes went:")
	for i, name := range append(waysOfBytes, waysTook...) {
		if i > 0 {
			fmt.Fprint(out, ",")
		}
		fmt.Fprintf(out, " %s %s", name, cells[i])
	}
	fmt.Fprintln(out)
}
