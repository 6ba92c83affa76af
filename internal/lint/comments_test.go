package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// tabColumns is the width of a tab in Go files.
const tabColumns = 4

// ofInterfaces has exported methods that need no comment, because they implement a well-known interface of
// the standard library or of the flag library.
var ofInterfaces = []string{
	"Error", "Unwrap", "Is", "As", "String", "GoString", "Format", "MarshalText", "UnmarshalText",
	"MarshalJSON", "UnmarshalJSON",
	"Type", "Set", "Len", "Less", "Swap", "Push", "Pop", "Read", "Write", "Close", "Accept", "Addr",
	"Describe", "Collect", "ServeHTTP",
}

// notVerbs has words that are not verbs. If such a word follows the name of a function in its doc comment,
// the comment says what the function is and not what it does.
var notVerbs = []string{"is", "are", "was", "has", "a", "an", "the", "of", "for", "as", "in", "and", "its",
	"one", "this"}

// goFile is a Go file that is not generated.
type goFile struct {
	path   string
	lines  []string
	parsed *ast.File
	fset   *token.FileSet
}

func (f *goFile) test() bool { return strings.HasSuffix(f.path, "_test.go") }

func (f *goFile) line(pos token.Pos) int { return f.fset.Position(pos).Line }

// rawStrings returns the numbers of all lines in string literals that span several lines.
func (f *goFile) rawStrings() map[int]bool {
	lines := make(map[int]bool)
	ast.Inspect(f.parsed, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			for l := f.line(lit.Pos()); f.line(lit.Pos()) < f.line(lit.End()) && l <= f.line(lit.End()); l++ {
				lines[l] = true
			}
		}
		return true
	})
	return lines
}

// readGoFiles returns all Go files that are not generated.
func readGoFiles(t *testing.T) (all []*goFile) {
	root := moduleRoot(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != root && (name[0] == '.' || name == "testdata") {
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f := &goFile{lines: strings.Split(string(text), "\n"), fset: token.NewFileSet()}
		if f.path, err = filepath.Rel(root, path); err != nil {
			return err
		}
		if f.parsed, err = parser.ParseFile(f.fset, path, text, parser.ParseComments); err != nil {
			return err
		}
		if !ast.IsGenerated(f.parsed) {
			all = append(all, f)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 300 {
		t.Fatalf("read %d Go files, want at least 300", len(all))
	}
	return all
}

// Exported identifiers have a doc comment. Every doc comment of a function begins with the name of the
// function and a verb. So the comment says what the function does. A comment that says what the function is
// leaves open whether it blocks, fails or changes anything.
func TestDocComments(t *testing.T) {
	for _, f := range readGoFiles(t) {
		if f.test() {
			continue
		}
		for _, d := range f.parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				checkFunc(t, f, d)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					checkSpec(t, f, d, s)
				}
			}
		}
	}
}

// checkFunc checks the comment of a function or method.
func checkFunc(t *testing.T, f *goFile, d *ast.FuncDecl) {
	name := d.Name.Name
	words := strings.Fields(d.Doc.Text())
	switch {
	case len(words) == 0:
		if d.Name.IsExported() && (d.Recv == nil || exportedReceiver(d) &&
			!slices.Contains(ofInterfaces, name)) {
			t.Errorf("%s:%d: %s has no doc comment", f.path, f.line(d.Pos()), name)
		}
	case words[0] != name:
		t.Errorf("%s:%d: the doc comment of %s begins with %q, want the name", f.path, f.line(d.Pos()), name,
			words[0])
	// These forms are allowed, because the standard library uses them.
	case len(words) > 2 && words[1] == "is" && (words[2] == "like" || words[2] == "called"):
	case len(words) < 2 || slices.Contains(notVerbs, words[1]):
		t.Errorf("%s:%d: the doc comment of %s says what it is, want what it does: %q",
			f.path, f.line(d.Pos()), name, strings.Join(words[:min(len(words), 3)], " "))
	}
}

