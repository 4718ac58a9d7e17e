//go:build !linux

package san

import "net"

// registry has the providers of this build, in order of preference: none.
var registry []provider

// v6only matters to providers only.
func v6only(*net.TCPListener) bool { return false }
