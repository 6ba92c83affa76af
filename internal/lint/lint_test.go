// Package lint tests rules of the module that the compiler does not check.
package lint

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/gohvd/gohvd"

// pkg is a package in the output of go list.
type pkg struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	CgoFiles   []string
	Imports    []string
	// IgnoredGoFiles has the files that this build leaves out. If cgo is off, these include files that need
	// cgo.
	IgnoredGoFiles []string
}

// listing returns the output of go list for all packages of the module, without their tests.
var listing = sync.OnceValues(exec.Command("go", "list",
	"-json=ImportPath,Dir,GoFiles,CgoFiles,Imports,IgnoredGoFiles", module+"/...").Output)

func packages(t *testing.T) []pkg {
	out, err := listing()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		switch err := d.Decode(&p); {
		case errors.Is(err, io.EOF):
			if len(all) < 10 {
				t.Fatalf("go list found only %d packages", len(all))
			}
			return all
		case err != nil:
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// short returns an import path without the path of the module.
func short(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, module), "/") }

// A package imports only packages that are further down in the table of packages in docs/design.md, which is
// the only list of the layers. So a package can be understood with only the packages below it, and its tests
// need no package above it.
func TestImportsPointDownTheTable(t *testing.T) {
	page, err := os.ReadFile("../../docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| layer | package | what |\n")
	table, _, found := strings.Cut(table, "\n\n")
	if !found {
		t.Fatal("docs/design.md has no table of packages")
	}
	rows := make(map[string]int) // the row of each package, counted from the top of the table
	for line := range strings.Lines(table) {
		for i, name := range strings.Split(strings.Split(line, "|")[2], "`") {
			if i%2 == 0 {
				continue
			}
			if rows[name] > 0 {
				t.Errorf("%s is in the table of docs/design.md twice", name)
			}
			rows[name] = len(rows) + 1
		}
	}
	all := packages(t)
	for _, p := range all {
		name := short(p.ImportPath)
		if rows[name] == 0 {
			t.Errorf("%s is not in the table of docs/design.md", name)
		}
		for _, i := range p.Imports {
			if strings.HasPrefix(i, module+"/") && rows[short(i)] < rows[name] {
				t.Errorf("%s imports %s, which is above it in the table of docs/design.md", name, short(i))
			}
		}
	}
	for name := range rows {
		if !slices.ContainsFunc(all, func(p pkg) bool { return short(p.ImportPath) == name }) {
			t.Errorf("docs/design.md has %s in its table of packages, which is none", name)
		}
	}
}

// The packages of the negotiation and the search for settings use no network, clock, lock or goroutine. So
// they give the same outputs for the same inputs, can be tested without a network, and never wait.
func TestTheCoreIsPure(t *testing.T) {
	pure := []string{"controller", "internal/elastic", "responsecache", "fusion", "autotune", "internal/message",
		"internal/tensor", "half", "internal/topo"}
	// An entry also forbids the packages in folders below it.
	forbidden := []string{"net", "os", "sync", "log", "math/rand", "context", "runtime", "syscall", "unsafe",
		"reflect", "go.uber.org", "golang.org/x"}
	for _, p := range packages(t) {
		if !slices.Contains(pure, short(p.ImportPath)) {
			continue
		}
		for _, i := range p.Imports {
			if (i == "unsafe" || i == "reflect") && short(p.ImportPath) == "internal/tensor" {
				// Package tensor needs them for views of memory and for the element types of Go types.
				continue
			}
			if slices.ContainsFunc(forbidden, func(f string) bool {
				return i == f ||
					strings.HasPrefix(i, f+"/")
			}) {
				t.Errorf("%s imports %s", short(p.ImportPath), i)
			}
		}
		for _, at := range uses(t, p, "time", "Now", "Since", "Sleep", "After", "NewTimer", "NewTicker",
			"Tick", "AfterFunc") {
			t.Errorf("%s uses the clock at %s", short(p.ImportPath), at)
		}
		for _, f := range p.GoFiles {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parsed, func(n ast.Node) bool {
				switch n.(type) {
				case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
					t.Errorf("%s/%s starts a goroutine or uses a channel", short(p.ImportPath), f)
				}
				return true
			})
		}
	}
}

