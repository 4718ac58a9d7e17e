package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"go/ast"
	"go/build"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// edits are the changes to a package of the standard library.
type edits struct {
	pkg     string
	added   []byte              // the file that is added, together with renamed functions of the package's own files
	renames map[string][]string // the functions that the added file replaces, by file, and their expected declarations
}

var (
	//go:embed net.go.txt
	addedToNet []byte
	//go:embed syscall.go.txt
	addedToSyscall []byte

	netEdits     = edits{"net", addedToNet, renamed}
	syscallEdits = edits{"syscall", addedToSyscall, map[string][]string{
		"syscall_unix.go": {"func Read(fd int, p []byte) (n int, err error)"},
	}}
)

// addedName is the name of the added file, and of the files by which packages link the library.
const addedName = "zz_san_overlay.go"

// own is the prefix of a package's own functions after renaming, which the added file calls.
const own = "sanPlain"

// renamed are package net's renamed functions.
var renamed = map[string][]string{
	"file_posix.go": {
		"func fileListener(f *os.File) (Listener, error)",
	},
	"lookup.go": {
		"func (r *Resolver) dial(ctx context.Context, network, server string) (Conn, error)",
	},
	"splice_linux.go": {
		"func spliceFrom(c *netFD, r io.Reader) (written int64, err error, handled bool)",
	},
	"tcpsock.go": {
		"func (c *TCPConn) SyscallConn() (syscall.RawConn, error)",
		"func (c *TCPConn) ReadFrom(r io.Reader) (int64, error)",
		"func (c *TCPConn) WriteTo(w io.Writer) (int64, error)",
		"func (c *TCPConn) CloseRead() error",
		"func (c *TCPConn) CloseWrite() error",
		"func (c *TCPConn) SetLinger(sec int) error",
		"func (c *TCPConn) SetKeepAlive(keepalive bool) error",
		"func (c *TCPConn) SetKeepAlivePeriod(d time.Duration) error",
	},
	"tcpsock_posix.go": {
		"func (sd *sysDialer) dialTCP(ctx context.Context, laddr, raddr *TCPAddr) (*TCPConn, error)",
		"func (sl *sysListener) listenTCPProto(ctx context.Context, laddr *TCPAddr, proto int) (*TCPListener, error)",
		"func (ln *TCPListener) accept() (*TCPConn, error)",
		"func (ln *TCPListener) close() error",
	},
	"tcpsock_unix.go": {
		"func (c *TCPConn) SetKeepAliveConfig(config KeepAliveConfig) error",
	},
}

// fields are the fields that structs of package net get, by file and struct, with the struct's expected
// declaration.
var fields = map[string]map[string]field{
	"tcpsock.go": {
		"TCPConn":     {"struct { conn }", "sanConn"},
		"TCPListener": {"struct { fd *netFD; lc ListenConfig }", "sanListener"},
	},
}

type field struct{ expected, added string }

// methods are the methods that package net gives these types, and what is done with each: "renamed";
// "added" (a method of the embedded conn); or "plain", which works on the descriptor or calls another
// of them. A method that is not in this list could reach a connection's descriptor unnoticed.
var methods = map[string]map[string]string{
	"conn": {
		"Read": "added", "Write": "added", "Close": "added", "writeBuffers": "added", "File": "added",
		"SetDeadline": "added", "SetReadDeadline": "added", "SetWriteDeadline": "added",
		"LocalAddr": "plain", "RemoteAddr": "plain", "SetReadBuffer": "plain", "SetWriteBuffer": "plain",
		"ok": "plain",
	},
	"TCPConn": {
		"SyscallConn": "renamed", "ReadFrom": "renamed", "WriteTo": "renamed",
		"CloseRead": "renamed", "CloseWrite": "renamed", "SetLinger": "renamed",
		"SetKeepAlive": "renamed", "SetKeepAlivePeriod": "renamed", "SetKeepAliveConfig": "renamed",
		"SetNoDelay": "plain", "MultipathTCP": "plain", "readFrom": "plain", "writeTo": "plain",
	},
	"TCPListener": {
		"accept": "renamed", "close": "renamed",
		"SyscallConn": "plain", "AcceptTCP": "plain", "Accept": "plain", "Close": "plain", "Addr": "plain",
		"SetDeadline": "plain", "File": "plain", "file": "plain", "ok": "plain",
	},
}

