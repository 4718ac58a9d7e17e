//go:build !linux

package san

import (
	"io"
	"net"
)

// nameFor is for systems with a provider.
func nameFor(*net.TCPConn, settings) (io.Closer, error) {
	return nil, &Unavailable{Reason: ReasonNoProvider}
}
