// Sanproxy forwards connections between package san and the sockets of programs that cannot
// use it: see "sanproxy -h". Package sanproxy does the forwarding; this module of its own
// adds addresses, the PROXY protocol and counters.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanproxy"
)

// Exit codes of the process.
const (
	exitOK     = 0
	exitFailed = 1 // an address cannot be listened on, or a listener failed
	exitUsage  = 2 // the command line was wrong
)

// stdio is the process's standard streams, which tests replace.
type stdio struct{ out, err io.Writer }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process, and so resets what is left
	os.Exit(run(ctx, stdio{os.Stdout, os.Stderr}, os.Args[1:]))
}

// run executes one command line until ctx is done, and returns the exit code.
func run(ctx context.Context, std stdio, args []string) int {
	s, err := parse(std, args)
	var usage usageError
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case errors.As(err, &usage):
		fmt.Fprintf(std.err, "sanproxy: %v (-h tells more)\n", err)
		return exitUsage
	}
	if err := serve(ctx, std, s); err != nil {
		fmt.Fprintln(std.err, "sanproxy:", err)
		return exitFailed
	}
	return exitOK
}

// forwarder is a route that is open.
type forwarder struct {
	route
	listener net.Listener
	proxy    *sanproxy.Proxy
}

// serve forwards until ctx is done or a listener fails, and then until the connections have
// ended or the time for that is over.
func serve(ctx context.Context, std stdio, s *settings) error {
	forwarders, err := open(ctx, std, s)
	if err != nil {
		return err
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if s.stats != nil {
		stop, err := serveStats(ctx, s, forwarders)
		if err != nil {
			closeAll(forwarders)
			return err
		}
		defer stop()
	}
	var serving sync.WaitGroup
	for _, f := range forwarders {
		fmt.Fprintf(std.out, "forwarding %v to %v\n", f.listen, f.to)
		serving.Go(func() {
			if err := f.proxy.Serve(f.listener); err != nil {
				cancel(fmt.Errorf("%v: %w", f.listen, err))
			}
		})
	}
	<-ctx.Done()
	drain(std, s, forwarders)
	serving.Wait()
	if asked.Err() != nil {
		return nil // ended by a signal
	}
	return context.Cause(ctx)
}

// open listens on all addresses, or on none.
func open(ctx context.Context, std stdio, s *settings) ([]*forwarder, error) {
	var forwarders []*forwarder
	for _, r := range s.routes {
		l, err := s.open(ctx, r.listen)
		if err != nil {
			closeAll(forwarders)
			return nil, err
		}
		if r.listen.network != unixNetwork { // the port that was chosen
			r.listen.address = l.Addr().String()
		}
		forwarders = append(forwarders, &forwarder{
			route: r, listener: l,
			proxy: &sanproxy.Proxy{
				Dial:        s.dialer(r.to),
				DialTimeout: s.dialTimeout,
				MaxConns:    s.maxConns,
				ErrorLog:    log.New(std.err, fmt.Sprintf("sanproxy: %v to %v: ", r.listen, r.to), 0),
			},
		})
		if l, ok := l.(*san.Listener); ok {
			for name, why := range l.Unavailable() {
				switch why.Reason {
				case san.ReasonNotServed, san.ReasonNoProvider: // this host has none, as most hosts
				default:
					fmt.Fprintf(std.err, "sanproxy: %v: TCP carries what %s does not serve: %v\n", r.listen, name, why)
				}
			}
		}
	}
	return forwarders, nil
}

func closeAll(forwarders []*forwarder) {
	for _, f := range forwarders {
		f.listener.Close()
	}
}

// drain ends the proxies.
func drain(std stdio, s *settings, forwarders []*forwarder) {
	ctx, cancel := context.WithTimeout(context.Background(), s.drain)
	defer cancel()
	var ending sync.WaitGroup
	for _, f := range forwarders {
		ending.Go(func() {
			before := f.proxy.Stats().Reset
			if err := f.proxy.Shutdown(ctx); err != nil {
				fmt.Fprintf(std.err, "sanproxy: %v to %v: reset %d connections that had not ended after %v\n",
					f.listen, f.to, f.proxy.Stats().Reset-before, s.drain)
			}
		})
	}
	ending.Wait()
}
