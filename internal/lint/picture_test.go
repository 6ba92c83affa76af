package lint

import (
	"encoding/xml"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every name in docs/architecture.svg exists in the code, because readers search the code for it.
func TestPictureNamesExist(t *testing.T) {
	root := moduleRoot(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/architecture.svg"))
	if err != nil {
		t.Fatal(err)
	}
	var picture struct {
		Texts []textElement `xml:"text"`
		Parts []struct {
			Texts []textElement `xml:"text"`
		} `xml:"g"`
	}
	if err := xml.Unmarshal(text, &picture); err != nil {
		t.Fatal(err)
	}
	texts := picture.Texts
	for _, part := range picture.Parts {
		texts = append(texts, part.Texts...)
	}
	names := 0
	for _, e := range texts {
		if e.Class != "name" {
			continue
		}
		names++
		folder, ident, _ := strings.Cut(e.Text, ".")
		if info, err := os.Stat(filepath.Join(root, folder)); err != nil || !info.IsDir() {
			t.Errorf("docs/architecture.svg names %s, which does not exist", folder)
		} else if ident != "" && !declares(t, filepath.Join(root, folder), ident) {
			t.Errorf("docs/architecture.svg names %s, and %s does not declare %s", e.Text, folder, ident)
		}
	}
	if names < 10 {
		t.Errorf("found %d names in docs/architecture.svg, want at least 10", names)
	}
	for _, shown := range []string{"hvd.Allreduce", "controller.Coordinator", "ops/shm", "ops/tcp",
		"cmd/libgohvd", "python/gohvd", "internal/arena"} {
		if !strings.Contains(string(text), ">"+shown+"<") {
			t.Errorf("docs/architecture.svg does not show %s", shown)
		}
	}
}

type textElement struct {
	Class string `xml:"class,attr"`
	Text  string `xml:",chardata"`
}

// declares reports whether a Go file in a folder declares a type, a function or a method with this name.
func declares(t *testing.T, folder, name string) bool {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.Name == name {
					return true
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if s, ok := spec.(*ast.TypeSpec); ok && s.Name.Name == name {
						return true
					}
				}
			}
		}
	}
	return false
}
