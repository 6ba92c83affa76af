package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// format is one row in the tables of docs/formats.md.
type format struct {
	name           string
	magic, version []constant
	decoders       map[string][]string // names of functions, by file
	fuzzTests      map[string][]string // names of fuzz tests, by the folder of the package
}

// constant is the name of a constant and its value on the page.
type constant struct{ name, value string }

var (
	cellCode  = regexp.MustCompile("`([^`]+)`([^`]*)")
	cellWords = regexp.MustCompile(`[A-Za-z_][A-Za-z0-9_.]*`)
)

// namesIn parses a cell of the form "`place` name, name; `place` name". It returns the names by place.
func namesIn(cell string) map[string][]string {
	names := make(map[string][]string)
	for _, m := range cellCode.FindAllStringSubmatch(cell, -1) {
		names[m[1]] = append(names[m[1]], cellWords.FindAllString(m[2], -1)...)
	}
	return names
}

// constantsIn parses a cell of the form "`name` value, `name` value" and returns the constants.
func constantsIn(cell string) (all []constant) {
	for _, m := range cellCode.FindAllStringSubmatch(cell, -1) {
		all = append(all, constant{m[1], strings.TrimSpace(strings.TrimRight(strings.TrimSpace(m[2]), ",;"))})
	}
	return all
}

const formatsPage = "docs/formats.md"

func readFormats(t *testing.T, root string) (all []format) {
	text, err := os.ReadFile(filepath.Join(root, formatsPage))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 7 || strings.HasPrefix(cells[1], "---") || strings.TrimSpace(cells[1]) == "format" {
			continue
		}
		all = append(all, format{
			strings.TrimSpace(cells[1]), constantsIn(cells[2]), constantsIn(cells[3]), namesIn(cells[4]),
			namesIn(cells[5]),
		})
	}
	if len(all) < 20 {
		t.Fatalf("%s has %d formats, want 20 at least: has the form of its tables changed?", formatsPage,
			len(all))
	}
	return all
}

// source has what the test needs to know about the Go files of a folder.
type source struct {
	constants map[string]string // the literal of each constant, by name; constants in tests are left out
	functions map[string]bool   // keys are "file.go:Name"
	fuzzed    map[string]string // the file of each fuzz test
	tests     []string          // the names of all tests, fuzz tests and benchmarks
	reads     map[string]string // a place in each file that decodes bytes
}

