package regcache_test

import (
	"fmt"
	"strings"

	"github.com/sanconn/san/regcache"
)

// Buffers of an arena are always registered: a large Write from one needs neither a
// registration nor, over verbs, a copy.
func ExampleArena() {
	arena := regcache.NewArena(0, 0) // or DefaultArena, which all of the process share
	defer arena.Close()

	buffer, err := arena.Get(4 << 20)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer buffer.Put()

	buffer.ReadFrom(strings.NewReader("from a file or a socket"))
	var conn strings.Builder // a connection
	n, err := buffer.WriteTo(&conn)
	fmt.Println(n, err)
	// Output: 23 <nil>
}

// Memory that the program has mapped is copied, unless its owner answers for
// it.
func ExampleDeclare() {
	mapped := make([]byte, 1<<20) // by mmap, say

	stable, err := regcache.Declare(mapped)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(regcache.KindOf(mapped))

	// Before it is unmapped:
	fmt.Println(stable.Withdraw())
	// Output:
	// declared
	// <nil>
}
