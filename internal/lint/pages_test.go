package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/config"
)

// page is a Markdown file, as its lines and the anchors of its headings.
type page struct {
	lines   []pageLine
	anchors map[string]bool
}

// pageLine is a line of a page. code is set if the line is in a code block.
type pageLine struct {
	number int
	text   string
	code   bool
}

// notPages has Markdown files that do not describe the current state: the history, and a golden file of a
// test.
var notPages = []string{"CHANGELOG.md", "bench/testdata/report.md"}

// readPages returns the pages of the repository by path.
func readPages(t *testing.T, root string) map[string]*page {
	pages := make(map[string]*page)
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "tools") {
			return filepath.SkipDir
		}
		file, err := filepath.Rel(root, path)
		if err != nil || filepath.Ext(file) != ".md" || slices.Contains(notPages, file) {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		pages[file] = readPage(string(text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) < 20 {
		t.Fatalf("found %d pages, want at least 20", len(pages))
	}
	return pages
}

var listItem = regexp.MustCompile(`^\s*([-*]|\d+\.) `)

func readPage(text string) *page {
	p := &page{anchors: make(map[string]bool)}
	fenced, list, blank := false, false, true
	for i, line := range strings.Split(text, "\n") {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		indented := !list && strings.HasPrefix(line, "    ") && (blank || p.lines[i-1].code)
		p.lines = append(p.lines, pageLine{i + 1, line, fenced || fence || indented})
		if fence {
			fenced = !fenced
		}
		blank = strings.TrimSpace(line) == ""
		switch {
		case listItem.MatchString(line):
			list = true
		case !blank && !strings.HasPrefix(line, " "):
			list = false
		}
		if title := strings.TrimLeft(line, "#"); title != line && !fenced {
			p.anchors[anchor(title)] = true
		}
	}
	return p
}

// anchor returns the anchor that GitHub generates for a heading.
func anchor(title string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.TrimSpace(title)) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			b.WriteRune(r)
		}
	}
	return b.String()
}

var pageLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// moduleRoot returns the path of the module.
func moduleRoot(t *testing.T) string {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// Every link in a page leads to a file and a heading that exist. A link may break when a file or heading is
// renamed.
func TestLinksResolve(t *testing.T) {
	root := moduleRoot(t)
	pages, links := readPages(t, root), 0
	for file, p := range pages {
		for _, line := range p.lines {
			if line.code {
				continue
			}
			for _, m := range pageLink.FindAllStringSubmatch(line.text, -1) {
				target, fragment, _ := strings.Cut(m[1], "#")
				if strings.Contains(target, "://") {
					continue
				}
				links++
				to := file
				if target != "" {
					to = filepath.Join(filepath.Dir(file), target)
				}
				if _, err := os.Stat(filepath.Join(root, to)); err != nil {
					t.Errorf("%s:%d: %s does not exist", file, line.number, m[1])
				} else if other := pages[to]; fragment != "" && (other == nil || !other.anchors[fragment]) {
					t.Errorf("%s:%d: %s has no heading #%s", file, line.number, to, fragment)
				}
			}
		}
	}
	if links < 50 {
		t.Errorf("found %d links, want at least 50", links)
	}
	// The index docs/README.md must link every page in docs.
	index, err := os.ReadFile(filepath.Join(root, "docs/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for file := range pages {
		if name, ok := strings.CutPrefix(file, "docs/"); ok && name != "README.md" &&
			!strings.Contains(string(index), "("+name+")") {
			t.Errorf("docs/README.md does not link %s", name)
		}
	}
}

// maxColumns is the largest width of a line of prose.
const maxColumns = 110

// Prose in pages is at most maxColumns wide, because longer lines wrap in editors and reviews. Tables, code
// and lines that end with a link may be wider.
func TestPageWidth(t *testing.T) {
	root := moduleRoot(t)
	for file, p := range readPages(t, root) {
		for _, line := range p.lines {
			text := strings.TrimRight(line.text, " ")
			if line.code || utf8.RuneCountInString(text) <= maxColumns || strings.HasPrefix(text, "|") {
				continue
			}
			if last := strings.LastIndexByte(strings.TrimSpace(text), ' '); last < 0 ||
				strings.Contains(text[last:], "](") {
				continue // the line ends with a link, which cannot be broken
			}
			t.Errorf("%s:%d: %d columns, want at most %d", file, line.number, utf8.RuneCountInString(text),
				maxColumns)
		}
	}
}

var (
	settingName = regexp.MustCompile(`\b(HVD|HOROVOD)_[A-Z0-9_]*[A-Z0-9]\b`)
	flagName    = regexp.MustCompile("(^|[\\s`(\\[|/])--([a-z][a-z0-9-]*)")
)

// otherVariables has variables that pages name and that are not settings.
var otherVariables = []string{
	"HOROVOD_GPU", "HOROVOD_BUILD", // variables of Horovod's installation
	"HVD_RUN",   // a variable of the Python package's tests
	"HVD_SHOWN", // see internal/config/origin.go
	"HVD_SITE",  // an example
}

// otherFlags has flags that pages name and that belong to other programs.
var otherFlags = []string{
	"cpus", "cpuset-cpus", "cpus-per-task", "gpus", "memory", "rm", "shm-size", "ulimit", // docker, srun
	"ntasks-per-node", "distribution", "unbuffered", "signal", // srun, sbatch
	"map-by", "mca", "timestamp-output", // mpirun
	"from-literal",                                              // kubectl
	"standalone", "nproc-per-node", "no-python", "rdzv-backend", // torchrun
	"system-site-packages", // python3 -m venv
	"config", "storage",    // promtool and Prometheus
	"min-np", "max-np", // aliases in cmd/hvdrun/args.go
	"help",            // every program
	"out", "programs", // scripts/gpu-check.sh
}

// Every setting and flag in a page exists. A wrong name would have no effect, or give an error.
func TestSettingsAndFlagsExist(t *testing.T) {
	root := moduleRoot(t)
	settings, flags := make(map[string]bool), definedFlags(t, root)
	for _, s := range config.Settings() {
		settings[s.Name] = true
		for _, f := range s.Flags {
			flags[f.Name] = true
		}
	}
	for _, i := range config.Inerts() { // Horovod's names that hvdrun accepts without effect or refuses
		for _, name := range strings.Fields(i.Flags) {
			flags[name] = true
		}
	}
	for _, name := range otherVariables {
		settings[name] = true
	}
	for _, name := range otherFlags {
		flags[name] = true
	}
	header, err := os.ReadFile(filepath.Join(root, "cmd/libgohvd/gohvd.h")) // its constants begin as settings do
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range settingName.FindAllString(string(header), -1) {
		settings[name] = true
	}
	named := 0
	for file, p := range readPages(t, root) {
		inert := false
		for _, line := range p.lines {
			if strings.HasPrefix(line.text, "## ") {
				inert = file == "docs/settings.md" &&
					strings.HasPrefix(line.text, "## Names that have no effect")
			}
			if inert {
				continue
			}
			for _, name := range settingName.FindAllString(line.text, -1) {
				if named++; !settings[name] {
					t.Errorf("%s:%d: there is no setting %s", file, line.number, name)
				}
			}
			for _, m := range flagName.FindAllStringSubmatch(line.text, -1) {
				if named++; !flags[m[2]] {
					t.Errorf("%s:%d: no command has a flag --%s", file, line.number, m[2])
				}
			}
		}
	}
	if named < 200 {
		t.Errorf("pages name %d settings and flags, want at least 200", named)
	}
}

var flagMethod = regexp.MustCompile(
	`^(String|Bool|Int|Int64|Uint|Duration|Float64|StringSlice|StringArray|Func|BoolFunc|Text)?(Var)?(P|PF)?$`)

// definedFlags returns the flags that the Go programs of this module define and that its Python programs
// read. It finds them by the calls and string literals in the source.
func definedFlags(t *testing.T, root string) map[string]bool {
	flags := make(map[string]bool)
	add := func(args []ast.Expr) {
		for _, a := range args[:min(len(args), 3)] {
			if lit, ok := a.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if name, err := strconv.Unquote(lit.Value); err == nil {
					flags[name] = true
					return // the other arguments are a short form, a default or the help
				}
			}
		}
	}
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".py"):
			text, err := os.ReadFile(path)
			for _, m := range regexp.MustCompile(`["']--([a-z][a-z0-9-]*)["']`).FindAllStringSubmatch(
				string(text), -1) {
				flags[m[1]] = true
			}
			return err
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			switch fun := call.Fun.(type) {
			case *ast.SelectorExpr:
				if flagMethod.MatchString(fun.Sel.Name) {
					add(call.Args)
				}
			case *ast.Ident: // hvdbench has a helper that is a plain function
				if fun.Name == "add" {
					add(call.Args)
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !flags["metrics-addr"] || !flags["torch-store"] {
		t.Fatal("this test does not find the flags of hvdrun")
	}
	return flags
}

// pagePath matches a path from the root of the repository in code of a page.
var pagePath = regexp.MustCompile(
	"(^|[\\s`(])(\\./)?((bench|cmd|controller|deploy|examples|fusion|half|hvd|internal|ops|python|responsecache|scripts|store|tensorqueue|timeline)(/[A-Za-z0-9_.-]+)*)")

// Every file and package that a page names in code exists. A name may become wrong when files are moved.
func TestPathsExist(t *testing.T) {
	root := moduleRoot(t)
	paths := 0
	check := func(at, code string) {
		for _, m := range pagePath.FindAllStringSubmatch(code, -1) {
			path := strings.TrimRight(m[3], ".")
			if !strings.Contains(path, "/") && m[2] == "" {
				continue // a word or the name of a package
			}
			if paths++; !exists(root, path) {
				t.Errorf("%s: %s does not exist", at, path)
			}
		}
		if goCommand.MatchString(code) {
			for _, m := range goArgument.FindAllStringSubmatch(code, -1) {
				if paths++; !exists(root, m[1]) {
					t.Errorf("%s: %s does not exist", at, m[0])
				}
			}
		}
	}
	eachCode(readPages(t, root), check)
	if paths < 100 {
		t.Errorf("pages name %d paths, want at least 100", paths)
	}
}

// eachCode calls f for each line of code and for each code span of the pages. at is the place of the code.
func eachCode(pages map[string]*page, f func(at, code string)) {
	for file, p := range pages {
		paragraph := ""
		for _, line := range p.lines {
			at := fmt.Sprintf("%s:%d", file, line.number)
			if line.code {
				f(at, line.text)
			}
			if paragraph += line.text + " "; line.code || strings.TrimSpace(line.text) == "" {
				for _, span := range codeSpan.FindAllString(paragraph, -1) {
					f("before "+at, span)
				}
				paragraph = ""
			}
		}
	}
}

var (
	codeSpan   = regexp.MustCompile("`[^`]+`")
	goCommand  = regexp.MustCompile(`\bgo (test|run|build|vet|generate)\b|-bench`)
	goArgument = regexp.MustCompile(`\s\./([a-z][A-Za-z0-9_/-]*)`)
)

// exists reports whether path exists. path is a file, a folder, or a folder followed by the name of a
// declaration, such as hvd.Init.
func exists(root, path string) bool {
	if _, err := os.Stat(filepath.Join(root, path)); err == nil {
		return true
	}
	dot := strings.LastIndexByte(path, '.')
	if dot < 0 || !unicode.IsUpper(rune(path[min(dot+1, len(path)-1)])) {
		return false
	}
	info, err := os.Stat(filepath.Join(root, path[:dot]))
	return err == nil && info.IsDir()
}
