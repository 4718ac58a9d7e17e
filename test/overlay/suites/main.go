// Suites runs other people's tests with plain go, and by the command san with each connection moved at
// once. Tests that pass with go have to pass with san, too, except those that table.go lists.
//
//	go run ./suites [-only REGEXP]
//
// It prints a table, and exits with 1 if another test fails. It has to be run in test/overlay, and takes
// the better part of an hour.
package main

import (
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/sanconn/san/test/overlay/internal/build"
)

func main() {
	log.SetFlags(0)
	only := flag.String("only", "", "run the suites whose name matches `regexp`")
	flag.Parse()
	chosen, err := regexp.Compile(*only)
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "suites")
	if err != nil {
		log.Fatal(err)
	}
	ok, err := compare(dir, chosen)
	os.RemoveAll(dir)
	if err != nil {
		log.Fatal(err)
	}
	if !ok {
		os.Exit(1)
	}
}

// compare prints the table, and reports whether all exceptions are known.
func compare(dir string, chosen *regexp.Regexp) (ok bool, err error) {
	san := filepath.Join(dir, "san")
	if err := build.San(san); err != nil {
		return false, err
	}
	fmt.Printf("%s, %d processors\n\n", runtime.Version(), runtime.NumCPU())
	fmt.Println("| suite | pass with go | with san | dialed: tcp, shm | only with go |")
	fmt.Println("|---|---|---|---|---|")
	ok = true
	for _, s := range suites {
		if !chosen.MatchString(s.name) {
			continue
		}
		c, err := s.run(dir, san)
		if err != nil { // the other suites may still be of use
			log.Printf("%s: %v", s.name, err)
			ok = false
			continue
		}
		fmt.Println(s.row(c))
		ok = ok && s.known(c)
	}
	return ok, nil
}

// comparison is the result of a suite.
type comparison struct {
	plain, san int // how many tests passed
	dialed     map[string]int
	onlyPlain  []string // tests that passed only with plain go, also in a second run
	once       []string // tests that passed in the second run
}

// run runs a suite in both ways.
func (s suite) run(dir, san string) (c comparison, err error) {
	source, err := s.source(dir)
	if err != nil {
		return c, err
	}
	plain, err := s.test(source, "go", "", nil)
	if err != nil {
		return c, err
	}
	overlay, err := s.count(filepath.Join(dir, "count"), source)
	if err != nil {
		return c, err
	}
	moved, err := s.test(source, san, overlay, nil)
	if err != nil {
		return c, err
	}
	c = comparison{plain: plain.passed(), san: moved.passed(), dialed: moved.dialed}
	if c.dialed["shm"] == 0 {
		return c, fmt.Errorf("nothing has moved: %v", c.dialed)
	}
	missing := plain.without(moved)
	if len(missing) == 0 {
		return c, nil
	}
	again, err := s.test(source, san, overlay, missing)
	if err != nil {
		return c, err
	}
	for _, t := range missing {
		if again.outcome[t] == passed {
			c.once = append(c.once, t.name)
		} else {
			c.onlyPlain = append(c.onlyPlain, t.name)
		}
	}
	return c, nil
}

// source copies the suite's module into the directory, and returns where it is.
func (s suite) source(dir string) (string, error) {
	if s.module == "" {
		return dir, nil
	}
	dir = filepath.Join(dir, strings.ReplaceAll(s.name, "/", "-"))
	err := build.Download(dir, s.module)
	if err == nil && s.mod != "" {
		for _, ending := range []string{".mod", ".sum"} {
			if err = os.Rename(filepath.Join(dir, s.mod+ending), filepath.Join(dir, "go"+ending)); err != nil {
				return "", err
			}
		}
	}
	return dir, err
}

// row returns a line of the table. A known exception is listed once for all of its subtests.
func (s suite) row(c comparison) string {
	var exceptions []string
	subtests := make(map[string]int)
	for _, name := range c.onlyPlain {
		if key, ok := s.exception(name); ok {
			subtests[key]++
		} else {
			exceptions = append(exceptions, "`"+name+"`: **not known**")
		}
	}
	for _, key := range slices.Sorted(maps.Keys(subtests)) {
		exceptions = append(exceptions, fmt.Sprintf("`%s` (%d) %s", key, subtests[key], s.except[key]))
	}
	if len(c.once) > 0 {
		exceptions = append(exceptions, "failed once, then passed: `"+strings.Join(c.once, "`, `")+"`")
	}
	return fmt.Sprintf("| %s | %d | %d | %d, %d | %s |", s.name, c.plain, c.san,
		c.dialed["tcp"], c.dialed["shm"], strings.Join(exceptions, "; "))
}

// exception returns the key of the known exception for a test: its own, or that of the test whose
// subtest it is.
func (s suite) exception(name string) (key string, ok bool) {
	if _, ok = s.except[name]; !ok {
		name, _, _ = strings.Cut(name, "/")
		_, ok = s.except[name]
	}
	return name, ok
}

func (s suite) known(c comparison) bool {
	return !slices.ContainsFunc(c.onlyPlain, func(name string) bool {
		_, ok := s.exception(name)
		return !ok
	})
}
