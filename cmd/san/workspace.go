package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/version"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// modulePath is the library's module path.
const modulePath = "github.com/sanconn/san"

// library is where the library comes from.
type library struct {
	version string // the version of a release
	source  string // or the directory of its source
}

func (l library) String() string { return l.version + l.source }

// findLibrary returns the library of this command's own version: the release that it was
// installed from, or the source that it was built from.
func findLibrary(goroot string) (library, error) {
	if dir := os.Getenv("SAN_SOURCE"); dir != "" {
		dir, err := filepath.Abs(dir)
		if err == nil && !isLibrary(dir) {
			err = fmt.Errorf("SAN_SOURCE=%s has no go.mod of %s", dir, modulePath)
		}
		return library{source: dir}, err
	}
	info, ok := debug.ReadBuildInfo()
	if ok && info.Main.Path == modulePath && info.Main.Sum != "" {
		return library{version: info.Main.Version}, nil
	}
	if _, file, _, ok := runtime.Caller(0); ok {
		if dir := filepath.Dir(filepath.Dir(filepath.Dir(file))); isLibrary(dir) {
			return library{source: dir}, nil
		}
	}
	return library{}, fmt.Errorf("this san is no release of %s, and the source that it was built from is gone: "+
		"set SAN_SOURCE to a directory with it", modulePath)
}

func isLibrary(dir string) bool {
	text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	return err == nil && strings.HasPrefix(string(text), "module "+modulePath+"\n")
}

// linkPath returns the path of a module, and of the package in it, which requires the library and links
// it. Its last element is the stamp, so that a binary's list of modules shows how it was built.
func (b *builder) linkPath() string { return linkPrefix + b.stamp }

const linkPrefix = modulePath + "/overlay/"

// linkFile returns the source of a file that links the library into a program.
func linkFile(counters bool) string {
	text := "package link\n\nimport _ \"" + modulePath + "/overlay\"\n"
	if counters {
		text += "import _ \"" + modulePath + "/overlay/counters\"\n"
	}
	return text
}

// makeWorkspace makes go build the program in a workspace of its modules and one more, which requires
// the library. So the program's own go.mod, go.sum and go line stay as they are.
func (b *builder) makeWorkspace(lib library, replace map[string]string) error {
	w := work{use: []string{filepath.Join(b.dir, "link")}, goLine: libraryGo}
	if lib.source != "" {
		w.lines = append(w.lines, fmt.Sprintf("replace %s => %q", modulePath, lib.source))
	}
	b.gowork = filepath.Join(b.dir, "go.work")
	vendor := b.vendorDir()
	var err error
	switch {
	case b.env.GOWORK != "":
		err = w.addWorkspace(b, b.env.GOWORK)
	case vendor != "":
		if err = b.makeLibraryWork(lib, w); err == nil {
			err = w.addVendor(b, vendor, replace)
		}
		// The vendored modules are in the workspace now.
		b.args.flags = dropFlag(b.args.flags, "mod")
		b.flags = append(b.flags, "-mod=readonly")
		fallthrough
	case b.env.GOMOD != "" && b.env.GOMOD != os.DevNull:
		err = errors.Join(err, w.addModule(b, b.env.GOMOD))
	default:
		// No module sets GODEBUG: Go's own defaults hold, as without the workspace.
		if v, _, _ := strings.Cut(b.env.GOVERSION, " "); version.IsValid(v) {
			w.setGo(strings.TrimPrefix(v, "go"), nil)
		}
	}
	if err != nil {
		return err
	}
	if err := b.makeLink(lib, w.require); err != nil {
		return err
	}
	b.work = w
	return writeFile(b.gowork, w.text())
}

// ambiguous matches what go prints about a package that two modules have.
var ambiguous = regexp.MustCompile(`found package \S+ in multiple modules:((?:\n\t\S+ \S+ \(.*\))+)`)

// leaveOut removes from the workspace modules that make imports ambiguous and that the program's go.mod
// does not list: in a workspace, go reads more of the module graph than for the program alone. It
// reports whether there were any.
func (b *builder) leaveOut(errs string) (bool, error) {
	if b.env.GOWORK != "" {
		return false, nil
	}
	empty := filepath.Join(b.dir, "empty")
	if err := writeFile(filepath.Join(empty, "go.mod"), []byte("module empty\n")); err != nil {
		return false, err
	}
	before := len(b.work.lines)
	for _, match := range ambiguous.FindAllStringSubmatch(errs, -1) {
		for line := range strings.Lines(strings.TrimSpace(match[1])) {
			path := strings.Fields(line)[0]
			replace := fmt.Sprintf("replace %s => %q", path, empty)
			if !b.work.known[path] && !slices.Contains(b.work.lines, replace) {
				b.work.lines = append(b.work.lines, replace)
			}
		}
	}
	return len(b.work.lines) > before, writeFile(b.gowork, b.work.text())
}

