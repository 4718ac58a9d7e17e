package san

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
)

const manyConns = 2000

// roleMany holds many connections, each of which echoes.
func roleMany(l lane) error {
	var wg sync.WaitGroup
	for range manyConns {
		c, err := l.dialRole()
		if err != nil {
			return err
		}
		wg.Go(func() { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
	}
	fmt.Println("ready")
	wg.Wait()
	return nil
}

// Many connections between two processes, first idle, then all in use.
func TestManyConnections(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		if l.provider == "verbs" {
			return // the guest's devices have room for only a few hundred queue pairs
		}
		ln := l.listen(t, l.here())
		p := startRole(t, "many", l, ln.Addr().String())
		before := resources(t)
		conns := make([]net.Conn, manyConns)
		for i := range conns {
			conns[i] = mustAccept(t, ln)
		}
		p.line(t)
		now := resources(t)
		t.Logf("%d connections: %d descriptors and %d goroutines more here", manyConns,
			now.descriptors-before.descriptors, now.goroutines-before.goroutines)
		if n := now.descriptors - before.descriptors; n > manyConns+100 {
			t.Errorf("%d descriptors more, and TCP has one for each", n)
		}
		if n := now.goroutines - before.goroutines; n > 100 {
			t.Errorf("%d goroutines more", n)
		}
		for i, c := range conns {
			send(t, c, c, fmt.Sprint("connection ", i))
		}
	})
}
