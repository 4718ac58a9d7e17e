//go:build !linux

package sanproxy

import "net"

// wasReset is not known here.
func wasReset(net.Conn) bool { return false }
