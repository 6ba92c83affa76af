// Program vet has the analyzers of go vet and of staticcheck. Run it with go vet -vettool.
//
// So every package is read and checked for types once, and not once by each of the two programs. Staticcheck
// itself takes 200 s of processor time for this module if its cache is empty: it runs the analyzers that
// compute facts about functions in all dependencies too. Here it does so for this module and a few packages.
// Of the others, it is known only which declarations are deprecated and which functions do not return.
package main

import (
	"encoding/gob"
	"encoding/json"
	"fmt"
	"go/token"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/appends"
	"golang.org/x/tools/go/analysis/passes/asmdecl"
	"golang.org/x/tools/go/analysis/passes/assign"
	"golang.org/x/tools/go/analysis/passes/atomic"
	"golang.org/x/tools/go/analysis/passes/bools"
	"golang.org/x/tools/go/analysis/passes/buildtag"
	"golang.org/x/tools/go/analysis/passes/cgocall"
	"golang.org/x/tools/go/analysis/passes/composite"
	"golang.org/x/tools/go/analysis/passes/copylock"
	"golang.org/x/tools/go/analysis/passes/ctrlflow"
	"golang.org/x/tools/go/analysis/passes/defers"
	"golang.org/x/tools/go/analysis/passes/directive"
	"golang.org/x/tools/go/analysis/passes/errorsas"
	"golang.org/x/tools/go/analysis/passes/framepointer"
	"golang.org/x/tools/go/analysis/passes/hostport"
	"golang.org/x/tools/go/analysis/passes/httpresponse"
	"golang.org/x/tools/go/analysis/passes/ifaceassert"
	"golang.org/x/tools/go/analysis/passes/loopclosure"
	"golang.org/x/tools/go/analysis/passes/lostcancel"
	"golang.org/x/tools/go/analysis/passes/nilfunc"
	"golang.org/x/tools/go/analysis/passes/printf"
	"golang.org/x/tools/go/analysis/passes/shift"
	"golang.org/x/tools/go/analysis/passes/sigchanyzer"
	"golang.org/x/tools/go/analysis/passes/slog"
	"golang.org/x/tools/go/analysis/passes/stdmethods"
	"golang.org/x/tools/go/analysis/passes/stdversion"
	"golang.org/x/tools/go/analysis/passes/stringintconv"
	"golang.org/x/tools/go/analysis/passes/structtag"
	"golang.org/x/tools/go/analysis/passes/testinggoroutine"
	"golang.org/x/tools/go/analysis/passes/tests"
	"golang.org/x/tools/go/analysis/passes/timeformat"
	"golang.org/x/tools/go/analysis/passes/unmarshal"
	"golang.org/x/tools/go/analysis/passes/unreachable"
	"golang.org/x/tools/go/analysis/passes/unsafeptr"
	"golang.org/x/tools/go/analysis/passes/unusedresult"
	"golang.org/x/tools/go/analysis/passes/waitgroup"
	"golang.org/x/tools/go/analysis/unitchecker"
	"honnef.co/go/tools/analysis/facts/deprecated"
	"honnef.co/go/tools/analysis/lint"
	"honnef.co/go/tools/simple"
	"honnef.co/go/tools/staticcheck"
	"honnef.co/go/tools/stylecheck"
	"honnef.co/go/tools/unused"
)

const module = "github.com/gohvd/gohvd"

// ofVet has the analyzers of go vet.
var ofVet = []*analysis.Analyzer{
	appends.Analyzer, asmdecl.Analyzer, assign.Analyzer, atomic.Analyzer, bools.Analyzer, buildtag.Analyzer,
	cgocall.Analyzer, composite.Analyzer, copylock.Analyzer, defers.Analyzer, directive.Analyzer,
	errorsas.Analyzer, framepointer.Analyzer, hostport.Analyzer, httpresponse.Analyzer,
	ifaceassert.Analyzer, loopclosure.Analyzer, lostcancel.Analyzer, nilfunc.Analyzer, printf.Analyzer,
	shift.Analyzer, sigchanyzer.Analyzer, slog.Analyzer, stdmethods.Analyzer, stdversion.Analyzer,
	stringintconv.Analyzer, structtag.Analyzer, testinggoroutine.Analyzer, tests.Analyzer,
	timeformat.Analyzer, unmarshal.Analyzer, unreachable.Analyzer, unsafeptr.Analyzer,
	unusedresult.Analyzer, waitgroup.Analyzer,
}

// withFacts has the packages of other modules on which all analyzers run that compute facts. They contain the
// functions whose results staticcheck does not let a program ignore.
var withFacts = []string{"errors", "fmt", "sort", "strings", "time"}

// ofDependencies has the analyzers that run on the other packages of other modules.
var ofDependencies = []*analysis.Analyzer{ctrlflow.Analyzer, deprecated.Analyzer}

// reportUnused reports what unused finds. Staticcheck does that itself, because it merges the results for a
// package with and without its tests. go vet checks only the package with its tests.
var reportUnused = &analysis.Analyzer{
	Name:     "U1000",
	Doc:      "report unused code",
	Requires: []*analysis.Analyzer{unused.Analyzer.Analyzer},
	Run: func(pass *analysis.Pass) (any, error) {
		found := pass.ResultOf[unused.Analyzer.Analyzer].(unused.Result)
		used := make(map[string]bool) // fields of generic types are several objects at one position
		for _, o := range found.Used {
			used[o.Position.String()] = true
		}
		for _, o := range found.Unused {
			if !used[o.Position.String()] {
				pass.Reportf(at(pass, o.Position), "%s %s is unused", o.Kind, o.Name)
			}
		}
		return nil, nil
	},
}

// at returns the position in the package that has the given file and offset.
func at(pass *analysis.Pass, p token.Position) token.Pos {
	for _, f := range pass.Files {
		if file := pass.Fset.File(f.FileStart); file.Name() == p.Filename {
			return file.Pos(p.Offset)
		}
	}
	return token.NoPos
}

func main() {
	all := append([]*analysis.Analyzer{reportUnused}, ofVet...)
	for _, list := range [][]*lint.Analyzer{simple.Analyzers, staticcheck.Analyzers, stylecheck.Analyzers} {
		for _, a := range list {
			if !a.Doc.NonDefault {
				all = append(all, a.Analyzer)
			}
		}
	}
	// Each process checks one package, whose garbage is mostly smaller than this.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(512 << 20)
	if dependency(os.Args[len(os.Args)-1]) {
		registerFacts(all) // the facts of the packages of withFacts must be readable
		all = ofDependencies
	}
	unitchecker.Main(all...)
}

// registerFacts registers the types of facts of the analyzers, so that files with such facts can be read.
func registerFacts(analyzers []*analysis.Analyzer) {
	for _, a := range analyzers {
		for _, fact := range a.FactTypes {
			gob.Register(fact)
		}
		registerFacts(a.Requires)
	}
}

// dependency reports whether a file with the task for one package asks for the facts of a package of another
// module that is not in withFacts.
func dependency(file string) bool {
	if !strings.HasSuffix(file, ".cfg") {
		return false // go vet asks for the version or the flags
	}
	text, err := os.ReadFile(file)
	if err == nil {
		var task unitchecker.Config
		if err = json.Unmarshal(text, &task); err == nil {
			return task.VetxOnly && !strings.HasPrefix(task.ImportPath, module) &&
				!slices.Contains(withFacts, task.ImportPath)
		}
	}
	fmt.Fprintf(os.Stderr, "vet: %s: %v\n", file, err)
	os.Exit(1)
	return false
}
