// Sanperf compares connections of package san with plain TCP and a unix socket, in the manner of iperf.
// It uses only the library's public API, so that it measures what a program gets. Only the command
// "devices" uses more.
//
// Without a command it starts a server process and prints one table. "sanperf help" lists the commands.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/sanconn/san/test/hwsim"
)

// Exit codes of the process.
const (
	exitOK     = 0
	exitFailed = 1 // the measurement could not be made, or its data were wrong
	exitUsage  = 2 // the command line was wrong
)

// A command is one row of the command table.
type command struct {
	name    string
	args    string // what follows the flags, for the usage line
	summary string
	run     func(ctx context.Context, std stdio, args []string) error
}

// commands is filled by init: "help" refers to it, so an initializer would be a cycle.
var commands []command

func init() {
	commands = []command{
		{"compare", "[HOST[:PORT]]", "TCP, unix and SAN side by side in one table (what runs when no command is given)", runCompare},
		{"server", "", "serve measurements to clients", runServer},
		{"client", "HOST[:PORT]", "measure one connection, or several in parallel, to a server", runClient},
		{"devices", "[HOST[:PORT]]", "what this host has for a SAN, what is missing, and what a dial to an address gets and why", runDevices},
		{"help", "", "this list; each command explains its flags with -h", runHelp},
	}
}

// stdio is the process's standard streams, which tests replace.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	hwsim.Use()
	os.Exit(run(ctx, stdio{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:]))
}

// run executes one command line and returns the exit code.
func run(ctx context.Context, std stdio, args []string) int {
	name := "compare"
	if len(args) > 0 && (args[0] == "" || args[0][0] != '-') {
		name, args = args[0], args[1:]
	}
	out := output{to: std.out}
	std.out = &out
	for _, c := range commands {
		if c.name == name {
			return exitCode(std, cmp.Or(c.run(ctx, std, args), out.failed()))
		}
	}
	return exitCode(std, usageError{fmt.Errorf("unknown command %q; \"sanperf help\" lists them", name)})
}

// output is what a command prints to. It keeps the first error, because a result that could not be
// written is a failure.
type output struct {
	to io.Writer

	mu  sync.Mutex // guards err
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.to.Write(p)
	if err != nil {
		o.mu.Lock()
		o.err = cmp.Or(o.err, err)
		o.mu.Unlock()
	}
	return n, err
}

func (o *output) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return fmt.Errorf("cannot print the result: %w", o.err)
	}
	return nil
}

func exitCode(std stdio, err error) int {
	var usage usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return exitOK
	case errors.As(err, &usage):
		fmt.Fprintln(std.err, "sanperf:", err)
		return exitUsage
	}
	fmt.Fprintln(std.err, "sanperf:", err)
	return exitFailed
}

func runHelp(_ context.Context, std stdio, _ []string) error {
	fmt.Fprintln(std.out, "usage: sanperf [command] [flags] [arguments]")
	for _, c := range commands {
		fmt.Fprintf(std.out, "  %-22s %s\n", c.name+" "+c.args, c.summary)
	}
	fmt.Fprint(std.out, targetHelp)
	return nil
}
