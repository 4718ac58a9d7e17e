//go:build !amd64 && !arm64

package session

func procyield(n uint32) {}
