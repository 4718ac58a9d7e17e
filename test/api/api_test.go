package api

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/sanconn/san" // the packages are imported so that a change to them makes go test run these tests again
	_ "github.com/sanconn/san/sanproxy"
)

const module = "github.com/sanconn/san"

var (
	// whole are the packages of which programs may use everything.
	whole = []string{module, module + "/sanconn", module + "/sanproxy"}

	// single are the objects that programs may use of a package that is meant for providers.
	single = map[string][]string{module + "/regcache": {
		"DefaultArena", "DefaultBudget", "Declare", "Watch", "ErrClosed", "ErrInUse",
		"ObjectDied", "RangeWithdrawn", "MappingChanged", "CacheClosed", "UsersLeft", // causes of evictions, in Stats
	}}
)

var (
	platforms = flag.String("api.platforms", "", "GOOS/GOARCH of which to check the API, separated by spaces; default: this one")
	write     = flag.String("api.write", "", "the `version` of which to write the list")
)

func TestTheLastVersionsProgramsStillCompile(t *testing.T) {
	if *write != "" {
		text := strings.Join(apiOf(t, ""), "\n") + "\n"
		if err := os.WriteFile(*write+".txt", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	record := lastRecord(t)
	text, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for _, root := range []string{"san.Dial", "sanconn.Conn", "sanproxy.Proxy", "regcache.Declare"} {
		if !strings.Contains(string(text), " "+root) {
			t.Fatalf("%s has no %s: it is not a list of the API", record, root)
		}
	}
	for _, platform := range strings.Split(*platforms, " ") { // at least one: "" is this platform
		for _, line := range missing(want, apiOf(t, platform)) {
			t.Errorf("%s has this, and the tree has not (%s):\n\t%s\nsee docs/COMPATIBILITY.md", record, cmp.Or(platform, "this platform"), line)
		}
	}
}

// There is a list for the version that is at the top of the changelog, and it is complete.
func TestTheChangelogsVersionHasAList(t *testing.T) {
	text, err := os.ReadFile("../../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	_, heading, _ := strings.Cut(string(text), "\n## v")
	version, _, _ := strings.Cut(heading, "\n")
	version, _, _ = strings.Cut(version, " ")
	if last := lastRecord(t); last != "v"+version+".txt" {
		t.Errorf("the changelog's version is v%s, the last list is %s: CONTRIBUTING.md has how to write one", version, last)
	}
}

// lastRecord returns the list of the newest version.
func lastRecord(t *testing.T) string {
	t.Helper()
	records, err := filepath.Glob("v*.txt")
	if err != nil || len(records) == 0 {
		t.Fatalf("there is no list of any version: %v", err)
	}
	return slices.MaxFunc(records, func(a, b string) int {
		return slices.Compare(version(t, a), version(t, b))
	})
}

func version(t *testing.T, file string) []int {
	t.Helper()
	v := make([]int, 3)
	if _, err := fmt.Sscanf(file, "v%d.%d.%d.txt", &v[0], &v[1], &v[2]); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return v
}

// missing returns the lines of want that got does not have.
func missing(want, got []string) (lines []string) {
	for _, line := range want {
		if !slices.Contains(got, line) {
			lines = append(lines, line)
		}
	}
	return lines
}

// apiOf returns what programs can use of this module on a platform, GOOS/GOARCH, or on this one if
// platform is empty.
func apiOf(t *testing.T, platform string) []string {
	t.Helper()
	types := load(t, platform, slices.AppendSeq(slices.Clone(whole), maps.Keys(single)))
	l := newLister(module)
	for _, path := range whole {
		l.addPackage(types[path])
	}
	for path, names := range single {
		for _, name := range names {
			o := types[path].Scope().Lookup(name)
			if o == nil {
				t.Fatalf("%s has no %s", path, name)
			}
			l.add(o)
		}
	}
	lines, err := l.list()
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// load returns packages as the compiler sees them on a platform.
func load(t *testing.T, platform string, packages []string) map[string]*types.Package {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}"}, packages...)...)
	if goos, goarch, ok := strings.Cut(platform, "/"); ok {
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		exports[path] = file
	}
	compiler := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	loaded := map[string]*types.Package{}
	for _, path := range packages {
		p, err := compiler.Import(path)
		if err != nil {
			t.Fatal(err)
		}
		loaded[path] = p
	}
	return loaded
}
