//go:build !linux

package spin

func osyield() {}
