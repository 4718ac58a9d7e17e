//go:build amd64 || arm64

package spin

// procyield tells the processor n times, n > 0, that this is a polling loop.
//
//go:noescape
func procyield(n uint32)
