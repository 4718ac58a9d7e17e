//go:build !unix

package main

import (
	"context"
	"errors"
	"io/fs"
	"net"
)

// listenUnix listens on a socket file.
func listenUnix(ctx context.Context, path string, mode *fs.FileMode) (net.Listener, error) {
	if mode != nil {
		return nil, errors.New("-mode is for Unix systems")
	}
	return new(net.ListenConfig).Listen(ctx, "unix", path)
}
