//go:build !linux

package san

import "net"

// v6only matters to providers only.
func v6only(*net.TCPListener) bool { return false }
