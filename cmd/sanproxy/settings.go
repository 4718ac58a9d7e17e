package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"time"

	"github.com/sanconn/san"
)

// A usageError is a mistake in the command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

const usageText = `usage: sanproxy -listen ADDRESS -to ADDRESS [-listen ADDRESS -to ADDRESS]... [flags]
Forwards each connection that it accepts on -listen over one that it makes to the -to behind it.

An address is
  san:HOST:PORT   by package san: a TCP connection that moves to shared memory or RDMA once it has
                  been used, where both ends can
  tcp:HOST:PORT
  unix:PATH       a socket file, or unix:@NAME in the abstract name space

One sanproxy connects a program that uses package san with one that does not. Two programs that do
not need two of them, one beside each; here for a PostgreSQL server and its clients:
  sanproxy -listen san:127.0.0.1:7432 -to unix:/run/postgresql/.s.PGSQL.5432
  sanproxy -listen tcp:127.0.0.1:6432 -to san:127.0.0.1:7432

The end of a stream travels as such, and a reset as a reset. When -to does not answer, the client
is reset. SIGTERM and SIGINT end sanproxy when its connections have ended, or after -drain; a
second one ends it at once. SAN_PROVIDERS and the other variables of package san apply.

`

// route is one pair of addresses.
type route struct{ listen, to address }

type settings struct {
	routes      []route
	policy      san.Policy
	proxyHeader bool
	maxConns    int
	dialTimeout time.Duration
	drain       time.Duration
	mode        *fs.FileMode // of socket files; nil: as the umask has it
	stats       *address     // nil: none
}

// parse reads the command line.
func parse(std stdio, args []string) (*settings, error) {
	s := new(settings)
	flags := flag.NewFlagSet("sanproxy", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // otherwise the whole list of flags follows an error, and hides it
	flags.Usage = func() {}
	flags.Func("listen", "`address` to accept connections on; may be given more than once, each with its -to", s.addListen)
	flags.Func("to", "`address` where the connections of the -listen before it go on", s.addTo)
	require := flags.Bool("require", false, "san: addresses by a SAN alone: no byte goes by TCP, and what cannot move is reset")
	never := flags.Bool("never", false, "san: addresses by TCP alone: nothing moves")
	flags.BoolVar(&s.proxyHeader, "proxy-protocol", false, "send the client's address ahead of its bytes, by a PROXY protocol header (version 2);\nof two sanproxies the one that the client meets has to")
	flags.IntVar(&s.maxConns, "max", 0, "`connections` that each -listen may have at a time; more are reset; 0: no limit")
	flags.DurationVar(&s.dialTimeout, "dial-timeout", 10*time.Second, "`time` that connecting to -to may take")
	flags.DurationVar(&s.drain, "drain", 10*time.Second, "`time` that connections have to end after SIGTERM")
	flags.Func("mode", "permissions of socket files that it makes, in `octal`, such as 0660;\nwho may write may connect (default by the umask)", s.setMode)
	flags.Func("stats", "`address` (tcp: or unix:) to serve the counters on, as JSON by HTTP", s.setStats)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		io.WriteString(std.err, usageText)
		flags.SetOutput(std.err)
		flags.PrintDefaults()
		return nil, err
	case err != nil:
		return nil, usageError{err}
	case flags.NArg() > 0:
		return nil, usagef("unexpected argument %q", flags.Arg(0))
	case *require && *never:
		return nil, usagef("-require and -never exclude each other")
	case s.maxConns < 0:
		return nil, usagef("-max %d: negative", s.maxConns)
	case s.dialTimeout <= 0:
		return nil, usagef("-dial-timeout %v: must be above 0", s.dialTimeout)
	case s.drain < 0:
		return nil, usagef("-drain %v: negative", s.drain)
	case len(s.routes) == 0:
		return nil, usagef("nothing to forward: -listen and -to are missing")
	}
	if last := s.routes[len(s.routes)-1]; last.to == (address{}) {
		return nil, usagef("-listen %v has no -to behind it", last.listen)
	}
	switch {
	case *require:
		s.policy = san.Require
	case *never:
		s.policy = san.Never
	}
	return s, nil
}

func (s *settings) addListen(text string) error {
	a, err := parseAddress(text)
	if err != nil {
		return err
	}
	if n := len(s.routes); n > 0 && s.routes[n-1].to == (address{}) {
		return fmt.Errorf("-listen %v before it has no -to", s.routes[n-1].listen)
	}
	s.routes = append(s.routes, route{listen: a})
	return nil
}

func (s *settings) addTo(text string) error {
	a, err := parseAddress(text)
	if err != nil {
		return err
	}
	n := len(s.routes)
	if n == 0 || s.routes[n-1].to != (address{}) {
		return errors.New("it has no -listen before it")
	}
	s.routes[n-1].to = a
	return nil
}

func (s *settings) setMode(text string) error {
	n, err := strconv.ParseUint(text, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("not permissions in octal such as 0660")
	}
	mode := fs.FileMode(n)
	s.mode = &mode
	return nil
}

func (s *settings) setStats(text string) error {
	a, err := parseAddress(text)
	if err == nil && a.network == sanNetwork {
		err = errors.New("not a tcp: or unix: address")
	}
	s.stats = &a
	return err
}
