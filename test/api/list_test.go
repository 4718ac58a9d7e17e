package api

import (
	"fmt"
	"go/types"
	"maps"
	"slices"
	"strings"
)

// A lister lists what programs can use of a module: the objects that it is given, the module's types
// that these mention, wherever they are declared, and so on. Each thing on which a program can rely is
// one line. So a line that is removed or changed means a broken program, and an additional line does
// not.
type lister struct {
	module string // its path
	lines  map[string]bool
	seen   map[types.Object]bool
	err    error // the first failure to list something
}

func newLister(module string) *lister {
	return &lister{module: module, lines: map[string]bool{}, seen: map[types.Object]bool{}}
}

// list returns the lines, sorted.
func (l *lister) list() ([]string, error) { return slices.Sorted(maps.Keys(l.lines)), l.err }

// addPackage lists everything that a package exports.
func (l *lister) addPackage(p *types.Package) {
	for _, name := range p.Scope().Names() {
		if o := p.Scope().Lookup(name); o.Exported() {
			l.add(o)
		}
	}
}

// add lists an object of a package.
func (l *lister) add(o types.Object) {
	if l.seen[o] {
		return
	}
	l.seen[o] = true
	name := l.qualify(o.Pkg()) + "." + o.Name()
	switch o := o.(type) {
	case *types.Const:
		l.line("const %s %s = %s", name, l.mention(o.Type()), o.Val().ExactString())
	case *types.Var:
		l.line("var %s %s", name, l.mention(o.Type()))
	case *types.Func:
		l.line("func %s%s", name, l.signature(o))
	case *types.TypeName:
		l.addType(name, o)
	}
}

func (l *lister) addType(name string, o *types.TypeName) {
	if alias, ok := o.Type().(*types.Alias); ok {
		l.line("type %s = %s", name, l.mention(alias.Rhs()))
		return
	}
	named := o.Type().(*types.Named)
	if named.TypeParams().Len() > 0 && l.err == nil {
		l.err = fmt.Errorf("%s has type parameters, which are not listed", name)
	}
	if types.Comparable(named) {
		l.line("comparable %s", name)
	}
	switch t := named.Underlying().(type) {
	case *types.Struct:
		l.line("type %s struct", name)
		for f := range t.Fields() {
			if f.Exported() {
				l.line("field %s.%s %s", name, f.Name(), l.mention(f.Type()))
			}
		}
	default: // all methods of an interface are on one line, because programs may implement it
		l.line("type %s %s", name, l.mention(t))
	}
	l.addMethods(name, named)
}

// addMethods lists the methods of a type and of pointers to it, including promoted ones.
func (l *lister) addMethods(name string, t *types.Named) {
	if types.IsInterface(t) {
		return
	}
	for format, receiver := range map[string]types.Type{"method (%s).%s%s": t, "method (*%s).%s%s": types.NewPointer(t)} {
		for m := range types.NewMethodSet(receiver).Methods() {
			if m.Obj().Exported() {
				l.line(format, name, m.Obj().Name(), l.signature(m.Obj().(*types.Func)))
			}
		}
	}
}

func (l *lister) line(format string, args ...any) { l.lines[fmt.Sprintf(format, args...)] = true }

// signature returns a function's type, as written after its name.
func (l *lister) signature(f *types.Func) string {
	return strings.TrimPrefix(l.mention(f.Type()), "func")
}

// mention returns a type as text, and lists the module's types in it.
func (l *lister) mention(t types.Type) string {
	l.follow(t)
	return types.TypeString(withoutNames(t), l.qualify)
}

// follow lists the module's types that are part of t.
func (l *lister) follow(t types.Type) {
	switch t := t.(type) {
	case *types.Named:
		l.followNamed(t.Obj())
	case *types.Alias:
		l.followNamed(t.Obj())
	case *types.Map:
		l.follow(t.Key())
		l.follow(t.Elem())
	case interface{ Elem() types.Type }: // pointers, slices, arrays, channels
		l.follow(t.Elem())
	case *types.Signature:
		for _, tuple := range []*types.Tuple{t.Params(), t.Results()} {
			for v := range tuple.Variables() {
				l.follow(v.Type())
			}
		}
	case *types.Struct:
		for f := range t.Fields() {
			l.follow(f.Type())
		}
	case *types.Interface:
		for m := range t.Methods() {
			l.follow(m.Type())
		}
	}
}

func (l *lister) followNamed(o *types.TypeName) {
	if o.Pkg() != nil && (o.Pkg().Path()+"/" == l.module+"/" || strings.HasPrefix(o.Pkg().Path(), l.module+"/")) {
		l.add(o)
	}
}

// qualify returns how a package is written: by its path within this module, or otherwise by its whole
// path.
func (l *lister) qualify(p *types.Package) string {
	if p.Path() == l.module {
		return p.Name()
	}
	return strings.TrimPrefix(p.Path(), l.module+"/")
}

// withoutNames returns a function's type without the names of parameters, which may change.
func withoutNames(t types.Type) types.Type {
	f, ok := t.(*types.Signature)
	if !ok {
		return t
	}
	unnamed := func(tuple *types.Tuple) *types.Tuple {
		var vars []*types.Var
		for v := range tuple.Variables() {
			vars = append(vars, types.NewParam(v.Pos(), v.Pkg(), "", withoutNames(v.Type())))
		}
		return types.NewTuple(vars...)
	}
	return types.NewSignatureType(nil, nil, nil, unnamed(f.Params()), unnamed(f.Results()), f.Variadic())
}
