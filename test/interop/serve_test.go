package interop

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
)

// inBackground runs serve in the background. The function that it returns calls end, waits for serve,
// and returns end's error and serve's, unless the latter is ended.
func inBackground(serve, end func() error, ended error) (stop func() error) {
	done := make(chan error, 1)
	go func() { done <- serve() }()
	return func() error {
		err := end()
		if served := <-done; !errors.Is(served, ended) {
			return errors.Join(err, served)
		}
		return err
	}
}

// serveEach handles l's connections concurrently, and closes each.
func serveEach(l net.Listener, handle func(net.Conn) error) (stop func() error) {
	return inBackground(func() error { return handleAll(l.Accept, handle) }, l.Close, nil)
}

// handleAll handles what accept returns, concurrently, and closes it. Once accept has failed and all
// handlers have returned, it returns their error.
func handleAll[C io.Closer](accept func() (C, error), handle func(C) error) error {
	var mu sync.Mutex
	var failed error
	var all sync.WaitGroup
	for {
		c, err := accept()
		if err != nil {
			break
		}
		all.Go(func() {
			err := handle(c)
			c.Close()
			mu.Lock()
			failed = errors.Join(failed, err)
			mu.Unlock()
		})
	}
	all.Wait()
	return failed
}

// echoBack echoes, and then ends its direction.
func echoBack[C io.ReadWriteCloser](c C) error {
	if _, err := io.Copy(c, c); err != nil {
		return err
	}
	return closeWrite(c)
}

// closeWrite ends the direction in which c sends. If the protocol cannot do that alone, it calls Close.
func closeWrite(c io.Closer) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// expectEcho sends n bytes while it reads, and expects the same back, and then the end.
func expectEcho(t *testing.T, c io.ReadWriteCloser, n int) {
	t.Helper()
	data := randomBytes(n)
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() {
		if _, err := c.Write(data); err != nil {
			t.Error(err)
		}
		if err := closeWrite(c); err != nil {
			t.Error(err)
		}
	})
	got, err := io.ReadAll(c)
	if err != nil {
		t.Error(err)
	}
	wantBytes(t, got, data)
}

// together calls f n times concurrently.
func together(n int, f func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(f)
	}
	all.Wait()
}