// others are the functions that use TCPConn without having such a receiver.
var others = []string{
	"(*Dialer).DialTCP", "(*sysDialer).dialMPTCP", "(*sysDialer).dialTCP", "(*sysDialer).doDialTCP",
	"(*sysDialer).doDialTCPProto", "(*sysDialer).dialSingle", "(*sysListener).listenMPTCP",
	"(*sysListener).listenTCP", "(*sysListener).listenTCPProto", "DialTCP", "ListenTCP", "dialTCP",
	"fileConn", "fileListener", "genericReadFrom", "genericWriteTo", "newTCPConn", "spliceFrom",
}

// shapeError reports that a package is not as it was when these edits were written.
type shapeError struct{ file, name, expected, found string }

func (e shapeError) Error() string {
	return fmt.Sprintf("%s: %s is not as expected: it should be %s, and is %s. "+
		"This san does not know this version of Go; a newer one may", e.file, e.name, e.expected, e.found)
}

// patch returns the changed files of the package in a directory, by name.
func (e edits) patch(dir, goarch string) (map[string][]byte, error) {
	p := patcher{edits: e, fset: token.NewFileSet(), files: make(map[string]*ast.File)}
	if err := p.parse(dir, goarch); err != nil {
		return nil, err
	}
	steps := []func() error{p.renameAll}
	if e.pkg == "net" {
		steps = []func() error{p.checkAll, p.addFields, p.keyLiterals, p.renameAll}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			if shape, ok := err.(shapeError); ok {
				shape.file = e.pkg + "/" + shape.file
				err = shape
			}
			return nil, err
		}
	}
	changed := map[string][]byte{addedName: e.added}
	for _, name := range slices.Sorted(maps.Keys(e.renames)) {
		var b bytes.Buffer
		if err := format.Node(&b, p.fset, p.files[name]); err != nil {
			return nil, fmt.Errorf("%s/%s: %w", e.pkg, name, err)
		}
		changed[name] = b.Bytes()
	}
	return changed, nil
}

// patcher edits the syntax trees of a package's files.
type patcher struct {
	edits
	fset  *token.FileSet
	files map[string]*ast.File
}

// parse parses the files that are part of the package on Linux.
func (p *patcher) parse(dir, goarch string) error {
	ctx := build.Default
	ctx.GOOS, ctx.GOARCH, ctx.CgoEnabled = "linux", goarch, true
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name := entry.Name()
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		if is, err := ctx.MatchFile(dir, name); err != nil || !is {
			continue
		}
		file, err := parser.ParseFile(p.fset, filepath.Join(dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		p.files[name] = file
	}
	for name := range p.renames {
		if p.files[name] == nil {
			return shapeError{p.pkg + "/" + name, "the file", "part of the package on Linux", "not there"}
		}
	}
	return nil
}

// checkAll searches for declarations that are not known, and could reach a descriptor or conflict with
// the edits.
func (p *patcher) checkAll() error {
	known := make(map[string]bool) // methods that were found
	for _, name := range slices.Sorted(maps.Keys(p.files)) {
		for _, decl := range p.files[name].Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			typ := receiver(f)
			if all, ok := methods[typ]; ok {
				if all[f.Name.Name] == "" {
					return shapeError{name, nameOf(f), "no method of " + typ, "one that is not known"}
				}
				known[typ+"."+f.Name.Name] = true
			} else if mentions(f, "TCPConn") && !slices.Contains(others, nameOf(f)) {
				return shapeError{name, nameOf(f), "no function that uses TCPConn", "one that is not known"}
			}
		}
	}
	for typ, all := range methods {
		for name := range all {
			if !known[typ+"."+name] {
				return shapeError{"*.go", "(*" + typ + ")." + name, "a method", "not there"}
			}
		}
	}
	return nil
}

