// Pauses makes a test run with random pauses between the statements of packages. That produces orders of
// events that otherwise occur only on a loaded machine, after weeks. The packages' own files are not
// changed; an overlay for the go command has the changed ones.
//
//	go run ./test/pauses -o DIR -in 500 -most 3ms ./sanconn ./session
//	go test -overlay DIR/overlay.json ./sanconn -run TestStress
//
// Tests of times and of allocations, and those in bubbles of testing/synctest, fail because of the pauses.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"log"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	call = "pausesBefore(); "
	file = "pauses.go" // has the function; it is added to the package's files
)

const function = `package %s

import (
	"math/rand/v2"
	"time"
)

func pausesBefore() {
	if rand.IntN(%d) == 0 {
		time.Sleep(rand.N(time.Duration(%d)))
	}
}
`

func main() {
	log.SetFlags(0)
	log.SetPrefix("pauses: ")
	out := flag.String("o", "", "`directory` for the overlay, which is made")
	in := flag.Int("in", 500, "pause before one statement in so many")
	most := flag.Duration("most", 3*time.Millisecond, "and for up to this")
	flag.Parse()
	if *out == "" || *in <= 0 || *most <= 0 || flag.NArg() == 0 {
		log.Fatal("want -o DIR and the packages' directories, and -in and -most above 0")
	}
	if err := overlay(*out, *in, *most, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

// overlay writes the overlay of the packages.
func overlay(out string, in int, most time.Duration, dirs []string) error {
	out, err := filepath.Abs(out)
	if err != nil {
		return err
	}
	replace := make(map[string]string)
	for i, dir := range dirs {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return err
		}
		p, err := build.ImportDir(dir, 0)
		if err != nil {
			return err
		}
		texts := map[string][]byte{file: fmt.Appendf(nil, function, p.Name, in, most)}
		for _, name := range p.GoFiles {
			if texts[name], err = planted(filepath.Join(dir, name)); err != nil {
				return err
			}
		}
		to := filepath.Join(out, fmt.Sprint(i))
		if err := os.MkdirAll(to, 0o700); err != nil {
			return err
		}
		for name, text := range texts {
			put := filepath.Join(to, name)
			if err := os.WriteFile(put, text, 0o600); err != nil {
				return err
			}
			replace[filepath.Join(dir, name)] = put
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "overlay.json"), text, 0o600)
}

// planted returns a file with a call before each statement of its blocks.
func planted(name string) ([]byte, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, name, text, 0)
	if err != nil {
		return nil, err
	}
	var at []int
	ast.Inspect(parsed, func(n ast.Node) bool {
		var block []ast.Stmt
		switch n := n.(type) {
		case *ast.BlockStmt:
			block = n.List
		case *ast.CaseClause:
			block = n.Body
		case *ast.CommClause:
			block = n.Body
		}
		for _, s := range block {
			switch s.(type) {
			case *ast.CaseClause, *ast.CommClause: // these are in the block of a switch or a select
			default:
				at = append(at, files.Position(s.Pos()).Offset)
			}
		}
		return true
	})
	slices.Sort(at)
	for _, i := range slices.Backward(at) {
		text = slices.Insert(text, i, []byte(call)...)
	}
	return text, nil
}
