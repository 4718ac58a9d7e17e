package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// test is a test of a package, by its full name.
type test struct{ pkg, name string }

// top reports whether it is not a subtest. Only then is it certain that the other run has it, too: names
// of subtests may contain addresses.
func (t test) top() bool { return !strings.Contains(t.name, "/") }

// Outcomes, as the go command names them.
const (
	passed = "pass"
	failed = "fail"
)

// results are the results of a run.
type results struct {
	outcome map[test]string
	dialed  map[string]int
}

func (r results) passed() (n int) {
	for _, outcome := range r.outcome {
		if outcome == passed {
			n++
		}
	}
	return n
}

// without returns the tests that have passed in r and not in other. If a test and one of its subtests
// are missing, it returns only the subtest.
func (r results) without(other results) (missing []test) {
	for t, outcome := range r.outcome {
		there, ran := other.outcome[t]
		if outcome == passed && there != passed && (ran || t.top()) {
			missing = append(missing, t)
		}
	}
	return slices.DeleteFunc(missing, func(t test) bool {
		return slices.ContainsFunc(missing, func(sub test) bool {
			return sub.pkg == t.pkg && strings.HasPrefix(sub.name, t.name+"/")
		})
	})
}

// test runs the suite's tests, all or only the named ones, by go or by san, in the latter case with an
// overlay.
func (s suite) test(dir, command, overlay string, only []test) (r results, err error) {
	args := []string{"test", "-json", "-count=1", "-short", "-timeout=15m"}
	if overlay != "" {
		args = append(args, "-overlay="+overlay)
	}
	packages := s.packages
	if only != nil {
		var names []string
		packages = nil
		for _, t := range only {
			top, _, _ := strings.Cut(t.name, "/")
			names = append(names, regexp.QuoteMeta(top))
			packages = append(packages, t.pkg)
		}
		args = append(args, "-run=^("+strings.Join(names, "|")+")$")
		slices.Sort(packages)
		packages = slices.Compact(packages)
	}
	cmd := exec.Command(command, append(args, packages...)...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "SAN_MOVE=now") // plain go ignores it
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, _ := cmd.Output() // it fails if tests fail
	if r, err = parse(out); err == nil && r.passed() == 0 && only == nil {
		err = fmt.Errorf("%s %s: nothing passed\n%s%s", command, strings.Join(cmd.Args[1:], " "), stderr.Bytes(), out)
	}
	return r, err
}

// carried begins the line that a test of count prints.
const carried = "carried by "

// parse parses the output of "go test -json".
func parse(out []byte) (r results, err error) {
	r = results{make(map[test]string), make(map[string]int)}
	for line := range bytes.Lines(out) {
		var event struct{ Action, Package, Test, Output string }
		if json.Unmarshal(line, &event) != nil {
			continue // output of the build
		}
		switch _, counters, ok := strings.Cut(event.Output, carried); {
		case ok:
			var dialed map[string]int
			if err := json.Unmarshal([]byte(counters), &dialed); err != nil {
				return r, fmt.Errorf("%w: %q", err, event.Output)
			}
			for by, n := range dialed {
				r.dialed[by] += n
			}
		case event.Test == "" || event.Test == countTest:
		case event.Action == "pass" || event.Action == "fail" || event.Action == "skip":
			t := test{event.Package, event.Test}
			if old := r.outcome[t]; old != failed { // two files of a package may have tests of the same name
				r.outcome[t] = event.Action
			}
		}
	}
	return r, nil
}

// countTest runs after all other tests, except those that run in parallel.
const countTest = "TestWhatCarried"

const countFile = `package %s_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/sanconn/san"
)

func ` + countTest + `(t *testing.T) {
	dialed, _ := json.Marshal(san.Stats().Dialed)
	fmt.Printf("` + carried + `%%s\n", dialed)
}
`

// count writes an overlay to a directory, by which each package's tests print what has carried their
// connections.
func (s suite) count(by, dir string) (overlay string, err error) {
	cmd := exec.Command("go", append([]string{"list", "-f", "{{.Dir}}\t{{.Name}}"}, s.packages...)...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	replace := make(map[string]string)
	if err := os.MkdirAll(by, 0o777); err != nil {
		return "", err
	}
	for line := range strings.Lines(string(out)) {
		in, name, _ := strings.Cut(strings.TrimSpace(line), "\t")
		file := filepath.Join(by, name+".go.txt")
		if err := os.WriteFile(file, fmt.Appendf(nil, countFile, name), 0o666); err != nil {
			return "", err
		}
		replace[filepath.Join(in, "zz_carried_test.go")] = file
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(by, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o666)
}
