package main

import (
	"fmt"
	"slices"
	"strings"
)

// arguments are the arguments of a go command, parsed as far as necessary.
type arguments struct {
	command  string
	flags    []string // in their order, before the packages
	values   map[string]string
	packages []string // or files
	after    []string // arguments after the packages: for the program or the test
}

// boolFlags are the flags that take no further argument as their value.
var boolFlags = strings.Fields("a asan artifacts benchmem buildvcs c cover failfast fullpath i json linkshared modcacherw msan n race short trimpath v work x")

// valueFlags are go's other flags. (A test may have more.)
var valueFlags = strings.Fields(`C asmflags buildmode compiler covermode coverpkg exec gccgoflags gcflags
	installsuffix ldflags mod modfile o outputdir overlay p pgo pkgdir tags toolexec
	bench benchtime blockprofile blockprofilerate count coverprofile cpu cpuprofile fuzz fuzzcachedir
	fuzzminimizetime fuzztime list memprofile memprofilerate mutexprofile mutexprofilefraction
	parallel run shuffle skip timeout trace vet`)

// parseArguments parses the arguments of a command.
func parseArguments(command string, args []string) (arguments, error) {
	a := arguments{command: command, values: make(map[string]string)}
	i := 0
flags:
	for i < len(args) && strings.HasPrefix(args[i], "-") && args[i] != "-" {
		if args[i] == "--" {
			i++
			break
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(args[i], "-"), "-"), "=")
		known := strings.TrimPrefix(name, "test.")
		n := 1
		switch {
		case name == "args":
			break flags
		case hasValue, slices.Contains(boolFlags, known):
		case slices.Contains(valueFlags, known):
			if i+1 == len(args) {
				return a, fmt.Errorf("-%s needs a value", name)
			}
			value, n = args[i+1], 2
		case command == "test":
			break flags // the test's own flags: no packages follow
		}
		a.values[known] = value
		switch known {
		case "cover", "covermode", "coverpkg":
			if command != "test" && value != "false" {
				return a, fmt.Errorf("-%s: go's cover command reads no overlay: use go %s, or san test", name, command)
			}
		}
		switch known {
		case "overlay": // becomes part of this command's overlay
		case "modfile":
			return a, fmt.Errorf("-modfile does not go together with the workspace by which the library is linked: put its contents into go.mod")
		default:
			a.flags = append(a.flags, args[i:i+n]...)
		}
		i += n
	}
	rest := args[i:]
	switch command {
	case "run": // the first package, or all files
		for n := range rest {
			if n > 0 && !strings.HasSuffix(rest[n], ".go") || n > 0 && !strings.HasSuffix(rest[0], ".go") {
				a.packages, a.after = rest[:n], rest[n:]
				return a, nil
			}
		}
	case "test":
		for n, arg := range rest {
			if strings.HasPrefix(arg, "-") {
				a.packages, a.after = rest[:n], rest[n:]
				return a, nil
			}
		}
	}
	a.packages = rest
	return a, nil
}

// rest returns the arguments for go.
func (a arguments) rest() []string {
	return slices.Concat(a.flags, a.packages, a.after)
}

// list returns the flags by which "go list" finds the same packages.
func (a arguments) list() (flags []string) {
	for _, name := range []string{"tags", "compiler"} {
		if value, ok := a.values[name]; ok {
			flags = append(flags, "-"+name+"="+value)
		}
	}
	for _, name := range []string{"race", "msan", "asan"} {
		if value, ok := a.values[name]; ok && value != "false" {
			flags = append(flags, "-"+name)
		}
	}
	return flags
}
