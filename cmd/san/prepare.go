package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// goEnv is what "go env" prints in the directory in which the program is built.
type goEnv struct {
	GOARCH, GOFLAGS, GOMOD, GOMODCACHE, GOOS, GOROOT, GOVERSION, GOWORK string
}

// builder is a go command to be run, with what it needs.
type builder struct {
	std  stdio
	args arguments
	env  goEnv
	toolchain
	dir      string   // for files that are written for this program
	gowork   string   // its workspace
	work     work     // its content
	linkWork string   // the workspace of the library alone
	flags    []string // besides the overlay
	overlay  string   // the overlay file
}

// prepare writes the files that go needs for a command.
func prepare(std stdio, command string, args []string) (*builder, error) {
	a, err := parseArguments(command, args)
	if err != nil {
		return nil, err
	}
	b := &builder{std: std, args: a}
	if dir, ok := a.values["C"]; ok {
		if err := os.Chdir(dir); err != nil {
			return nil, err
		}
		b.args.flags = dropFlag(b.args.flags, "C")
	}
	if err := b.readEnv(); err != nil {
		return nil, err
	}
	switch {
	case b.env.GOOS != "linux":
		return nil, fmt.Errorf("there is no SAN on %s: use go %s itself", b.env.GOOS, command)
	case os.Getenv("GO111MODULE") == "off":
		return nil, fmt.Errorf("GO111MODULE=off: the library comes as a module, and needs module mode")
	}
	for _, p := range a.packages {
		if strings.Contains(p, "@") {
			return nil, fmt.Errorf("%s: a program in the module cache cannot be given the library: clone its repository, check out that version, and run san %s there", p, command)
		}
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	if b.toolchain, err = newToolchain(std, &b.env, cache); err != nil {
		return nil, err
	}
	library, err := findLibrary(b.env.GOROOT)
	if err != nil {
		return nil, err
	}
	wd, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	program := b.env.GOWORK
	if program == "" {
		program = b.env.GOMOD
	}
	if program == "" || program == os.DevNull {
		program = wd
	}
	key := sha256.Sum256([]byte(program + "\n" + library.String()))
	b.dir = filepath.Join(cache, "program", hex.EncodeToString(key[:8]), b.stamp)
	replace := make(map[string]string)
	for file, by := range b.edited {
		replace[file] = by
	}
	if err := b.makeWorkspace(library, replace); err != nil {
		return nil, err
	}
	if err := b.addImports(replace, wd); err != nil {
		return nil, err
	}
	return b, b.writeOverlay(replace)
}

// readEnv reads what "go env" prints.
func (b *builder) readEnv() error {
	cmd := exec.Command("go", "env", "-json")
	cmd.Stderr = b.std.err
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	if err := json.Unmarshal(out, &b.env); err != nil {
		return err
	}
	if b.env.GOWORK == "off" { // go's word for no go.work
		b.env.GOWORK = ""
	}
	return nil
}

// variables returns the environment variables for go.
func (b *builder) variables() []string {
	all := []string{"GOTOOLCHAIN=local", "GOWORK=" + b.gowork}
	if b.root != b.env.GOROOT {
		all = append(all, "GOROOT="+b.root, "PATH="+filepath.Join(b.root, "bin")+string(os.PathListSeparator)+os.Getenv("PATH"))
	}
	return all
}

// goCommand returns a go command with these variables.
func (b *builder) goCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(b.root, "bin", "go"), args...)
	cmd.Env = append(os.Environ(), b.variables()...)
	cmd.Stderr = b.std.err
	return cmd
}

// output runs a go command and returns what it prints.
func (b *builder) output(args ...string) ([]byte, error) {
	return b.goCommand(args...).Output()
}

// writeOverlay writes the file for -overlay, including the content of the user's own.
func (b *builder) writeOverlay(replace map[string]string) error {
	if file := b.flag("overlay"); file != "" {
		var users struct{ Replace map[string]string }
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &users)
		}
		if err != nil {
			return fmt.Errorf("-overlay=%s: %w", file, err)
		}
		for path, by := range users.Replace {
			if path, err = filepath.Abs(path); err != nil {
				return err
			}
			if _, ours := replace[path]; ours {
				return fmt.Errorf("-overlay=%s replaces %s, which san has to", file, path)
			}
			if replace[path] = by; by != "" {
				if replace[path], err = filepath.Abs(by); err != nil {
					return err
				}
			}
		}
	}
	text, err := json.MarshalIndent(map[string]any{"Replace": replace}, "", "\t")
	if err != nil {
		return err
	}
	// Named by its content: other packages of the program may be built at the same time.
	key := sha256.Sum256(text)
	b.overlay = filepath.Join(b.dir, "overlay-"+hex.EncodeToString(key[:6])+".json")
	return writeFile(b.overlay, append(text, '\n'))
}

// flag returns the value of one of go's flags, from the command line or GOFLAGS.
func (b *builder) flag(name string) string {
	if value, ok := b.args.values[name]; ok {
		return value
	}
	for f := range strings.FieldsSeq(b.env.GOFLAGS) {
		if n, value, ok := strings.Cut(strings.TrimLeft(f, "-"), "="); ok && n == name {
			return value
		}
	}
	return ""
}

// dropFlag removes a flag and its value.
func dropFlag(flags []string, name string) []string {
	for i, f := range flags {
		switch {
		case f == "-"+name, f == "--"+name:
			return append(flags[:i:i], flags[i+2:]...)
		case strings.HasPrefix(strings.TrimLeft(f, "-"), name+"="):
			return append(flags[:i:i], flags[i+1:]...)
		}
	}
	return flags
}
