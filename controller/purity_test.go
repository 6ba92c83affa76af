package controller_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestPurity checks invariant 8: no step of the negotiation waits, and the same inputs give the same outputs.
// So the pure packages must not import or use anything that can block, or whose value changes by itself, such
// as a clock.
func TestPurity(t *testing.T) {
	const project = "github.com/gohvd/gohvd/"
	pure := map[string][]string{
		"../controller": {"bytes", "fmt", "math/bits", "slices", "strings", "time", project + "fusion", project +
			"internal/analysis", project + "internal/trace", project + "internal/message", project +
			"responsecache", project + "internal/tensor", project + "internal/topo"},
		"../responsecache": {"encoding/binary", "fmt", "hash/fnv", "math", project + "internal/message"},
	}
	for dir, allowed := range pure {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files (%v)", dir, err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range file.Imports {
				if path, err := strconv.Unquote(i.Path.Value); err != nil || !slices.Contains(allowed, path) {
					t.Errorf("%v: import of %s, which a pure package must not import", fset.Position(i.Pos()),
						i.Path.Value)
				}
			}
			for _, d := range file.Decls {
				if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.VAR {
					t.Errorf("%v: package-level variable: a pure package has no global state", fset.Position(d.Pos()))
				}
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
					t.Errorf("%v: a pure package uses no goroutines and channels", fset.Position(n.Pos()))
				case *ast.SelectorExpr:
					pkg, ok := n.X.(*ast.Ident)
					if ok && pkg.Name == "time" &&
						!slices.Contains([]string{"Duration", "Second", "Millisecond", "Microsecond"}, n.Sel.Name) {
						t.Errorf("%v: time.%s: the loop reads the clock and passes it down",
							fset.Position(n.Pos()), n.Sel.Name)
					}
				}
				return true
			})
		}
	}
}
