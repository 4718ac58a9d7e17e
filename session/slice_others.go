//go:build !linux

package session

func longSlice() bool { return false }
