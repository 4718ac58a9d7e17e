// San builds Go programs whose TCP connections move to a SAN, from sources that do not mention it: see
// "san help". It puts package san beneath package net by an overlay of files: see docs/BUILD.md.
//
//	patch.go      the edits of packages net and syscall
//	toolchain.go  the edited files, for the Go that the program is built with
//	workspace.go  how the library gets into the program's build list
//	vendor.go     the same for a program with a vendor directory
//	packages.go   which of the program's packages link it
//	version.go    how a binary was built
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

const usage = `San builds Go programs whose TCP connections move to a SAN, without a change to them.

	san build|install|run|test ARGUMENTS    what go does with these arguments
	san env [ARGUMENTS]                     variables by which go does that for these packages
	san version BINARY...                   whether, and how, binaries were built so

The arguments of go build, go install, go run, and go test are theirs, and the environment is
passed on. What a program so built does at run time, variables such as SAN_PROVIDERS decide.
Its library's source is taken from SAN_SOURCE, a directory, if that is set.
docs/BUILD.md has the rest.
`

// Exit codes of the process, other than go's.
const (
	exitFailed = 1
	exitUsage  = 2
)

// stdio is the process's standard streams, which tests replace.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

func main() {
	os.Exit(run(stdio{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:]))
}

// run executes one command line, and returns the exit code.
func run(std stdio, args []string) int {
	if len(args) == 0 {
		fmt.Fprint(std.err, usage)
		return exitUsage
	}
	command, args := args[0], args[1:]
	var err error
	switch command {
	case "build", "install", "run", "test":
		err = runGo(std, command, args)
	case "env":
		err = printEnv(std, args)
	case "version":
		err = printVersions(std.out, args)
	case "help", "-h", "-help", "--help":
		fmt.Fprint(std.out, usage)
	default:
		fmt.Fprintf(std.err, "san: unknown command %q; known are build, install, run, test, env, version and help\n", command)
		return exitUsage
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return max(exit.ExitCode(), exitFailed) // go has printed why
	case err != nil:
		fmt.Fprintln(std.err, "san:", err)
		return exitFailed
	}
	return 0
}

// runGo runs a go command with the overlay.
func runGo(std stdio, command string, args []string) error {
	b, err := prepare(std, command, args)
	if err != nil {
		return err
	}
	args = slices.Concat([]string{command, "-overlay=" + b.overlay}, b.flags, b.args.rest())
	cmd := b.goCommand(args...)
	cmd.Stdin, cmd.Stdout = std.in, std.out
	return cmd.Run()
}

// printEnv prints shell assignments with which go builds the packages like this command.
func printEnv(std stdio, args []string) error {
	if len(args) == 0 {
		args = []string{"./..."}
	}
	b, err := prepare(std, "build", args)
	if err != nil {
		return err
	}
	goflags := append([]string{b.env.GOFLAGS}, b.flags...)
	goflags = append(goflags, `"-overlay=`+b.overlay+`"`) // the cache directory may have spaces
	for _, variable := range append(b.variables(), "GOFLAGS="+strings.Join(goflags, " ")) {
		name, value, _ := strings.Cut(variable, "=")
		fmt.Fprintf(std.out, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	return nil
}
