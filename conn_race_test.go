package san

import (
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/sanconn/san/sanconn"
)

// Both ends of a connection may be in one process, as in each test with an httptest server. A variable
// that is set before bytes, or the end of the stream, are sent may be read once these have come. The
// race detector knows that rule for TCP's sockets, and has to know it for these connections. This test
// can fail only under -race.
func TestVariablesAreHandedOverWithTheBytes(t *testing.T) {
	b := []byte("x")
	read := func(c *sanconn.Conn) { c.Read(make([]byte, 1)) }
	atEnd := func(c *sanconn.Conn) { io.ReadAll(c) }
	for name, form := range map[string]struct{ send, get func(*sanconn.Conn) }{
		"Write":        {func(c *sanconn.Conn) { c.Write(b) }, read},
		"WriteBuffers": {func(c *sanconn.Conn) { c.WriteBuffers(&net.Buffers{b}) }, read},
		"ReadFrom":     {func(c *sanconn.Conn) { c.ReadFrom(&io.LimitedReader{R: zeros{}, N: 1}) }, read},
		"Commit":       {func(c *sanconn.Conn) { c.Reserve(1); c.Commit(1) }, read},
		"Peek":         {func(c *sanconn.Conn) { c.Write(b) }, func(c *sanconn.Conn) { c.Peek(); c.Discard(1) }},
		"CloseWrite":   {func(c *sanconn.Conn) { c.CloseWrite() }, atEnd},
		"Close":        {func(c *sanconn.Conn) { c.Close() }, atEnd},
		"WriteUrgent": {func(c *sanconn.Conn) { c.WriteUrgent(b) }, func(c *sanconn.Conn) {
			<-c.Urgent()
			c.ReadUrgent(make([]byte, 1))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			eachLane(t, func(t *testing.T, l lane) {
				if l.policy == Never { // net's own connections do not have these methods
					return
				}
				if l.policy != Require && !slices.Contains([]string{"Write", "ReadFrom", "Commit", "Peek"}, name) {
					return // on TCP these are writev and shutdown, which the race detector does not know
				}
				client, server := l.sanPipe(t)
				server.SetDeadline(time.Now().Add(testTimeout))
				handed := 0
				go func() {
					handed = 1
					form.send(client)
				}()
				form.get(server)
				if handed != 1 {
					t.Error("the bytes came before the variable")
				}
			})
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
