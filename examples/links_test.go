package examples

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

var (
	mdFence   = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	mdCode    = regexp.MustCompile("`[^`\n]*`")
	mdLink    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	mdHeading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
)

// Each link from one document to a file of this repository finds it, and the heading.
func TestTheDocumentsLinksLead(t *testing.T) {
	documents := make(map[string]string) // texts without blocks of code, by path
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && len(path) > 2 && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir // .git, .ci
		case filepath.Ext(path) == ".md":
			b, err := os.ReadFile(path)
			documents[path] = mdFence.ReplaceAllString(string(b), "")
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	links := 0
	for path, text := range documents {
		for _, m := range mdLink.FindAllStringSubmatch(mdCode.ReplaceAllString(text, ""), -1) {
			if !strings.Contains(m[1], "://") {
				links++
				if problem := follow(documents, path, m[1]); problem != "" {
					t.Errorf("%s: the link %s: %s", path, m[1], problem)
				}
			}
		}
	}
	if links < 100 {
		t.Errorf("only %d links in %d documents", links, len(documents))
	}
}

// follow returns what is wrong with a relative link.
func follow(documents map[string]string, from, link string) string {
	file, anchor, hasAnchor := strings.Cut(link, "#")
	to := from
	if file != "" {
		to = filepath.Join(filepath.Dir(from), file)
	}
	if _, err := os.Stat(to); err != nil {
		return "there is no such file"
	}
	if hasAnchor && !anchors(documents[to])[anchor] {
		return "there is no such heading"
	}
	return ""
}

// anchors are the names that forges give to a document's headings.
func anchors(text string) map[string]bool {
	names := make(map[string]bool)
	for _, m := range mdHeading.FindAllStringSubmatch(text, -1) {
		name := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-', r == '_', unicode.IsLetter(r), unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, m[1])
		for i, unique := 0, name; ; i, unique = i+1, fmt.Sprintf("%s-%d", name, i+1) {
			if !names[unique] {
				names[unique] = true
				break
			}
		}
	}
	return names
}
