package main

import (
	"bytes"
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"text/tabwriter"
)

// areas has the areas of a tree in the order in which they are printed.
var areas = []string{"product", "tests", "Python", "Python's tests", "tools"}

// A tree has the counts of a checkout.
type tree struct {
	lines    map[string]int // for each area
	files    map[string]int
	packages map[string]map[string]bool // for each area the folders with Go files
	tests    int                        // tests, fuzz tests and examples in Go, methods in Python
	pages    int
}

// area returns the area of a file. Tests also include the packages that only tests import or that only have
// tests. Tools are the programs and scripts with which gohvd itself is built, checked and measured.
func area(name string) string {
	test := strings.HasSuffix(name, "_test.go") || strings.Contains(name, "/testdata/")
	for _, folder := range strings.Split(path.Dir(name), "/") {
		test = test || strings.HasPrefix(folder, "test") || len(folder) > 4 && strings.HasSuffix(folder, "test")
	}
	for _, folder := range []string{"internal/lint/", "internal/e2e/", "internal/conformance/"} {
		test = test || strings.HasPrefix(name, folder)
	}
	switch first, _, _ := strings.Cut(name, "/"); {
	case first == "python" && test:
		return "Python's tests"
	case first == "python":
		return "Python"
	case first == "tools" || first == "scripts" || first == "bench" || first == ".ci" || name == "Makefile":
		return "tools"
	case test:
		return "tests"
	}
	return "product"
}

var (
	testFunction = regexp.MustCompile(`(?m)^func (Test|Fuzz|Example)\w*\((t \*testing\.T|f \*testing\.F)?\)`)
	testMethod   = regexp.MustCompile(`(?m)^\s+def test_\w+\(`)
)

// countTree counts the files of a checkout that git knows or would add.
func countTree(dir string) (*tree, error) {
	list := exec.Command("git", "-C", dir, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	names, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files in %s: %w", dir, err)
	}
	t := &tree{
		lines: make(map[string]int), files: make(map[string]int), packages: make(map[string]map[string]bool),
	}
	for _, name := range strings.Split(strings.Trim(string(names), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if os.IsNotExist(err) {
			continue // it is deleted, but not yet in the index
		}
		if err != nil {
			return nil, err
		}
		t.add(name, text)
	}
	return t, nil
}

// add counts a file.
func (t *tree) add(name string, text []byte) {
	if path.Ext(name) == ".md" {
		t.pages++
		return
	}
	n, ok := codeLines(name, text)
	if !ok {
		return
	}
	a := area(name)
	t.lines[a] += n
	t.files[a]++
	if path.Ext(name) == ".go" && !strings.HasSuffix(name, "_test.go") && !strings.Contains(name, "/testdata/") {
		if t.packages[a] == nil {
			t.packages[a] = make(map[string]bool)
		}
		t.packages[a][path.Dir(name)] = true
	}
	switch {
	case strings.HasSuffix(name, "_test.go"):
		t.tests += len(testFunction.FindAll(text, -1))
	case path.Ext(name) == ".py" && a == "Python's tests":
		t.tests += len(testMethod.FindAll(text, -1))
	}
}

func (t *tree) print() {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "area\tcode lines\tfiles\tGo packages")
	for _, a := range areas {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\n", a, t.lines[a], t.files[a], len(t.packages[a]))
	}
	w.Flush()
	fmt.Printf("\ntests: %d functions and methods\npages: %d\n", t.tests, t.pages)
}

var generated = regexp.MustCompile(`(?m)^(//|#) Code generated .* DO NOT EDIT\.$`)

// codeLines returns the number of lines with code. It returns false if the file has no code, or is
// generated.
func codeLines(name string, text []byte) (n int, ok bool) {
	if generated.Match(text) {
		return 0, false
	}
	switch ext := path.Ext(name); {
	case ext == ".go":
		return goLines(text), true
	case ext == ".c" || ext == ".h" || ext == ".s":
		return lines(cComment.ReplaceAllFunc(text, onlyBreaks), ""), true
	case ext == ".py":
		return lines(docString.ReplaceAllFunc(text, onlyBreaks), "#"), true
	case ext == ".sh" || name == "Makefile" || strings.HasPrefix(name, ".ci/") && bytes.HasPrefix(text, []byte("#!")):
		return lines(text, "#"), true
	}
	return 0, false
}

var (
	cComment  = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	docString = regexp.MustCompile(`(?ms)^[ \t]*[rR]?""".*?"""[ \t]*$`)
)

// onlyBreaks replaces a comment by its line breaks.
func onlyBreaks(comment []byte) []byte {
	return bytes.Repeat([]byte("\n"), bytes.Count(comment, []byte("\n")))
}

// lines counts the lines that are not blank and do not begin with the mark of a comment.
func lines(text []byte, comment string) (n int) {
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && (comment == "" || !bytes.HasPrefix(line, []byte(comment))) {
			n++
		}
	}
	return n
}

// goLines counts the lines with a part of a token. Blank lines in a string count as well.
func goLines(text []byte) (n int) {
	file := token.NewFileSet().AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	last := 0
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return n
		}
		if tok == token.SEMICOLON && literal == "\n" {
			continue // the scanner has inserted it
		}
		first := file.Line(pos)
		end := first + strings.Count(literal, "\n")
		n += end - max(first-1, last)
		last = end
	}
}
