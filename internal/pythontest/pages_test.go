package pythontest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestPrograms runs the Python programs of pages on two ranks.
func TestPrograms(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t)
	runPrograms(t, testnet.Python, "README.md", "python/README.md", "docs/quickstart.md", "docs/elastic.md")
}

// TestDDPProgram runs the program of the page about torch.distributed on two ranks.
func TestDDPProgram(t *testing.T) {
	t.Parallel()
	runPrograms(t, testnet.NewTorch(t), "docs/from-ddp.md")
}

// programInPage matches a program in a page.
var programInPage = regexp.MustCompile("(?s)\n```python\n(.*?)\n```\n")

// runPrograms runs the first program of each page, one after the other in the same job, because importing
// torch takes longer than most of them.
func runPrograms(t *testing.T, interpreter string, pages ...string) {
	dir := t.TempDir()
	args := append([]string{"-np", "2"}, append(withTorch(t, interpreter), "-c",
		"import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path); print('end of', path, flush=True)")...)
	for i, page := range pages {
		text := testnet.ReadFile(t, filepath.Join("../..", page))
		program := programInPage.FindSubmatch(text)
		if program == nil {
			t.Fatalf("%s has no program in Python", page)
		}
		path := filepath.Join(dir, fmt.Sprint(i, ".py"))
		if err := os.WriteFile(path, program[1], 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, path)
	}
	out, err := launched(t, args...).CombinedOutput()
	if n := strings.Count(string(out), "end of "); err != nil || n != 2*len(pages) {
		t.Errorf("programs of %q: got error %v and %d ends, want no error and %d\n%s", pages, err, n, 2*len(pages), out)
	}
}
