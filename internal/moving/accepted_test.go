package moving

import (
	"net/netip"
	"runtime"
	"testing"
	"weak"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
)

// A process that once had many connections does not keep the memory of the large table.
func TestTableGetsSmaller(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	ends := func(i int) tcpid.Ends {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		return tcpid.Ends{Local: netip.AddrPortFrom(a, 1), Remote: netip.AddrPortFrom(a, 2)}
	}
	const peak, few = 1 << 16, 100
	table := connTable{conns: make(map[tcpid.Ends]weak.Pointer[sanconn.Conn])}
	kept := weak.Make(new(sanconn.Conn))
	empty := heap()
	for i := range peak {
		table.add(ends(i), kept)
	}
	full := heap()
	for i := few; i < peak; i++ {
		table.remove(ends(i), kept)
	}
	if now := heap(); now-min(now, empty) > (full-empty)/4 {
		t.Errorf("%d bytes with %d connections, %d with %d behind that", full-empty, peak, now-empty, few)
	}
	for i := range few {
		if _, ok := table.conns[ends(i)]; !ok {
			t.Fatalf("connection %d is not there", i)
		}
	}
	runtime.KeepAlive(&table)
}

// A connection that is closed late does not remove the table's entry of a newer one with the same
// addresses.
func TestTableKeepsWhoHasCome(t *testing.T) {
	var ends tcpid.Ends
	table := connTable{conns: make(map[tcpid.Ends]weak.Pointer[sanconn.Conn])}
	first, second := new(sanconn.Conn), new(sanconn.Conn)
	table.add(ends, weak.Make(first))
	table.add(ends, weak.Make(second))
	if table.remove(ends, weak.Make(first)); table.at(ends) != second {
		t.Error("it is not there")
	}
	if table.remove(ends, weak.Make(second)); table.at(ends) != nil {
		t.Error("it is there behind its own end")
	}
	runtime.KeepAlive(first)
}
