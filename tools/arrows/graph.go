package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// A pkg has the counts of one package.
type pkg struct {
	path     string
	files    []string         // names without folder
	uses     []map[int]string // for each file the files that it uses, with one of the identifiers
	ordering                  // of the files
	types    []typeInfo       // most methods first
}

// A typeInfo describes a type of a package.
type typeInfo struct {
	name    string
	methods int // in the method set of a pointer to the type, or of the interface
	files   int // of the package that declare methods of the type itself
	taken   int // functions and methods of the package with a parameter of the type or of a pointer to it
}

// load reads the packages and checks their types. The paths are relative to the folder, such as ./hvd.
func load(dir, tags string, patterns []string) ([]*pkg, error) {
	config := &packages.Config{
		Dir: dir,
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedCompiledGoFiles | packages.NeedImports |
			packages.NeedTypes | packages.NeedSyntax | packages.NeedTypesInfo,
	}
	if tags != "" {
		config.BuildFlags = []string{"-tags", tags}
	}
	loaded, err := packages.Load(config, patterns...)
	if err != nil {
		return nil, err
	}
	var all []*pkg
	for _, l := range loaded {
		if len(l.Errors) > 0 {
			return nil, fmt.Errorf("%s: %w", l.PkgPath, l.Errors[0])
		}
		all = append(all, count(l))
	}
	return all, nil
}

// count finds the arrows and the types of a package.
func count(l *packages.Package) *pkg {
	p := &pkg{path: l.PkgPath}
	index := make(map[string]int)
	for _, name := range l.GoFiles {
		index[filepath.Base(name)] = len(p.files)
		p.files = append(p.files, filepath.Base(name))
		p.uses = append(p.uses, make(map[int]string))
	}
	// With cgo, the compiled files are generated, and their positions refer to the originals.
	file := func(pos token.Pos) (int, bool) {
		i, ok := index[filepath.Base(l.Fset.Position(pos).Filename)]
		return i, ok
	}
	use := func(at token.Pos, o types.Object) {
		if o == nil || o.Pkg() != l.Types || !o.Pos().IsValid() {
			return
		}
		from, ok := file(at)
		to, declared := file(o.Pos())
		if _, known := p.uses[from][to]; ok && declared && from != to && !known {
			p.uses[from][to] = o.Name()
		}
	}
	// Identifiers in the order of the source, so that the example of an arrow is always the same one.
	for _, syntax := range l.Syntax {
		ast.Inspect(syntax, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				use(n.Pos(), l.TypesInfo.Uses[n])
			case *ast.SelectorExpr:
				if s := l.TypesInfo.Selections[n]; s != nil {
					for _, o := range embedded(s) {
						use(n.Sel.Pos(), o)
					}
				}
			}
			return true
		})
	}
	p.ordering = fewestBack(len(p.files), func(from, to int) bool { return p.uses[from][to] != "" })
	p.types = methods(l, file)
	return p
}

// arrows returns the number of arrows of the package.
func (p *pkg) arrows() (n int) {
	for _, used := range p.uses {
		n += len(used)
	}
	return n
}

// embedded returns the embedded fields through which a selection finds its method or field. They are used,
// but no identifier in the source names them.
func embedded(s *types.Selection) (fields []types.Object) {
	t := s.Recv()
	for _, i := range s.Index()[:len(s.Index())-1] {
		if pointer, ok := t.Underlying().(*types.Pointer); ok {
			t = pointer.Elem()
		}
		fields = append(fields, t.Underlying().(*types.Struct).Field(i))
		t = fields[len(fields)-1].Type()
	}
	return fields
}

// methods counts the methods of the types that the package declares outside of functions.
func methods(l *packages.Package, file func(token.Pos) (int, bool)) (all []typeInfo) {
	taken := parameters(l)
	for _, name := range l.Types.Scope().Names() {
		declared, ok := l.Types.Scope().Lookup(name).(*types.TypeName)
		if !ok || declared.IsAlias() || strings.HasPrefix(name, "_C") { // of cgo
			continue
		}
		named := declared.Type().(*types.Named)
		var receiver types.Type = types.NewPointer(named)
		if types.IsInterface(named) {
			receiver = named
		}
		t := typeInfo{name: name, taken: taken[declared]}
		for set, i := types.NewMethodSet(receiver), 0; i < set.Len(); i++ {
			if m := set.At(i).Obj(); m.Exported() || m.Pkg() == l.Types {
				t.methods++
			}
		}
		files := make(map[int]bool)
		for m := range named.Methods() {
			if f, ok := file(m.Pos()); ok {
				files[f] = true
			}
		}
		t.files = len(files)
		all = append(all, t)
	}
	slices.SortStableFunc(all, func(a, b typeInfo) int { return cmp.Compare(b.methods, a.methods) })
	return all
}

// parameters counts for each type the functions and methods of the package that take it or a pointer to it.
func parameters(l *packages.Package) map[types.Object]int {
	taken := make(map[types.Object]int)
	for _, syntax := range l.Syntax {
		for _, d := range syntax.Decls {
			declaration, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			f, ok := l.TypesInfo.Defs[declaration.Name].(*types.Func)
			if !ok {
				continue
			}
			seen := make(map[types.Object]bool)
			for v := range f.Signature().Params().Variables() {
				t := v.Type()
				if pointer, ok := t.(*types.Pointer); ok {
					t = pointer.Elem()
				}
				if named, ok := t.(*types.Named); ok && !seen[named.Obj()] {
					seen[named.Obj()] = true
					taken[named.Obj()]++
				}
			}
		}
	}
	return taken
}
