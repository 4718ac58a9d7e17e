//go:build amd64 || arm64

package spin

// procyield executes n PAUSEs, n > 0, the processor's hint of a polling loop.
//
//go:noescape
func procyield(n uint32)
