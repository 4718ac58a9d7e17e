package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"go/version"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// toolchain is the Go that a program is built with, and its packages net and syscall.
type toolchain struct {
	root   string            // where go is, and takes the standard library from
	stamp  string            // identifies the version of Go and the edits
	edited map[string]string // files by the path of the file that each replaces
}

// cacheDir returns the directory for files that this command makes. All of them may be deleted, and are
// made again.
func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "san"), err
}

// newToolchain edits these packages, and keeps the result under the version of Go and the result's
// content.
func newToolchain(std stdio, env *goEnv, cache string) (t toolchain, err error) {
	if version.Compare(strings.Fields(env.GOVERSION)[0], oldestGo) < 0 {
		return t, fmt.Errorf("the program is built with %s, and the library needs %s: GOTOOLCHAIN=%s.0 or later has go use that",
			env.GOVERSION, oldestGo, oldestGo)
	}
	t.root = env.GOROOT
	if isBelow(t.root, env.GOMODCACHE) {
		if t.root, err = outside(std.err, t.root, cache); err != nil {
			return t, err
		}
	}
	files := make(map[string][]byte) // by their paths in src
	for _, e := range []edits{netEdits, syscallEdits} {
		changed, err := e.patch(filepath.Join(t.root, "src", e.pkg), env.GOARCH)
		if err != nil {
			return t, err
		}
		for name, text := range changed {
			files[filepath.Join(e.pkg, name)] = text
		}
	}
	t.stamp = stampOf(env.GOVERSION, files)
	t.edited = make(map[string]string)
	for name, text := range files {
		file := filepath.Join(cache, "std", t.stamp, name)
		if err := writeFile(file, text); err != nil {
			return t, err
		}
		t.edited[filepath.Join(t.root, "src", name)] = file
	}
	return t, nil
}

// oldestGo is the older of the two versions that are supported.
const oldestGo = "go1.25"

// stampOf returns a name for edited files that can be part of an import path.
func stampOf(goversion string, files map[string][]byte) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s %d\n", name, len(files[name]))
		h.Write(files[name])
	}
	goversion = regexp.MustCompile(`[^a-z0-9.]+`).ReplaceAllString(goversion, "-")
	return goversion + "-" + hex.EncodeToString(h.Sum(nil))[:12]
}

// isBelow reports whether a path is in a directory.
func isBelow(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && dir != "" && filepath.IsLocal(rel)
}

// outside returns a GOROOT equal to one in the module cache, whose files go does not let an overlay
// replace: a directory of symbolic links.
func outside(log io.Writer, root, cache string) (string, error) {
	sum := sha256.Sum256([]byte(root)) // another module cache may have one of the same name
	dir := filepath.Join(cache, "goroot", fmt.Sprintf("%s-%x", filepath.Base(root), sum[:4]))
	entries, err := os.ReadDir(root)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o777&^umask); err != nil {
		return "", err
	}
	made := false
	for _, e := range entries {
		err := os.Symlink(filepath.Join(root, e.Name()), filepath.Join(dir, e.Name()))
		if err != nil && !os.IsExist(err) {
			return "", err
		}
		made = made || err == nil
	}
	if made {
		fmt.Fprintf(log, "san: GOROOT is %s, with links to %s, where go allows no overlay\n", dir, root)
	}
	return dir, nil
}

// writeFile writes a file unless it has this content already. Other processes see all of it or nothing.
func writeFile(name string, text []byte) error {
	if is, err := os.ReadFile(name); err == nil && string(is) == string(text) {
		return nil
	}
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o777&^umask); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err = f.Write(text); err == nil {
		err = f.Chmod(0o666 &^ umask)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	return err
}

// umask keeps others from changing cached files, or replacing them.
const umask = 0o022
