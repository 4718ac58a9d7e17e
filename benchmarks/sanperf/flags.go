package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// A usageError is a mistake in the command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// newFlagSet returns the flag set of one command; its help goes to std.err.
func newFlagSet(std stdio, name string) *flag.FlagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(std.err)
	fs.Usage = func() {
		for _, c := range commands {
			if c.name == name {
				fmt.Fprintf(std.err, "usage: sanperf %s [flags] %s\n%s\n", name, c.args, c.summary)
			}
		}
		fs.PrintDefaults()
		fmt.Fprintln(std.err, `"sanperf help" lists the commands, and says what an address is`)
	}
	return fs
}

// parseArgs parses flags before, between and after the arguments, of which there may be at
// most most, and returns the arguments.
func parseArgs(fs *flag.FlagSet, args []string, most int) ([]string, error) {
	// After an error, the flag package prints the whole list of flags, which hides the error. The list
	// is printed only for -h.
	usage := fs.Usage
	out := fs.Output()
	fs.Usage = func() {}
	fs.SetOutput(io.Discard)
	var rest []string
	for {
		if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
			fs.SetOutput(out)
			usage()
			return nil, err
		} else if err != nil {
			return nil, usagef("%s: %w", fs.Name(), err)
		}
		if args = fs.Args(); len(args) == 0 {
			break
		}
		rest, args = append(rest, args[0]), args[1:]
	}
	if len(rest) > most {
		return nil, usagef("%s: unexpected argument %q", fs.Name(), rest[most])
	}
	return rest, nil
}

// byteSize is a flag value such as 64, 4K, 64KiB or 1M; the units are binary.
type byteSize int64

var sizeUnits = []struct {
	name  string
	bytes byteSize
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

func (s *byteSize) Set(text string) error {
	unit, number := uint64(1), strings.TrimRight(text, "BbIiKkMmGg")
	switch suffix := strings.ToLower(text[len(number):]); suffix {
	case "", "b":
	case "k", "kb", "kib":
		unit = 1 << 10
	case "m", "mb", "mib":
		unit = 1 << 20
	case "g", "gb", "gib":
		unit = 1 << 30
	default:
		return fmt.Errorf("unknown unit %q: K, M or G", text[len(number):])
	}
	n, err := strconv.ParseUint(number, 10, 64) // MaxUint64 if out of range
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return errors.New("not a size such as 64, 4K or 1M")
	}
	if n == 0 || n > maxSize/unit {
		return fmt.Errorf("outside 1 B to %v", byteSize(maxSize))
	}
	*s = byteSize(n * unit)
	return nil
}

func (s byteSize) String() string {
	for _, u := range sizeUnits {
		if s >= u.bytes && s%u.bytes == 0 {
			return fmt.Sprintf("%d %s", int64(s/u.bytes), u.name)
		}
	}
	return "0 B"
}

// span is a flag value for a time: a Go duration, or a number of seconds.
type span time.Duration

func (s *span) Set(text string) error {
	d, err := time.ParseDuration(text)
	if seconds, numErr := strconv.ParseFloat(text, 64); numErr == nil {
		d, err = time.Duration(seconds*float64(time.Second)), nil
	}
	if err != nil {
		return errors.New("not a time such as 10, 10s or 200ms")
	}
	if d <= 0 || d > maxTime {
		return fmt.Errorf("must be above 0, and %v at most", maxTime)
	}
	*s = span(d)
	return nil
}

func (s span) String() string { return time.Duration(s).String() }
