// Package build builds other people's programs from unchanged sources, and the command san, for tests
// and comparisons.
package build

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// run runs a command in a directory. Its output is part of the error.
func run(dir string, env []string, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return nil
}

// San builds the command san. The working directory must be in test/overlay's module.
func San(file string) error {
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	return run(filepath.Join(strings.TrimSpace(string(module)), "..", ".."), nil, "go", "build", "-o", file, "./cmd/san")
}

// Own builds a package of the working directory by a command, go or san.
func Own(command, pkg, file string) error {
	return run(".", nil, command, "build", "-o", file, pkg)
}

// Others builds one of Programs by a command. The programs' sources are below the directory sources;
// Others downloads them if they are missing.
func Others(command, program, sources, file string) error {
	p := Programs[program]
	dir := filepath.Join(sources, p.Source.Name)
	if _, err := os.Stat(dir); err != nil {
		for below, module := range p.Source.Modules {
			if err := Download(filepath.Join(dir, below), module); err != nil {
				return err
			}
		}
	}
	args := append([]string{"build", "-o", file}, p.Flags...)
	return run(filepath.Join(dir, p.Dir), p.Env, command, append(args, p.Package)...)
}

// Download copies the source of a module to a directory. The go command verifies that it is unchanged.
func Download(dir, module string) error {
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir = os.TempDir() // otherwise this module's go.mod would be used
	out, err := cmd.Output()
	var m struct{ Dir string }
	if err == nil {
		err = json.Unmarshal(out, &m)
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", module, err, out)
	}
	return os.CopyFS(dir, os.DirFS(m.Dir))
}