// makeLibraryWork writes a workspace of the library alone.
func (b *builder) makeLibraryWork(lib library, w work) error {
	b.linkWork = filepath.Join(b.dir, "library", "go.work")
	if err := writeFile(b.linkWork, w.text()); err != nil {
		return err
	}
	return b.makeLink(lib, nil)
}

// libraryGo is a version that is no older than the go line of the library's go.mod.
const libraryGo = "1.25.0"

// makeLink writes the module that links the library.
func (b *builder) makeLink(lib library, more []string) error {
	require := lib.version
	var sums []byte
	if lib.source != "" {
		require = "v0.0.0"
		sums, _ = os.ReadFile(filepath.Join(lib.source, "go.sum")) // without it go fetches the sums
	}
	mod := fmt.Sprintf("module %s\n\ngo %s\n\nrequire %s %s\n", b.linkPath(), libraryGo, modulePath, require)
	for _, r := range more {
		mod += "require " + r + "\n"
	}
	dir := filepath.Join(b.dir, "link")
	for name, text := range map[string]string{
		"go.mod":               mod,
		"go.sum":               string(sums),
		"link.go":              linkFile(false),
		"counters/counters.go": linkFile(true),
	} {
		if name == "go.sum" && text == "" {
			continue
		}
		if err := writeFile(filepath.Join(dir, name), []byte(text)); err != nil {
			return err
		}
	}
	return nil
}

// work is a go.work.
type work struct {
	goLine  string
	use     []string
	godebug []godebug
	lines   []string // replace directives
	require []string // for the module that links the library

	known map[string]bool // modules that the program's go.mod requires
}

type godebug struct{ Key, Value string }

type module struct{ Path, Version string }

type replacement struct{ Old, New module }

// text returns the content of the go.work file.
func (w *work) text() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "go %s\n\n", w.goLine)
	for _, g := range w.godebug {
		fmt.Fprintf(&b, "godebug %s=%s\n", g.Key, g.Value)
	}
	for _, dir := range w.use {
		fmt.Fprintf(&b, "use %q\n", dir)
	}
	for _, line := range w.lines {
		fmt.Fprintln(&b, line)
	}
	return b.Bytes()
}

// setGo keeps the GODEBUG of the program's go line, while the workspace has the library's go line if
// that is newer.
func (w *work) setGo(line string, settings []godebug) {
	w.godebug = settings
	if line == "" {
		line = "1.16" // go's default
	}
	if version.Compare("go"+line, "go"+libraryGo) >= 0 {
		w.goLine = line
		return
	}
	for _, g := range settings {
		if g.Key == "default" {
			return
		}
	}
	w.godebug = append([]godebug{{"default", "go" + majorOf(line)}}, settings...)
}

// majorOf returns 1.N of a go line.
func majorOf(line string) string { return strings.TrimPrefix(version.Lang("go"+line), "go") }

// addModule adds a module that is not part of a workspace.
func (w *work) addModule(b *builder, gomod string) error {
	var mod struct {
		Go      string
		Godebug []godebug
		Require []module
	}
	if err := b.readMod(&mod, "mod", "edit", "-json", gomod); err != nil {
		return err
	}
	w.setGo(mod.Go, mod.Godebug)
	w.use = append(w.use, filepath.Dir(gomod))
	w.known = map[string]bool{modulePath: true}
	for _, m := range mod.Require {
		w.known[m.Path] = true
	}
	return nil
}

// addWorkspace adds everything that a workspace has.
func (w *work) addWorkspace(b *builder, gowork string) error {
	var is struct {
		Go      string
		Godebug []godebug
		Use     []struct{ DiskPath string }
		Replace []replacement
	}
	if err := b.readMod(&is, "work", "edit", "-json", gowork); err != nil {
		return err
	}
	w.setGo(is.Go, is.Godebug)
	dir := filepath.Dir(gowork)
	absolute := func(path string) string {
		if filepath.IsAbs(path) {
			return path
		}
		return filepath.Join(dir, path)
	}
	for _, u := range is.Use {
		w.use = append(w.use, absolute(u.DiskPath))
	}
	for _, r := range is.Replace {
		if r.Old.Path == modulePath {
			continue // this command's own is used instead
		}
		if r.New.Version == "" {
			r.New.Path = absolute(r.New.Path)
		}
		w.lines = append(w.lines, fmt.Sprintf("replace %s %s => %q %s", r.Old.Path, r.Old.Version, r.New.Path, r.New.Version))
	}
	if _, err := os.Stat(filepath.Join(b.dir, "go.work.sum")); err == nil {
		return nil
	}
	if sums, err := os.ReadFile(gowork + ".sum"); err == nil {
		return writeFile(filepath.Join(b.dir, "go.work.sum"), sums)
	}
	return nil
}

// readMod reads what go prints about a go.mod or go.work.
func (b *builder) readMod(into any, args ...string) error {
	cmd := b.goCommand(args...)
	cmd.Env = append(cmd.Env, "GOWORK=off", "GOFLAGS=")
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	return json.Unmarshal(out, into)
}
