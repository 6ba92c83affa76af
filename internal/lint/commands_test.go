package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every test, fuzz test and benchmark that a page selects with go test exists in the named package, and every
// target that a page makes is in the Makefile. go test succeeds if no test has the name, so a reader of a
// wrong page would believe that the test has passed.
func TestCommandsInPagesRun(t *testing.T) {
	root := moduleRoot(t)
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	sources, selected, made := readSources(t, root), 0, 0
	eachCode(readPages(t, root), func(at, code string) {
		for _, m := range makeTarget.FindAllStringSubmatch(code, -1) {
			if made++; !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s: the Makefile has no target %s", at, m[1])
			}
		}
		for _, command := range goTest.FindAllString(code, -1) {
			patterns, folders := selection(command)
			for kind, pattern := range patterns {
				selected++
				if !selects(t, sources, folders, kind, pattern) {
					t.Errorf("%s: in the folders %v, no %s matches %s", at, folders, kind, pattern)
				}
			}
		}
	})
	if selected < 10 || made < 10 {
		t.Errorf("pages select tests with %d patterns and name %d targets, want at least 10 each", selected, made)
	}
}

var (
	goTest     = regexp.MustCompile(`\bgo test [^;&` + "`" + `]*`)
	makeTarget = regexp.MustCompile(`(?:^|[` + "`" + `;&]) *make ([a-z0-9-]+)`)
)

// selection returns the patterns with which a command of go test selects tests, by the kind of test, and the
// folders that the command names.
func selection(command string) (patterns map[string]string, folders []string) {
	patterns = make(map[string]string)
	words := strings.Fields(command)
	for i := 0; i < len(words) && words[i] != "-args"; i++ {
		kind, isPattern := map[string]string{"-run": "Test", "-fuzz": "Fuzz", "-bench": "Benchmark"}[words[i]]
		if folder, ok := strings.CutPrefix(words[i], "./"); ok {
			folders = append(folders, strings.TrimSuffix(folder, "`"))
		} else if i++; isPattern && i < len(words) {
			pattern := strings.Trim(words[i], "'")
			if pattern, _, _ = strings.Cut(pattern, "/"); pattern != "^$" && pattern != "xxx" { // these select none
				patterns[kind] = pattern
			}
		} else {
			i--
		}
	}
	return patterns, folders
}

// selects reports whether a test of the given kind in one of the folders matches pattern.
func selects(t *testing.T, sources map[string]*source, folders []string, kind, pattern string) bool {
	match, err := regexp.Compile(pattern)
	if err != nil {
		t.Errorf("go test cannot select %s: %v", pattern, err)
		return true
	}
	for _, folder := range folders {
		prefix, below := strings.CutSuffix(folder, "...")
		for dir, s := range sources {
			if (dir == folder || below && strings.HasPrefix(dir+"/", prefix)) &&
				slices.ContainsFunc(s.tests, func(name string) bool {
					return strings.HasPrefix(name, kind) && match.MatchString(name)
				}) {
				return true
			}
		}
	}
	return false
}

// Every declaration that the table "Where to start" of docs/design.md names exists: as `package.Name`, or as
// `Name` in a file.
func TestStartingPointsExist(t *testing.T) {
	root := moduleRoot(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/design.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## Where to start")
	section, _, _ = strings.Cut(section, "\n## ")
	sources, named := readSources(t, root), 0
	for _, m := range declaration.FindAllStringSubmatch(section, -1) {
		found := false
		for dir := range sources {
			found = found || filepath.Base(dir) == m[1] && declares(t, filepath.Join(root, dir), m[2])
		}
		if named++; !found {
			t.Errorf("Where to start: no package %s declares %s", m[1], m[2])
		}
	}
	for _, m := range functionInFile.FindAllStringSubmatch(section, -1) {
		s := sources[filepath.Dir(m[2])]
		if named++; s == nil || !s.functions[filepath.Base(m[2])+":"+m[1]] {
			t.Errorf("Where to start: %s has no function %s", m[2], m[1])
		}
	}
	if named < 4 {
		t.Errorf("Where to start names %d declarations, want at least 4", named)
	}
}

var (
	declaration    = regexp.MustCompile("`([a-z0-9]+)\\.([A-Z][A-Za-z0-9]*)`")
	functionInFile = regexp.MustCompile("`([A-Za-z0-9]+)` in `([A-Za-z0-9_/]+\\.go)`")
)
