package main

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"
)

// printVersions prints how binaries were built. It is an error if one of them was not built by this
// command.
func printVersions(w io.Writer, files []string) error {
	if len(files) == 0 {
		return errors.New("version: no binaries are named")
	}
	var failed error
	for _, file := range files {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("version: %w", err))
			continue
		}
		stamp, lib := stampIn(info)
		if stamp == "" {
			fmt.Fprintf(w, "%s: not built by san\n", file)
			failed = errors.Join(failed, fmt.Errorf("version: %s was not built by san", file))
			continue
		}
		fmt.Fprintf(w, "%s: built by san, library %s, package net %s\n", file, lib, stamp)
	}
	return failed
}

// stampIn returns the stamp of a binary, or "", and the version of its library.
func stampIn(info *debug.BuildInfo) (stamp, lib string) {
	for _, m := range info.Deps {
		if s, ok := strings.CutPrefix(m.Path, linkPrefix); ok {
			stamp = s
		}
		if m.Path == modulePath {
			if lib = m.Version; m.Replace != nil {
				lib = m.Replace.Path
			}
		}
	}
	return stamp, lib
}
