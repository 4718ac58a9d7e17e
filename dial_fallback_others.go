//go:build !linux

package san

import "net"

// netDialer is what dials TCP after a SAN did not serve.
func (d *Dialer) netDialer(bool) *net.Dialer { return &d.NetDialer }
