package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san"
)

// setupTime bounds each step of setting up a measurement.
const setupTime = 10 * time.Second

// acceptPause is the wait after accept has failed.
const acceptPause = 100 * time.Millisecond

// maxControl is more than a control connection ever carries in either direction.
const maxControl = 1 << 20

// runServer is the command "server".
func runServer(ctx context.Context, std stdio, args []string) error {
	fs := newFlagSet(std, "server")
	var listen []target
	fs.Func("l", "`address` to listen on; may be given more than once (default san::"+defaultPort+")", func(text string) error {
		t, err := parseTarget(text)
		listen = append(listen, t)
		return err
	})
	var web []target
	fs.Func("http", "`address` to answer requests of HTTP on; may be given more than once", func(text string) error {
		t, err := parseTarget(text)
		web = append(web, t)
		return err
	})
	require := fs.Bool("require", false, "serve on san: addresses only what has moved to a SAN")
	quiet := fs.Bool("quiet", false, "say nothing of measurements that went well")
	untilEOF := fs.Bool("stdin", false, "end when standard input ends, as with a parent process that died")
	if _, err := parseArgs(fs, args, 0); err != nil {
		return err
	}
	if listen == nil {
		listen = []target{{"san", net.JoinHostPort("", defaultPort)}}
	}

	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	if *untilEOF {
		go func() { // runs until the input ends, which is the end of the process
			io.Copy(io.Discard, std.in)
			cancel(nil)
		}()
	}
	s := &server{log: func(format string, args ...any) { fmt.Fprintf(std.err, format+"\n", args...) }, quiet: *quiet}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel(nil)
	for i, t := range append(listen, web...) {
		policy, serve := policyOf(*require), s.serve
		if i >= len(listen) {
			policy, serve = san.Prefer, serveHTTP
		}
		l, err := t.listen(ctx, policy)
		if err != nil {
			return fmt.Errorf("cannot listen on %v: %w", t, err)
		}
		fmt.Fprintf(std.out, "listening on %v\n", target{t.transport, l.Addr().String()})
		if l, ok := l.(*san.Listener); ok && !*quiet {
			lacks := l.Unavailable()
			for _, name := range slices.Sorted(maps.Keys(lacks)) {
				s.log("%s", lackText(name, lacks[name]))
			}
		}
		serving.Go(func() {
			if err := serve(ctx, l); err != nil {
				cancel(fmt.Errorf("%v: %w", t, err))
			}
		})
	}
	serving.Wait()
	if err := context.Cause(ctx); asked.Err() == nil && err != context.Canceled {
		return err
	}
	return nil // a signal or the end of standard input, which is no error
}

// lackText reports which connections go by TCP. To have no SAN is the normal case, and no failure.
func lackText(provider string, why *san.Unavailable) string {
	switch why.Reason {
	case san.ReasonNoProvider, san.ReasonNotServed:
		return fmt.Sprintf("%s: none here, so TCP takes its place (sanperf devices has the details)", provider)
	}
	return fmt.Sprintf("TCP carries what %s does not serve: %v", provider, why)
}

func policyOf(require bool) san.Policy {
	if require {
		return san.Require
	}
	return san.Prefer
}

type server struct {
	log   func(format string, args ...any)
	quiet bool

	mu      sync.Mutex
	waiting map[token]*gathering // measurements whose streams are still arriving; guarded by mu
}

// A gathering collects the connections of one measurement.
type gathering struct {
	missing int // guarded by server.mu
	conns   chan net.Conn
}

// serve accepts until ctx is done, and returns when everything it started has ended.
func (s *server) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	var handlers sync.WaitGroup
	defer handlers.Wait()
	for {
		c, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // most likely for lack of descriptors; measurements in progress go on
			s.log("accept: %v", err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		handlers.Go(func() {
			if err := s.handle(ctx, c); err != nil && ctx.Err() == nil {
				s.log("%v: %v", c.RemoteAddr(), err)
			}
		})
	}
}

