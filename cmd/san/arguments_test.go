package main

import (
	"strings"
	"testing"
)

func TestArguments(t *testing.T) {
	for _, c := range []struct{ line, packages, rest string }{
		{"build", "", ""},
		{"build ./...", "./...", "./..."},
		{"build -o x -tags a,b -race ./cmd/x", "./cmd/x", "-o x -tags a,b -race ./cmd/x"},
		{"build -v -overlay=o.json --trimpath .", ".", "-v --trimpath ."},
		{"build -overlay o.json -ldflags=-s a b", "a b", "-ldflags=-s a b"},
		{"run . -x y", ".", ". -x y"},
		{"run -race a.go b.go -x c.go", "a.go b.go", "-race a.go b.go -x c.go"},
		{"run a.go", "a.go", "a.go"},
		{"test -run X -count 1 ./a ./b -args -c", "./a ./b", "-run X -count 1 ./a ./b -args -c"},
		{"test -v -own 3 x", "", "-v -own 3 x"},
		{"test ./a -own 3", "./a", "./a -own 3"},
		{"test -args a", "", "-args a"},
		{"test -cover -coverpkg ./... .", ".", "-cover -coverpkg ./... ."},
		{"build -cover=false .", ".", "-cover=false ."},
		{"test -test.run X .", ".", "-test.run X ."},
	} {
		args := strings.Fields(c.line)
		a, err := parseArguments(args[0], args[1:])
		if err != nil {
			t.Errorf("%s: %v", c.line, err)
		}
		if got := strings.Join(a.packages, " "); got != c.packages {
			t.Errorf("%s: packages %q, want %q", c.line, got, c.packages)
		}
		if got := strings.Join(a.rest(), " "); got != c.rest {
			t.Errorf("%s: go gets %q, want %q", c.line, got, c.rest)
		}
	}
}
