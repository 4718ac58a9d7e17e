package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"slices"
	"strings"
	"testing"
)

// old is a package in one version. changes are what the next version does to it, each with the line of
// the list that it breaks, or none.
const old = `package p

import "example/m/inner"

const Answer inner.Number = 42

var Err error

type Alias = inner.Thing

type Conn struct {
	Hook   func(name string) inner.Number
	secret int
}

func (c *Conn) Read(p []byte) (n int, err error) { return 0, nil }
func (c Conn) Name() string { return "" }

type Source interface{ Next() int }

func Dial(network, address string) (*Conn, error) { return nil, nil }
func Open(s Source) {}
`

const oldInner = `package inner

type Number int

type Thing struct{ Size int }

func (t *Thing) Do(times int) {}
func (t *Thing) quiet() {}

type Unused struct{}
`

var changes = []struct{ name, from, to, breaks string }{
	{"nothing", "", "", ""},

	{"a method is removed", "func (c *Conn) Read(p []byte) (n int, err error) { return 0, nil }", "", "method (*p.Conn).Read([]byte) (int, error)"},
	{"a method has another result", "Name() string { return \"\" }", "Name() int { return 0 }", "method (p.Conn).Name() string"},
	{"a method needs a pointer", "func (c Conn) Name", "func (c *Conn) Name", "method (p.Conn).Name() string"},
	{"a function has one more parameter", "network, address string", "network, address, local string", "func p.Dial(string, string) (*p.Conn, error)"},
	{"a function is variadic", "s Source", "s ...Source", "func p.Open(p.Source)"},
	{"a variable is removed", "var Err error", "", "var p.Err error"},
	{"a constant has another value", "= 42", "= 43", "const p.Answer inner.Number = 42"},
	{"a field has another type", "Hook   func(name string) inner.Number", "Hook func(name string) int", "field p.Conn.Hook func(string) inner.Number"},
	{"a field is no longer exported", "Hook ", "hook ", "field p.Conn.Hook func(string) inner.Number"},
	{"an interface needs one more method", "Next() int", "Next() int; Last() int", "type p.Source interface{Next() int}"},
	{"an aliased type lacks a field", "Size int", "", "field inner.Thing.Size int"},
	{"an aliased type lacks a method", "func (t *Thing) Do(times int) {}", "", "method (*inner.Thing).Do(int)"},
	{"an aliased type cannot be compared", "Size int", "Size int; names []string", "comparable inner.Thing"},
	{"a mentioned type is another", "type Number int", "type Number uint8", "type inner.Number int"},

	{"a method is added", "type Source", "func (c *Conn) Write(p []byte) (n int, err error) { return 0, nil }; type Source", ""},
	{"a field is added", "secret int", "secret int; Limit int", ""},
	{"a function is added", "func Open", "func Listen() {}\nfunc Open", ""},
	{"parameters have other names", "network, address string", "where, what string", ""},
	{"a hook's parameter has another name", "func(name string)", "func(user string)", ""},
	{"what is not exported changes", "secret int", "secret uint", ""},
	{"what no program can name is removed", "type Unused struct{}", "", ""},
	{"a method no longer needs a pointer", "func (c *Conn) Read", "func (c Conn) Read", ""},
}

func TestWhatBreaksAProgramIsFound(t *testing.T) {
	before := listOf(t, old, oldInner)
	for _, change := range changes {
		t.Run(change.name, func(t *testing.T) {
			if change.from != "" && !strings.Contains(old+oldInner, change.from) {
				t.Fatalf("no package has %q", change.from)
			}
			after := listOf(t, replaced(old, change.from, change.to), replaced(oldInner, change.from, change.to))
			lines := missing(before, after)
			if broken := len(lines) > 0; broken != (change.breaks != "") || broken && !slices.Contains(lines, change.breaks) {
				t.Errorf("%q break; want %q", lines, change.breaks)
			}
		})
	}
}

func TestTypeParametersAreAnError(t *testing.T) {
	l := newLister("example/m")
	l.addPackage(check(t, "example/m/p", "package p\n\ntype List[T any] struct{}\n", nil))
	if _, err := l.list(); err == nil {
		t.Error("a generic type was listed as if it had no parameters")
	}
}

// listOf lists package p, which may import inner.
func listOf(t *testing.T, p, inner string) []string {
	t.Helper()
	l := newLister("example/m")
	l.addPackage(check(t, "example/m/p", p, one{check(t, "example/m/inner", inner, nil)}))
	lines, err := l.list()
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func check(t *testing.T, path, source string, imports types.Importer) *types.Package {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, 0)
	if err != nil {
		t.Fatal(err)
	}
	config := types.Config{Importer: imports}
	p, err := config.Check(path, files, []*ast.File{file}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// one is an importer that returns this package, whatever is imported.
type one struct{ p *types.Package }

func (o one) Import(string) (*types.Package, error) { return o.p, nil }

// replaced returns text with from replaced by to. It may lack from, which is then in the other package.
func replaced(text, from, to string) string {
	if from == "" {
		return text
	}
	return strings.Replace(text, from, to, 1)
}
