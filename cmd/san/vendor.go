package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// vendored is a module in a vendor directory.
type vendored struct{ path, version, goLine string }

// vendorDir returns the vendor directory from which go would build the program, or "".
func (b *builder) vendorDir() string {
	if b.env.GOWORK != "" || b.env.GOMOD == "" {
		return ""
	}
	dir := filepath.Join(filepath.Dir(b.env.GOMOD), "vendor")
	switch b.flag("mod") {
	case "", "vendor":
		if _, err := os.Stat(filepath.Join(dir, "modules.txt")); err == nil {
			return dir
		}
	}
	return ""
}

// addVendor makes the program's workspace take the modules of a vendor directory from there, except the
// library's own dependencies, which may be too old and incomplete there.
func (w *work) addVendor(b *builder, dir string, replace map[string]string) error {
	text, err := os.ReadFile(filepath.Join(dir, "modules.txt"))
	if err != nil {
		return err
	}
	own, err := b.ownModules()
	if err != nil {
		return err
	}
	for _, m := range parseVendored(string(text)) {
		if own[m.path] {
			continue
		}
		// Outside a workspace, a program's go.mod need not name all of them.
		w.require = append(w.require, m.path+" "+m.version)
		w.lines = append(w.lines, fmt.Sprintf("replace %s => %q", m.path, filepath.Join(dir, m.path)))
		mod := fmt.Sprintf("module %s\n\ngo %s\n", m.path, m.goLine)
		by := filepath.Join(b.dir, "vendored", strings.ReplaceAll(m.path, "/", "-")+".mod")
		if err := writeFile(by, []byte(mod)); err != nil {
			return err
		}
		replace[filepath.Join(dir, m.path, "go.mod")] = by
	}
	return nil
}

// parseVendored returns the modules that have packages in a vendor directory.
func parseVendored(modulesTxt string) (all []vendored) {
	var m vendored
	for line := range strings.Lines(modulesTxt) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "## "):
			if _, goLine, ok := strings.Cut(line, "go "); ok {
				m.goLine = goLine
			}
		case strings.HasPrefix(line, "# "):
			f := strings.Fields(line)
			m = vendored{goLine: "1.16"} // go's default
			if len(f) > 2 && f[2] != "=>" {
				m.path, m.version = f[1], f[2]
			}
		case line != "" && m.path != "":
			all = append(all, m)
			m.path = "" // each module once
		}
	}
	return all
}

// ownModules returns the modules that the library is made of.
func (b *builder) ownModules() (map[string]bool, error) {
	cmd := b.goCommand("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", b.linkPath())
	cmd.Dir = filepath.Join(b.dir, "link")
	cmd.Env = append(cmd.Env, "GOWORK="+b.linkWork, "GOFLAGS=")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	all := make(map[string]bool)
	for path := range strings.FieldsSeq(string(out)) {
		all[path] = true
	}
	return all, nil
}
