//go:build !linux

package sanconn

import "io"

// No connection moves on this system, so these functions could spare no copy.

func splice(io.Writer, *io.LimitedReader) (int64, error) { return 0, errLook }

func fillFromSocket(c *Conn, _ socket, src *io.LimitedReader) (int64, error) { return pump(c, src) }

func drainToSocket(_ *Conn, s socket, all *io.LimitedReader) (int64, error) { return pump(s, all) }