// addFields adds a field to structs.
func (p *patcher) addFields() error {
	for file, structs := range fields {
		for name, f := range structs {
			spec := p.typeSpec(file, name)
			if spec == nil {
				return shapeError{file, name, f.expected, "not there"}
			}
			typ, _ := spec.Type.(*ast.StructType)
			if found := p.text(spec.Type); found != f.expected || typ == nil {
				return shapeError{file, name, f.expected, found}
			}
			typ.Fields.List = append(typ.Fields.List, &ast.Field{
				Names: []*ast.Ident{ast.NewIdent("san")}, Type: ast.NewIdent(f.added),
			})
		}
	}
	return nil
}

func (p *patcher) typeSpec(file, name string) *ast.TypeSpec {
	for _, decl := range p.files[file].Decls {
		if g, ok := decl.(*ast.GenDecl); ok {
			for _, spec := range g.Specs {
				if t, ok := spec.(*ast.TypeSpec); ok && t.Name.Name == name {
					return t
				}
			}
		}
	}
	return nil
}

// keyLiterals names the field in TCPConn{conn{fd}}, to which another field was added.
func (p *patcher) keyLiterals() error {
	const expected = "TCPConn{conn{fd}} in newTCPConn alone"
	found := 0
	for name, file := range p.files {
		for _, decl := range file.Decls {
			var err error
			ast.Inspect(decl, func(n ast.Node) bool {
				lit, ok := n.(*ast.CompositeLit)
				if !ok || p.text(lit.Type) != "TCPConn" {
					return true
				}
				f, _ := decl.(*ast.FuncDecl)
				if text := p.text(lit); text != "TCPConn{conn{fd}}" || f == nil || f.Name.Name != "newTCPConn" || name != "tcpsock.go" {
					err = shapeError{name, "TCPConn{...}", expected, text}
					return false
				}
				lit.Elts[0] = &ast.KeyValueExpr{Key: ast.NewIdent("conn"), Value: lit.Elts[0]}
				found++
				return false
			})
			if err != nil {
				return err
			}
		}
	}
	if found != 1 {
		return shapeError{"tcpsock.go", "newTCPConn", expected, strconv.Itoa(found) + " of it"}
	}
	return nil
}

// renameAll renames the functions that the added file replaces.
func (p *patcher) renameAll() error {
	for file, all := range p.renames {
		for _, expected := range all {
			if err := p.rename(file, expected); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *patcher) rename(file, expected string) error {
	want := parseFunc(expected)
	for _, decl := range p.files[file].Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || nameOf(f) != nameOf(want) {
			continue
		}
		if found := p.text(&ast.FuncDecl{Recv: f.Recv, Name: f.Name, Type: f.Type}); found != expected {
			return shapeError{file, nameOf(want), expected, found}
		}
		f.Name.Name = own + f.Name.Name
		return nil
	}
	return shapeError{file, nameOf(want), expected, "not there"}
}

// parseFunc parses the declaration of a function without its body.
func parseFunc(decl string) *ast.FuncDecl {
	file, err := parser.ParseFile(token.NewFileSet(), "", "package net; "+decl, parser.SkipObjectResolution)
	if err != nil {
		panic(err)
	}
	return file.Decls[0].(*ast.FuncDecl)
}

// text returns the source of a node in one line.
func (p *patcher) text(n ast.Node) string {
	var b bytes.Buffer
	format.Node(&b, token.NewFileSet(), n)
	lines := strings.Split(b.String(), "\n")
	for i, line := range lines {
		line, _, _ = strings.Cut(line, "//")
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	lines = slices.DeleteFunc(lines, func(s string) bool { return s == "" })
	text := strings.Join(lines, "; ")
	return strings.NewReplacer("{; ", "{ ", "; }", " }", "struct{", "struct {").Replace(text)
}

// receiver returns the name of the type that f is a method of, or "".
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if id, ok := typ.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// nameOf returns a function's name as documentation has it.
func nameOf(f *ast.FuncDecl) string {
	if typ := receiver(f); typ != "" {
		return "(*" + typ + ")." + f.Name.Name
	}
	return f.Name.Name
}

// mentions reports whether a function uses an identifier.
func mentions(f *ast.FuncDecl, name string) (found bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		found = found || ok && id.Name == name
		return !found
	})
	return found
}