// exportedReceiver reports whether the type of a method is exported. Methods of other types implement
// interfaces, whose comments describe them.
func exportedReceiver(d *ast.FuncDecl) bool {
	x := d.Recv.List[0].Type
	for {
		switch t := x.(type) {
		case *ast.StarExpr:
			x = t.X
		case *ast.IndexExpr:
			x = t.X
		case *ast.IndexListExpr:
			x = t.X
		default:
			return x.(*ast.Ident).IsExported()
		}
	}
}

// checkSpec checks the comment of a type, constant or variable.
func checkSpec(t *testing.T, f *goFile, d *ast.GenDecl, s ast.Spec) {
	switch s := s.(type) {
	case *ast.TypeSpec:
		doc := s.Doc
		if doc == nil {
			doc = d.Doc
		}
		words := strings.Fields(doc.Text())
		name := s.Name.Name
		if len(words) == 0 {
			if s.Name.IsExported() {
				t.Errorf("%s:%d: type %s has no doc comment", f.path, f.line(s.Pos()), name)
			}
			return
		}
		if i := slices.Index([]string{"A", "An", "The"}, words[0]); i >= 0 && len(words) > 1 {
			words = words[1:]
		}
		if words[0] != name && len(d.Specs) == 1 {
			t.Errorf("%s:%d: the doc comment of type %s begins with %q, want the name", f.path,
				f.line(s.Pos()), name, words[0])
		}
	case *ast.ValueSpec:
		if s.Names[0].IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
			t.Errorf("%s:%d: %s has no doc comment", f.path, f.line(s.Pos()), s.Names[0].Name)
		}
	}
}

// retiredInGo matches words that comments and texts in Go files must not use, because the field has other
// words for their meaning. Some retired words are only in the list for pages, because they also are names of
// programs or have another meaning in code.
var retiredInGo = regexp.MustCompile(
	`(?i)\b(whoever|doorway|farewell|heeds?|heeded|rouse[sd]?|hurry|hurries|in vain|anew|lest)\b`)

// Go files do not use the retired words, because a reader cannot look up a private word in any other
// document.
func TestRetiredWordsInGo(t *testing.T) {
	for _, f := range readGoFiles(t) {
		if strings.HasPrefix(f.path, "internal/lint/") {
			continue
		}
		for i, line := range f.lines {
			if word := retiredInGo.FindString(line); word != "" {
				t.Errorf("%s:%d: %q is retired: see docs/glossary.md", f.path, i+1, word)
			}
		}
	}
}

// Lines of Go are at most maxColumns wide, because longer lines wrap in editors and reviews. A line may be
// wider if only a long string makes it so.
func TestGoWidth(t *testing.T) {
	for _, f := range readGoFiles(t) {
		raw := f.rawStrings()
		for i, line := range f.lines {
			if n := columns(line); n > maxColumns && !raw[i+1] && breakable(line) {
				t.Errorf("%s:%d: %d columns, want at most %d", f.path, i+1, n, maxColumns)
			}
		}
	}
}

// columns returns the width of a line, in which each tab counts as tabColumns columns.
func columns(line string) int {
	return utf8.RuneCountInString(line) + (tabColumns-1)*strings.Count(line, "\t")
}

// stringLiteral matches string literals within one line.
var stringLiteral = regexp.MustCompile("\"(\\\\.|[^\"\\\\])*\"|`[^`]*`?")

// breakable reports whether a line that is too wide could be broken. A line can be broken if it has a comma,
// a space in a comment or an operator outside of string literals.
func breakable(line string) bool {
	text := strings.TrimLeft(line, "\t")
	if strings.HasPrefix(text, "//\t") {
		return false // a table or code in a comment
	}
	if rest, ok := strings.CutPrefix(text, "// "); ok {
		return rest[0] != ' ' && strings.ContainsRune(rest, ' ')
	}
	outside := stringLiteral.ReplaceAllString(text, `""`)
	return columns(line)-len(text)+len(outside) > maxColumns
}