// Only internal/config reads the environment. So help, documentation and checks come from one table, and the
// origin of each value is known.
func TestOnlyConfigReadsTheEnvironment(t *testing.T) {
	for _, p := range packages(t) {
		switch short(p.ImportPath) {
		case "internal/config":
			continue
		case "internal/launch", "cmd/hvdrun":
			// A launcher passes its environment on to the ranks, but reads no setting from it.
			continue
		case "internal/testnet", "internal/testmpi", "internal/testcuda":
			// These packages read only the variable with which CI forbids skipped tests, or one that they
			// set.
			continue
		}
		for _, at := range uses(t, p, "os", "Getenv", "LookupEnv", "Environ", "ExpandEnv", "Setenv") {
			t.Errorf("%s reads the environment at %s", short(p.ImportPath), at)
		}
	}
}

// No library package ends the process. No package sleeps in the hope that something has happened by then. A
// poll between which a thread is to sleep for less than a millisecond must not use time.Sleep either, which
// takes a whole one if all goroutines wait (golang/go#53824).
func TestNoExitsNoSleeps(t *testing.T) {
	for _, p := range packages(t) {
		path := short(p.ImportPath)
		generator := strings.HasPrefix(path, "internal/kernel/asm") // programs that go generate runs
		if !strings.HasPrefix(path, "cmd/") && !strings.HasPrefix(path, "examples/") && !generator {
			for _, at := range uses(t, p, "os", "Exit") {
				t.Errorf("%s exits at %s", path, at)
			}
			for _, at := range uses(t, p, "log", "Fatal", "Fatalf", "Fatalln", "Panic", "Panicf") {
				t.Errorf("%s exits at %s", path, at)
			}
		}
		for _, at := range uses(t, p, "time", "Sleep") {
			t.Errorf("%s sleeps at %s", path, at)
		}
	}
}

// An if statement whose condition does not test an error does not assign to a field, an element or a pointer
// before the condition, because a reader of the condition does not expect it there.
func TestNoHiddenAssignments(t *testing.T) {
	for _, f := range readGoFiles(t) {
		ast.Inspect(f.parsed, func(n ast.Node) bool {
			i, ok := n.(*ast.IfStmt)
			if !ok {
				return true
			}
			a, ok := i.Init.(*ast.AssignStmt)
			if !ok || a.Tok == token.DEFINE {
				return true
			}
			hidden := false
			for _, left := range a.Lhs {
				name, ok := left.(*ast.Ident)
				if ok && name.Name == "err" {
					return true
				}
				hidden = hidden || !ok
			}
			if hidden {
				t.Errorf("%s:%d: assign in a statement before the if", f.path, f.line(i.Pos()))
			}
			return true
		})
	}
}

// No program uses text/template. With it, the linker must keep every exported method, because a template may
// call it by its name: hvdbench would have 19 MB instead of 15. cobra needs it only for templates of our own.
func TestNoTemplates(t *testing.T) {
	for _, p := range packages(t) {
		if slices.Contains(p.Imports, "text/template") {
			t.Errorf("%s imports text/template", short(p.ImportPath))
		}
		for _, f := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, f))
			if err != nil {
				t.Fatal(err)
			}
			if at := templates.Find(text); at != nil {
				t.Errorf("%s calls %s in %s", short(p.ImportPath), at, f)
			}
		}
	}
}

var templates = regexp.MustCompile(`\.Set(Version|Help|Usage)Template\b`)

// Only these packages use cgo, in files with a tag, because cgo needs a C toolchain. A library for C needs
// one in any case.
var withCgo = []string{"ops/mpi", "ops/nccl", "internal/cuda"}

func TestNoCgo(t *testing.T) {
	for _, p := range packages(t) {
		for _, f := range append(p.CgoFiles, p.IgnoredGoFiles...) {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil,
				parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			allowed := slices.Contains(withCgo, short(p.ImportPath)) && !slices.Contains(p.CgoFiles, f) ||
				short(p.ImportPath) == "cmd/libgohvd"
			for _, i := range parsed.Imports {
				if i.Path.Value == `"C"` && !allowed {
					t.Errorf("%s uses cgo in %s", short(p.ImportPath), f)
				}
			}
		}
	}
}

