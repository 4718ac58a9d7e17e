package siege

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The tests run this binary again, in roles.
const (
	envRole   = "SAN_SIEGE_ROLE"
	envArgs   = "SAN_SIEGE_ARGS"
	envLimits = "SAN_SIEGE_LIMITS"
)

// roles are what the processes do. A role prints lines for its test, gets commands as lines, and ends
// when standard input does.
var roles = map[string]func(r *roleIO) error{}

func TestMain(m *testing.M) {
	name := os.Getenv(envRole)
	if name == "" {
		os.Exit(m.Run())
	}
	if err := runRole(name); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

func runRole(name string) error {
	role := roles[name]
	if role == nil {
		return fmt.Errorf("no role %q", name)
	}
	if limits := os.Getenv(envLimits); limits != "" {
		return execLimited(limits)
	}
	r := &roleIO{bufio.NewScanner(os.Stdin)}
	r.command() // the test has started the process
	return role(r)
}

// execLimited executes the role again under limits, so that it has them from its start.
func execLimited(limits string) error {
	var by map[int]uint64
	if err := json.Unmarshal([]byte(limits), &by); err != nil {
		return err
	}
	for what, n := range by {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	os.Unsetenv(envLimits)
	return syscall.Exec("/proc/self/exe", os.Args, os.Environ())
}

// roleIO is a role's side of its test.
type roleIO struct{ in *bufio.Scanner }

// args decodes the settings that the test has given to the role.
func (r *roleIO) args(to any) error { return json.Unmarshal([]byte(os.Getenv(envArgs)), to) }

// say prints a line: a word, and a value in JSON.
func (r *roleIO) say(word string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s %s\n", word, b)
}

// command waits for the next command. It returns "" at the end.
func (r *roleIO) command() string {
	if !r.in.Scan() {
		return ""
	}
	return r.in.Text()
}

// untilEnd waits until the test closes standard input.
func (r *roleIO) untilEnd() {
	for r.in.Scan() {
	}
}
