//go:build !linux

package sanconn

// There is no SAN here, so no connection has anything to show.

func showNothing(func(fd uintptr) (done bool)) (done bool, err error) { return false, errNoDescriptor }
func showEnd(func(fd uintptr) (done bool)) (done bool, err error)     { return false, errNoDescriptor }

func showBytes([]byte, func(fd uintptr) (done bool)) (n int, done bool, err error) {
	return 0, false, errNoDescriptor
}
