// Pauses has a test run with pauses at random between the statements of packages: orders of events that
// else take a loaded machine and weeks. The packages' own files stay as they are; an overlay of
// cmd/go has the others.
//
//	go run ./test/pauses -o DIR ./sanconn ./session
//	PAUSES_ONE_IN=500 PAUSES_MOST=3ms go test -overlay DIR/overlay.json ./sanconn -run TestStress
//
// One statement in PAUSES_ONE_IN is preceded by a pause of up to PAUSES_MOST; without them, none is.
// Tests of times and of allocations, and those in bubbles of testing/synctest, fail by the pauses themselves.
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
)

const (
	call = "pausesBefore(); "
	file = "pauses.go" // what has the function, beside the package's files
)

const function = `package %s

import (
	"math/rand/v2"
	"os"
	"strconv"
	"time"
)

var (
	pausesOneIn, _ = strconv.Atoi(os.Getenv("PAUSES_ONE_IN"))
	pausesMost, _  = time.ParseDuration(os.Getenv("PAUSES_MOST"))
)

func pausesBefore() {
	if pausesOneIn > 0 && pausesMost > 0 && rand.IntN(pausesOneIn) == 0 {
		time.Sleep(rand.N(pausesMost))
	}
}
`

func main() {
	log.SetFlags(0)
	log.SetPrefix("pauses: ")
	out := flag.String("o", "", "`directory` for the overlay, which is made")
	flag.Parse()
	if *out == "" || flag.NArg() == 0 {
		log.Fatal("want -o DIR and the packages' directories")
	}
	if err := overlay(*out, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

// overlay writes the overlay of packages.
func overlay(out string, dirs []string) error {
	out, err := filepath.Abs(out)
	if err != nil {
		return err
	}
	replace := make(map[string]string)
	for i, dir := range dirs {
		p, err := build.ImportDir(dir, 0)
		if err != nil {
			return err
		}
		to := filepath.Join(out, fmt.Sprint(i))
		if err := os.MkdirAll(to, 0o700); err != nil {
			return err
		}
		put := func(name string, text []byte) error {
			from, err := filepath.Abs(filepath.Join(dir, name))
			replace[from] = filepath.Join(to, name)
			if err == nil {
				err = os.WriteFile(replace[from], text, 0o600)
			}
			return err
		}
		for _, name := range p.GoFiles {
			text, err := planted(filepath.Join(dir, name))
			if err == nil {
				err = put(name, text)
			}
			if err != nil {
				return err
			}
		}
		if err := put(file, fmt.Appendf(nil, function, p.Name)); err != nil {
			return err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "overlay.json"), text, 0o600)
}

// planted returns a file with a call before each statement of a block.
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
			case *ast.CaseClause, *ast.CommClause: // of a switch's or a select's block
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
