//go:build amd64 || arm64

package spin

// procyield executes n PAUSE instructions, the processor's hint of a polling loop; n > 0.
//
//go:noescape
func procyield(n uint32)
