//go:build !linux

package sanproxy

import "net"

// wasReset returns false, because here there is no way to know.
func wasReset(net.Conn) bool { return false }
