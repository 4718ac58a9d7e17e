//go:build !amd64 && !arm64

package spin

// procyield executes an empty loop n times, which the compiler does not remove.
func procyield(n uint32) {
	for range n {
	}
}
