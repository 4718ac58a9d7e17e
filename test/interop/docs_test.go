package interop

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The code in docs/PROGRAMS.md is from the programs here: each block, and each piece of code in its
// first table, is literally in one of these files, except for indentation.
func TestTheDocumentedLinesAreCompiled(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var sources []string
	for _, file := range files {
		sources = append(sources, unindented(string(must(os.ReadFile(file)))))
	}
	compiled := func(block string) bool {
		for _, source := range sources {
			if strings.Contains(source, block) {
				return true
			}
		}
		return false
	}
	var found int
	want := func(file, code string) {
		found++
		if !compiled(strings.TrimSpace(unindented(code))) {
			t.Errorf("%s has code that no program here has:\n%s", file, code)
		}
	}
	const programs = "../../docs/PROGRAMS.md"
	for _, code := range goBlocks(t, programs) {
		want(programs, code)
	}
	lines, _, _ := strings.Cut(string(must(os.ReadFile(programs))), "\n## ")
	for _, row := range strings.Split(lines, "\n") {
		if spans := strings.Split(row, "`"); strings.HasPrefix(row, "|") {
			for i := 1; i < len(spans); i += 2 {
				want(programs, spans[i])
			}
		}
	}
	if found < 30 {
		t.Errorf("only %d pieces of code were found in the documents", found)
	}
}

func goBlocks(t *testing.T, file string) (blocks []string) {
	t.Helper()
	for i, block := range strings.Split(string(must(os.ReadFile(file))), "```") {
		if code, isGo := strings.CutPrefix(block, "go\n"); isGo && i%2 == 1 {
			blocks = append(blocks, code)
		}
	}
	return blocks
}

func unindented(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}
