//go:build !amd64 && !arm64

package spin

// procyield executes n turns of an empty loop, which the compiler leaves there.
func procyield(n uint32) {
	for range n {
	}
}
