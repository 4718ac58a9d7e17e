package san

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
)

// isListening reports whether fd is a listener's socket.
func isListening(fd uintptr) (bool, error) {
	v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, err
}

// isAccepted reports whether a process of this host has the other end of a connection.
func isAccepted(t testing.TB, c net.Conn) bool {
	t.Helper()
	peer, err := tcpid.Peer(newconn.HandleOf(c).TCP())
	if err != nil {
		t.Fatal(err)
	}
	return peer.Accepted
}
