//go:build !linux

package session

func osyield() {}
