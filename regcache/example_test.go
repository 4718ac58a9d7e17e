package regcache_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"

	"github.com/sanconn/san/regcache"
)

// Buffers of an arena are always registered: a large Write from one needs neither a
// registration nor, over verbs, a copy.
func ExampleArena() {
	arena := regcache.NewArena(0, 0) // or DefaultArena, which the whole process shares
	defer arena.Close()

	buffer, err := arena.Get(4 << 20)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer buffer.Put()

	buffer.ReadFrom(strings.NewReader("from a file or a socket"))
	var conn strings.Builder // stands for a connection
	n, err := buffer.WriteTo(&conn)
	fmt.Println(n, err)
	// Output: 23 <nil>
}

// A reverse proxy reads each response into a buffer, and writes it from there. On shm the response's
// bytes are copied, whatever the buffer is. Over verbs they are not copied if both ends move large
// pieces. Each request has a buffer of the arena while its response is sent.
func ExampleBufferPool() {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "from the backend")
	}))
	defer backend.Close()
	target, err := url.Parse(backend.URL)
	if err != nil {
		log.Fatal(err)
	}
	front := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:    func(r *httputil.ProxyRequest) { r.SetURL(target) },
		BufferPool: regcache.DefaultArena().BufferPool(8 << 20),
		// Transport and the listener in front are those of package san
	})
	defer front.Close()

	answer, err := http.Get(front.URL)
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	io.Copy(os.Stdout, answer.Body)
	// Output: from the backend
}

// Memory that the program has mapped is copied, unless the program declares that it stays.
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
