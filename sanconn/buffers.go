package sanconn

import (
	"net"
	"slices"
)

// WriteBuffers writes the slices of v as one Write, packing small ones together, and removes from v
// what was written, as net.Buffers.WriteTo does for a *net.TCPConn. (For other connections, WriteTo
// writes slice by slice.) If v has no bytes, the error is that of a Write of no bytes, where net only
// finds Close and deadlines.
func (c *Conn) WriteBuffers(v *net.Buffers) (int64, error) {
	w := pendingWrite{v: v}
	err := c.out.write(c, &w)
	if oe, ok := err.(*net.OpError); ok && oe.Op == opWrite { // not an error of net's operation writev
		oe.Op = opWritev
	}
	return w.n, err
}

// writePieceOf writes at most a writePiece of v to TCP, and removes it from v.
func writePieceOf(v *net.Buffers, tcp *net.TCPConn) (int64, error) {
	left := writePiece
	for i, b := range *v {
		if left -= len(b); left < 0 {
			piece := slices.Clone((*v)[:i+1])
			piece[i] = b[:len(b)+left]
			n, err := piece.WriteTo(tcp)
			consume(v, n)
			return n, err
		}
	}
	n, err := v.WriteTo(tcp)
	consume(v, 0) // net leaves slices of no bytes if there are no others
	return n, err
}

// consume removes the first n bytes of v.
func consume(v *net.Buffers, n int64) {
	for len(*v) > 0 {
		first := int64(len((*v)[0]))
		if first > n {
			(*v)[0] = (*v)[0][n:]
			return
		}
		n -= first
		(*v)[0] = nil
		*v = (*v)[1:]
	}
}