// The walkthroughs in docs/design.md, which follow a tensor and a death through the code, name files and
// functions. Every function exists in the file that is named with it.
func TestWalkthroughs(t *testing.T) {
	root := moduleRoot(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/design.md"))
	if err != nil {
		t.Fatal(err)
	}
	sources := readSources(t, root)
	for _, title := range []string{"## Follow one tensor", "## Follow one death"} {
		_, section, _ := strings.Cut(string(text), title)
		section, _, _ = strings.Cut(section, "\n## ")
		steps := 0
		for line := range strings.Lines(section) {
			cells := strings.Split(strings.TrimSpace(line), "|")
			if len(cells) != 4 || !strings.Contains(cells[1], "`") {
				continue
			}
			steps++
			for file, functions := range namesIn(cells[1]) {
				for _, name := range functions {
					found := false
					if s := sources[filepath.Dir(file)]; filepath.Ext(file) == ".go" {
						found = s != nil && s.functions[filepath.Base(file)+":"+name]
					} else {
						text, err := os.ReadFile(filepath.Join(root, file))
						found = err == nil && definition(name).Match(text)
					}
					if !found {
						t.Errorf("%s: %s has no function %s", title, file, name)
					}
				}
			}
		}
		if steps < 10 {
			t.Errorf("%s: got %d steps, want at least 10", title, steps)
		}
	}
}

// definition returns a pattern that matches the definition of a function in Python or C.
func definition(name string) *regexp.Regexp {
	return regexp.MustCompile(`(?m)^(\s*def |PUBLIC \w+ \*?)` + name + `\(`)
}

// decoding has the functions that decode bytes from outside, by the name of their package.
var decoding = map[string][]string{
	"proto":     {"Unmarshal"},
	"json":      {"Unmarshal", "NewDecoder"},
	"csv":       {"NewReader"},
	"protowire": {"ConsumeVarint", "ConsumeTag", "ConsumeField"},
	"binary":    {"Uvarint", "Varint", "Read"},
}

// testName matches the names of functions that go test can run.
var testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark)[A-Z]`)

func readSources(t *testing.T, root string) map[string]*source {
	sources := make(map[string]*source)
	fset := token.NewFileSet()
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != root && (strings.HasPrefix(name, ".") ||
			name == "testdata" || name == "tools") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, ".pb.go") {
			return nil
		}
		parsed, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		file, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		dir := filepath.Dir(file)
		s := sources[dir]
		if s == nil {
			s = &source{constants: make(map[string]string), functions: make(map[string]bool),
				fuzzed: make(map[string]string), reads: make(map[string]string)}
			sources[dir] = s
		}
		if strings.HasSuffix(file, "_test.go") {
			for _, d := range parsed.Decls {
				f, ok := d.(*ast.FuncDecl)
				if !ok || f.Recv != nil || !testName.MatchString(f.Name.Name) {
					continue
				}
				s.tests = append(s.tests, f.Name.Name)
				if strings.HasPrefix(f.Name.Name, "Fuzz") {
					s.fuzzed[f.Name.Name] = file
				}
			}
			return nil
		}
		s.look(fset, file, parsed)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return sources
}

func (s *source) look(fset *token.FileSet, file string, parsed *ast.File) {
	for _, d := range parsed.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			s.functions[filepath.Base(file)+":"+d.Name.Name] = true
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok || d.Tok != token.CONST {
					continue
				}
				for i, name := range v.Names {
					if i < len(v.Values) {
						if lit, ok := v.Values[i].(*ast.BasicLit); ok {
							s.constants[name.Name] = lit.Value
						} else if strings.HasSuffix(strings.ToLower(name.Name), "magic") {
							s.constants[name.Name] = "" // not a literal, so it cannot be compared
						}
					}
				}
			}
		}
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		decodes := false
		switch x := sel.X.(type) {
		case *ast.Ident:
			decodes = slices.Contains(decoding[x.Name], sel.Sel.Name)
		case *ast.SelectorExpr: // binary.LittleEndian.Uint32
			p, ok := x.X.(*ast.Ident)
			decodes = ok && p.Name == "binary" && strings.HasSuffix(x.Sel.Name, "Endian") &&
				strings.HasPrefix(sel.Sel.Name, "Uint")
		}
		if decodes {
			s.reads[file] = fset.Position(sel.Pos()).String()
		}
		return true
	})
}

// withoutRow has the files that decode bytes but need no row on the page, with the reason.
var withoutRow = map[string]string{
	"ops/tcp/alltoall.go":                    "numbers, each compared with a bound",
	"ops/tcp/bruck.go":                       "numbers, each compared with a bound",
	"ops/shm/alltoall.go":                    "numbers, each compared with a bound",
	"ops/nccl/backend.go":                    "numbers, each compared with a bound",
	"ops/mpi/collectives.go":                 "numbers, each compared with a bound",
	"internal/exec/gather.go":                "numbers, each compared with a bound",
	"internal/launch/agent.go":               "reports of a child that runs this program, through a pipe that only it has",
	"internal/dial/user.go":                  "answers of the kernel",
	"cmd/hvdbench/negotiated.go":             "the dump of the same process",
	"internal/doctor/gpus.go":                "the output of hvdd, a program of the same build",
	"internal/doctor/python.go":              "the output of a script that is in the same file",
	"examples/optdigits/optdigits.go":        "data that is in the program",
	"internal/testnet/prometheus.go":         "answers of Prometheus, in tests",
	"internal/sidecar/sidecartest/client.go": "a client for tests",
	"timeline/timelinetest/timelinetest.go":  "a reader for tests",
}

// docs/formats.md lists every format of bytes that come from another process or from a file, with its
// version, its decoders and a fuzz test. The fuzz tests are required because no input may crash a rank.
func TestFormats(t *testing.T) {
	root := moduleRoot(t)
	formats, sources := readFormats(t, root), readSources(t, root)

	listed := make(map[string]string) // the format of each file with a decoder
	fuzzed := make(map[string]string) // the format of each "dir.FuzzX"
	onPage := make(map[string]bool)   // keys are "dir.constant"
	for _, f := range formats {
		if len(f.decoders) == 0 || len(f.fuzzTests) == 0 {
			t.Errorf("%s: %q has no decoder or no fuzz test", formatsPage, f.name)
		}
		var dirs []string
		for file, functions := range f.decoders {
			listed[file] = f.name
			if strings.HasSuffix(file, ".py") {
				text, err := os.ReadFile(filepath.Join(root, file))
				if err != nil {
					t.Errorf("%q: %v", f.name, err)
				}
				for _, m := range f.magic {
					if !strings.Contains(string(text), m.value) {
						t.Errorf("%q: %s does not have %s", f.name, file, m.value)
					}
				}
				continue
			}
			s := sources[filepath.Dir(file)]
			if s == nil {
				t.Errorf("%q: no Go files beside %s", f.name, file)
				continue
			}
			dirs = append(dirs, filepath.Dir(file))
			for _, name := range functions {
				if !s.functions[filepath.Base(file)+":"+name] {
					t.Errorf("%q: %s has no function %s", f.name, file, name)
				}
			}
		}
		for dir, names := range f.fuzzTests {
			for _, name := range names {
				fuzzed[dir+"."+name] = f.name
				if s := sources[dir]; s == nil || s.fuzzed[name] == "" {
					t.Errorf("%q: %s has no fuzz test %s", f.name, dir, name)
				}
			}
		}
		for _, c := range slices.Concat(f.magic, f.version) {
			found := false
			for _, dir := range dirs {
				if sources[dir] == nil {
					continue // this was reported above
				}
				literal, ok := sources[dir].constants[c.name]
				if ok {
					found, onPage[dir+"."+c.name] = true, true
				}
				if ok && literal != c.value {
					t.Errorf("%q: %s is %s in %s, and %s on the page", f.name, c.name, literal, dir, c.value)
				}
			}
			if !found {
				t.Errorf("%q: none of its decoders' packages has a constant %s", f.name, c.name)
			}
		}
	}

	magics := make(map[string]string) // constants by their bytes on the wire
	for _, dir := range slices.Sorted(maps.Keys(sources)) {
		s := sources[dir]
		for _, name := range slices.Sorted(maps.Keys(s.constants)) {
			if !strings.HasSuffix(strings.ToLower(name), "magic") {
				continue
			}
			at := dir + "." + name
			if !onPage[at] {
				t.Errorf("%s: %s is in no row", formatsPage, at)
			}
			for _, wire := range onTheWire(t, at, s.constants[name]) {
				if other := magics[wire]; other != "" && other != at {
					t.Errorf("%s and %s are both %q", other, at, wire)
				}
				magics[wire] = at
			}
		}
		for name, file := range s.fuzzed {
			if fuzzed[dir+"."+name] == "" && !slices.Contains(otherFuzzTests, dir+"."+name) {
				t.Errorf("%s: %s of %s fuzzes what is in no row", formatsPage, name, file)
			}
		}
		for file, at := range s.reads {
			if listed[file] != "" && withoutRow[file] != "" {
				t.Errorf("%s is in a row and in this test's list of those without", file)
			}
			if listed[file] == "" && withoutRow[file] == "" {
				t.Errorf("%s: nothing that %s reads is in a row (%s)", formatsPage, file, at)
			}
		}
	}
	for file := range withoutRow {
		if s := sources[filepath.Dir(file)]; s == nil || s.reads[file] == "" {
			t.Errorf("%s decodes nothing: drop it from this test's list", file)
		}
	}
	if len(magics) < 5 {
		t.Errorf("only %d magics: this test looks for the wrong thing", len(magics))
	}
}

// otherFuzzTests has the fuzz tests of functions that decode nothing.
var otherFuzzTests = []string{"internal/kernel.FuzzLevels", "internal/launch.FuzzSplitter",
	"timeline.FuzzString"}

// onTheWire returns the bytes of a magic constant on the wire. literal is the constant's value in the source.
// For a number onTheWire returns the bytes in both orders, because some formats are little-endian.
func onTheWire(t *testing.T, at, literal string) []string {
	if text, err := strconv.Unquote(literal); err == nil {
		return []string{text}
	}
	n, err := strconv.ParseUint(literal, 0, 32)
	if err != nil {
		t.Errorf("%s is not a literal of four bytes, which this test could compare with others", at)
		return nil
	}
	return []string{
		fmt.Sprintf("%c%c%c%c", byte(n>>24), byte(n>>16), byte(n>>8), byte(n)),
		fmt.Sprintf("%c%c%c%c", byte(n), byte(n>>8), byte(n>>16), byte(n>>24)),
	}
}
