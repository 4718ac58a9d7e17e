package shm

import (
	"encoding/binary"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sockname is getsockname(2) of a TCP socket, the zero address if it is of another family.
// The socket may be a peer's, locked for as long as that likes, and the Getsockname of other
// packages does not tell the runtime that it may block: the whole process would stop.
func sockname(fd int) (netip.AddrPort, error) {
	var sa unix.RawSockaddrAny
	size := uint32(unix.SizeofSockaddrAny)
	_, _, errno := unix.Syscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", errno)
	}
	var addr netip.Addr
	var port *uint16 // in network order
	switch sa.Addr.Family {
	case unix.AF_INET:
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(&sa))
		addr, port = netip.AddrFrom4(in.Addr), &in.Port
	case unix.AF_INET6:
		in := (*unix.RawSockaddrInet6)(unsafe.Pointer(&sa))
		addr, port = netip.AddrFrom16(in.Addr).Unmap(), &in.Port
	default:
		return netip.AddrPort{}, nil
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(port))[:])), nil
}
