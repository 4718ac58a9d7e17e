package shm

import (
	"fmt"
	"net"
)

// rendezvous is the abstract unix address of a TCP listener, which is named by
// its inode (see diag_linux.go). Abstract addresses, like TCP's ports, belong to
// the network namespace.
func rendezvous(inode uint32) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("@san-shm/%d/%08x", version, inode)}
}