// Only internal/metrics imports the Prometheus client. Other packages return structs such as trace.Stats. So
// a program that exports the numbers in another way needs no Prometheus, and the name and cost of each metric
// are in one place.
func TestOnlyMetricsKnowsPrometheus(t *testing.T) {
	found := false
	for _, p := range packages(t) {
		for _, i := range p.Imports {
			if !strings.HasPrefix(i, "github.com/prometheus/") {
				continue
			}
			if found = true; short(p.ImportPath) != "internal/metrics" {
				t.Errorf("%s imports %s", short(p.ImportPath), i)
			}
		}
	}
	if !found {
		t.Error("no package imports it: this test looks for the wrong thing")
	}
}

// No exported declaration has an internal type, because a program outside of the module cannot name such a
// type, for example to declare a variable. Errors and store.Secret may be aliases of internal types, because
// a second type would only be a copy.
func TestUsersCanNameWhatIsExported(t *testing.T) {
	for name, atLeast := range map[string]int{"hvd": 50, "store": 50, "store/c10d": 20, "ps": 30} {
		t.Run(name, func(t *testing.T) { testUsersCanName(t, name, atLeast) })
	}
}

func testUsersCanName(t *testing.T, pkgName string, atLeast int) {
	all := packages(t)
	p := all[slices.IndexFunc(all, func(p pkg) bool { return short(p.ImportPath) == pkgName })]
	exported := 0
	for _, f := range p.GoFiles {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		internal := make(map[string]bool) // keys are names of packages in f
		for _, i := range parsed.Imports {
			path := strings.Trim(i.Path.Value, `"`)
			name := path[strings.LastIndex(path, "/")+1:]
			if i.Name != nil {
				name = i.Name.Name
			}
			internal[name] = strings.HasPrefix(path, module+"/internal/")
		}
		check := func(what string, types ast.Node) {
			exported++
			ast.Inspect(types, func(n ast.Node) bool {
				field, ok := n.(*ast.Field)
				if ok && what == "type" && field.Names != nil &&
					!slices.ContainsFunc(field.Names, (*ast.Ident).IsExported) {
					return false
				}
				if s, ok := n.(*ast.SelectorExpr); ok {
					if x, ok := s.X.(*ast.Ident); ok && internal[x.Name] {
						t.Errorf("%s/%s: exported %s has the internal type %s.%s", pkgName, f, what, x.Name,
							s.Sel.Name)
					}
				}
				return true
			})
		}
		for _, d := range parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && (d.Recv == nil || exportedReceiver(d)) {
					check(d.Name.Name, d.Type)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						if spec.Name.IsExported() &&
							!(spec.Assign.IsValid() && (strings.HasSuffix(spec.Name.Name, "Error") ||
								pkgName+"."+spec.Name.Name == "store.Secret")) {
							check("type", spec.Type)
						}
					case *ast.ValueSpec:
						if spec.Type != nil && slices.ContainsFunc(spec.Names, (*ast.Ident).IsExported) {
							check(spec.Names[0].Name, spec.Type)
						}
					}
				}
			}
		}
	}
	if exported < atLeast {
		t.Errorf("found only %d exported declarations", exported)
	}
}

// uses returns the places at which a package uses one of the functions of an imported package.
func uses(t *testing.T, p pkg, imported string, names ...string) []string {
	var at []string
	files := token.NewFileSet()
	for _, f := range slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles) {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(files, filepath.Join(p.Dir, f), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		local := ""
		for _, i := range parsed.Imports {
			if strings.Trim(i.Path.Value, `"`) == imported {
				local = imported[strings.LastIndex(imported, "/")+1:]
				if i.Name != nil {
					local = i.Name.Name
				}
				if local == "." {
					// With a dot import the functions have no package name, so the import itself is reported.
					at = append(at, files.Position(i.Pos()).String())
				}
			}
		}
		if local == "" {
			continue
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok && x.Name == local && slices.Contains(names, s.Sel.Name) {
					at = append(at, files.Position(s.Pos()).String())
				}
			}
			return true
		})
	}
	return at
}
