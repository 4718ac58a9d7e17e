package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// listed is what "go list" prints about a package.
type listed struct {
	dir, name string
	tests     bool
	expvar    bool // it has the counters of package expvar
}

const listFormat = `{{.Dir}}{{"\t"}}{{.Name}}{{"\t"}}{{len .TestGoFiles}}{{len .XTestGoFiles}}{{"\t"}}` +
	`{{range .Deps}}{{if eq . "expvar"}}expvar{{end}}{{end}}{{"\t"}}{{range .DepsErrors}}{{printf "%q " .Err}}{{end}}`

// list returns the packages that the arguments name.
func (b *builder) list() (all []listed, err error) {
	args := append([]string{"list", "-e", "-f", listFormat}, b.flags...)
	args = append(args, b.args.list()...)
	out, err := b.output(append(append(args, "--"), b.args.packages...)...)
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	quoted := strings.NewReplacer(`\n`, "\n", `\t`, "\t")
	if again, err := b.leaveOut(quoted.Replace(string(out))); again || err != nil {
		if err != nil {
			return nil, err
		}
		return b.list()
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimRight(line, "\n"), "\t")
		if len(f) != 5 || f[0] == "" || f[1] == "" {
			continue // go prints what is wrong with it
		}
		all = append(all, listed{dir: f[0], name: f[1], tests: f[2] != "00", expvar: f[3] != ""})
	}
	return all, nil
}

// addImports makes each program, or with tests the tests of each package, link the library, by a file
// beside the package's files.
func (b *builder) addImports(replace map[string]string, wd string) error {
	packages, err := b.list()
	if err != nil {
		return err
	}
	for _, p := range packages {
		file, name := addedName, p.name
		switch {
		case b.args.command == "test" && p.tests:
			file, name = strings.TrimSuffix(addedName, ".go")+"_test.go", p.name+"_test"
		case b.args.command == "test" || p.name != "main":
			continue
		}
		if isBelow(p.dir, b.env.GOMODCACHE) {
			return fmt.Errorf("%s is in the module cache, where go allows no overlay: clone its repository, and run san %s there", p.dir, b.args.command)
		}
		if dir, ok := strings.CutPrefix(p.dir, b.root+string(filepath.Separator)); ok {
			p.dir = filepath.Join(b.root, dir)
		}
		path := b.linkPath()
		if p.expvar {
			path += "/counters"
		}
		text := fmt.Sprintf("package %s\n\nimport _ %q\n", name, path)
		by := filepath.Join(b.dir, "imports", fmt.Sprintf("%s-%t.go.txt", name, p.expvar))
		if err := writeFile(by, []byte(text)); err != nil {
			return err
		}
		replace[filepath.Join(p.dir, file)] = by
		if files := b.args.packages; len(files) > 0 && strings.HasSuffix(files[0], ".go") { // files of one package
			b.args.packages = append(slices.Clip(files), filepath.Join(filepath.Dir(files[0]), file))
		}
	}
	return nil
}