// handle reads what a connection is for. It serves a control connection to its end, and passes a stream
// to its measurement, which closes it.
func (s *server) handle(ctx context.Context, c net.Conn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	c.SetReadDeadline(time.Now().Add(setupTime))
	t, err := readHello(c)
	if err != nil {
		c.Close()
		if err == io.EOF {
			return nil // somebody has probed the port
		}
		return err
	}
	c.SetReadDeadline(time.Time{})
	if t == exchangeToken {
		return serveExchange(c)
	}
	if t == (token{}) {
		defer c.Close()
		return s.control(ctx, c)
	}
	if !s.join(t, c) {
		c.Close()
		return errors.New("a stream of no measurement, or one too many")
	}
	return nil
}

// join passes c to the measurement that t names.
func (s *server) join(t token, c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.waiting[t]
	if g == nil || g.missing == 0 {
		return false
	}
	g.missing--
	g.conns <- c // never blocks: there is room for all
	return true
}

// control runs the server's side of one measurement.
func (s *server) control(ctx context.Context, c net.Conn) error {
	in, out := json.NewDecoder(io.LimitReader(c, maxControl)), json.NewEncoder(c)
	c.SetDeadline(time.Now().Add(setupTime))
	var asked spec
	if err := in.Decode(&asked); err != nil {
		return err
	}
	if err := asked.check(); err != nil {
		return errors.Join(err, out.Encode(offer{Error: err.Error()}))
	}

	var t token
	rand.Read(t[:])
	g := s.expect(t, asked.Streams)
	err := out.Encode(offer{Token: t})
	if err != nil {
		s.forget(t, g)
		return err
	}
	l := &load{spec: asked, mode: asked.Mode.mirror()}
	l.conns, err = g.wait(ctx, asked.Streams)
	s.forget(t, g)
	if err != nil {
		l.close()
		return errors.Join(err, out.Encode(started{Error: err.Error()}))
	}

	provider, _ := providersOf(l.conns)
	if !s.quiet {
		s.log("%v: %s, %v × %d, %v s, by %s", c.RemoteAddr(), asked.Mode, byteSize(asked.Size), asked.Streams, asked.Time, provider)
	}
	if err := out.Encode(started{}); err != nil {
		l.close()
		return err
	}
	l.measured = func() error {
		c.SetDeadline(time.Now().Add(grace))
		return exchangeMeasured(in, out)
	}
	result, err := l.run(ctx)
	if err != nil {
		result = &side{Error: err.Error()}
	}
	return errors.Join(err, out.Encode(result))
}

func (s *server) expect(t token, streams int) *gathering {
	g := &gathering{missing: streams, conns: make(chan net.Conn, streams)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting == nil {
		s.waiting = make(map[token]*gathering)
	}
	s.waiting[t] = g
	return g
}

// forget ends a gathering and closes the connections that came too late.
func (s *server) forget(t token, g *gathering) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, t)
	for {
		select {
		case c := <-g.conns:
			c.Close()
		default:
			return
		}
	}
}

// wait returns all connections, or an error and those that came in time.
func (g *gathering) wait(ctx context.Context, streams int) ([]net.Conn, error) {
	late := time.NewTimer(setupTime)
	defer late.Stop()
	var conns []net.Conn
	for len(conns) < streams {
		select {
		case c := <-g.conns:
			conns = append(conns, c)
		case <-late.C:
			return conns, fmt.Errorf("%d of %d streams came within %v", len(conns), streams, setupTime)
		case <-ctx.Done():
			return conns, context.Cause(ctx)
		}
	}
	return conns, nil
}

// listening parses a line with an address that a server prints when it starts.
func listening(line string) (target, bool) {
	text, ok := strings.CutPrefix(line, "listening on ")
	if !ok {
		return target{}, false
	}
	t, err := parseTarget(text)
	return t, err == nil
}
