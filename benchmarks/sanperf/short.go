package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san"
)

// Modes that measure connections which end before a move would pay, as package san makes them by
// default: they stay on TCP. Each connection is new. Several goroutines make one after the other.
const (
	modeConnect  mode = "connect"  // connects, ends its direction, reads the end of the other, closes
	modeExchange mode = "exchange" // connects, sends spec.Size bytes, gets them back, closes
	modeHTTP     mode = "http"     // a request of net/http without keep-alive, answered by spec.Size bytes
)

// short reports whether a mode is one of these.
func (m mode) short() bool { return m == modeConnect || m == modeExchange || m == modeHTTP }

// shortSize is how many bytes an exchange has each way, and an answer of the HTTP server.
const shortSize = 100

// exchangeToken is the token in the hello of an exchange. The hello is a part of its bytes.
var exchangeToken = token{'e', 'x', 'c', 'h', 'a', 'n', 'g', 'e'}

// runShort measures connections a second.
func (m measurement) runShort(ctx context.Context) (*result, error) {
	once, err := m.once()
	if err != nil {
		return nil, err
	}
	limit := seconds(m.spec.Warmup+m.spec.Time) + grace
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not finished after %v", limit))
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var made atomic.Int64
	var stop atomic.Bool
	var all sync.WaitGroup
	for range m.spec.Streams {
		all.Go(func() {
			for !stop.Load() && ctx.Err() == nil {
				if err := once(ctx); err != nil {
					fail(err) // the first error is the one that is returned
					return
				}
				made.Add(1)
			}
		})
	}
	pause := func(s float64) {
		select {
		case <-time.After(seconds(s)):
		case <-ctx.Done():
		}
	}
	pause(m.spec.Warmup)
	began, before := time.Now(), made.Load()
	pause(m.spec.Time)
	for made.Load() == before && ctx.Err() == nil {
		pause(m.spec.Time)
	}
	n, took := made.Load()-before, time.Since(began)
	stop.Store(true)
	all.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%v: %w", m.target, context.Cause(ctx))
	}
	by := "tcp"
	if m.target.transport == "unix" {
		by = "unix"
	}
	return &result{Target: m.target, Provider: by, Spec: m.spec, Messages: float64(n) / took.Seconds()}, nil
}

// once returns a function that makes a connection, uses it and closes it.
func (m measurement) once() (func(context.Context) error, error) {
	switch m.spec.Mode {
	case modeConnect:
		return m.eachOf(func(c net.Conn) error {
			if err := closeWrite(c); err != nil {
				return err
			}
			return expectEOF(c)
		}), nil
	case modeExchange:
		return m.eachOf(exchange), nil
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return m.target.dialShort(ctx)
		},
	}}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sanperf/", nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if n, err := io.Copy(io.Discard, answer.Body); err != nil || n != shortSize {
			return fmt.Errorf("%d bytes came: %w", n, err)
		}
		return nil
	}, nil
}

// eachOf returns a function that makes a connection, and closes it after use.
func (m measurement) eachOf(use func(net.Conn) error) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := m.target.dialShort(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := use(c); err != nil {
			return err
		}
		if info := san.InfoOf(c); info.SANBytes > 0 {
			return fmt.Errorf("a short connection has moved to %s", info.Provider)
		}
		return nil
	}
}

// exchange sends a hello, and more up to shortSize bytes, and reads as many.
func exchange(c net.Conn) error {
	var b [shortSize]byte
	copy(b[copy(b[:], magic):], exchangeToken[:])
	if _, err := c.Write(b[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b[:])
	return err
}

// serveExchange is the server's side, after the hello.
func serveExchange(c net.Conn) error {
	defer c.Close()
	var b [shortSize]byte
	if _, err := io.ReadFull(c, b[helloLen:]); err != nil {
		return err
	}
	if _, err := c.Write(b[:]); err != nil {
		return err
	}
	return ignoreReset(expectEOF(c))
}

// ignoreReset is for the close of a connection whose answer has been read: a reset is then no error.
func ignoreReset(err error) error {
	if e := (*net.OpError)(nil); errors.As(err, &e) {
		return nil
	}
	return err
}

// serveHTTP answers each request by shortSize bytes, until ctx is done.
func serveHTTP(ctx context.Context, l net.Listener) error {
	body := make([]byte, shortSize)
	s := &http.Server{
		ReadTimeout: setupTime, WriteTimeout: setupTime,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(body) }),
	}
	defer context.AfterFunc(ctx, func() { s.Close() })()
	if err := s.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}
