package lint

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Every package and its tests have correct types on arm64 too. For example, the kernel does not have the same
// system calls there. The sources of all dependencies are read, and only their declarations are checked. This
// takes a few seconds, and go vet, which compiles the dependencies, more than a minute of processor time.
func TestTypesOnARM64(t *testing.T) {
	list := exec.Command("go", "list", "-deps", "-test",
		"-json=ImportPath,Dir,GoFiles,ImportMap,Standard,ForTest", module+"/...")
	list.Env = append(os.Environ(), "GOARCH=arm64", "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	checked, all, fset := 0, map[string]*types.Package{"unsafe": types.Unsafe}, token.NewFileSet()
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Dir, ForTest string
			GoFiles                  []string
			ImportMap                map[string]string
			Standard                 bool
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.ImportPath == "unsafe" || strings.HasSuffix(p.ImportPath, ".test") { // the latter are generated
			continue
		}
		// A package is listed again for each test of a package that it imports. These copies are only
		// dependencies.
		path, _, copied := strings.Cut(p.ImportPath, " ")
		ours := strings.HasPrefix(path, module) && (!copied || strings.TrimSuffix(path, "_test") == p.ForTest)
		var files []*ast.File
		for _, name := range p.GoFiles {
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, file)
		}
		config := types.Config{
			Importer: importer(func(path string) *types.Package {
				return all[cmp.Or(p.ImportMap[path], path)]
			}),
			Sizes:            types.SizesFor("gc", "arm64"),
			IgnoreFuncBodies: !ours,
			Error:            func(err error) { t.Error(err) },
		}
		all[p.ImportPath], _ = config.Check(path, fset, files, nil) // Error has reported all errors
		if ours {
			checked++
		}
	}
	if checked < 100 {
		t.Errorf("checked %d packages and tests, want at least 100", checked)
	}
}

// importer is a types.Importer that finds only packages which were checked before.
type importer func(path string) *types.Package

func (find importer) Import(path string) (*types.Package, error) {
	if p := find(path); p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%s was not checked before", path)
}
