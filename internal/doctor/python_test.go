package doctor

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestPythonPrograms checks the lines about Python, its packages and the library for different outputs of
// Python.
func TestPythonPrograms(t *testing.T) {
	const gohvd = `"gohvd": "0.6", "at": "/p/gohvd"`
	refused := errors.New("exit status 1: no such module")
	for what, c := range map[string]struct {
		facts    string // output of Python; empty if it fails
		want     []string
		noPython bool
		named    string // the interpreter that the user names, if any
	}{
		"without Python": {noPython: true, want: []string{"ok python: not in PATH"}},
		"without the Python that the user names": {noPython: true, named: "python9",
			want: []string{"fail python: exit status 1: no such module"}},
		"another Python": {named: "python9",
			facts: `{"version": "9.1", "minor": 12, "absent": true}`,
			want:  []string{"ok python: 9.1 at /usr/bin/python9", "ok torch", "ok numpy", "ok gohvd"}},
		"Python is broken": {want: []string{"warn python: /usr/bin/python3: exit status 1: no such module"}},
		"it prints rubbish": {
			facts: "hello", want: []string{"warn python: /usr/bin/python3: invalid"},
		},
		"Python is old": {
			facts: `{"version": "3.8.1", "minor": 8, "error": "x", "absent": true}`,
			want: []string{"warn python: 3.8.1 at /usr/bin/python3 is too old", "ok torch: not installed",
				"ok numpy: not installed", "ok gohvd: not installed"},
		},
		"gohvd is broken": {
			facts: `{"version": "3.12", "minor": 12, "torch": "2.4", "error": "SyntaxError: bad"}`,
			want: []string{"ok python", "ok torch: 2.4", "ok numpy",
				"warn gohvd: cannot import gohvd: SyntaxError: bad"},
		},
		"no library": {
			facts: `{"version": "3.12", "minor": 12, ` + gohvd + `, "error": "LibraryError: there is none"}`,
			want: []string{"ok python", "ok torch", "ok numpy", "ok gohvd: 0.6 at /p/gohvd",
				"fail libgohvd: LibraryError: there is none"},
		},
		"the library does not load": {
			facts: `{"version": "3.12", "minor": 12, ` + gohvd + `, "library": "/b/l.so", "error": "OSError: x"}`,
			want: []string{"ok python", "ok torch", "ok numpy", "ok gohvd",
				"fail libgohvd: /b/l.so: OSError: x"},
		},
		"the library is another": {
			facts: `{"version": "3.12", "minor": 12, ` + gohvd + `, "library": "/b/l.so", "its": "v0"}`,
			want: []string{"ok python", "ok torch", "ok numpy", "ok gohvd",
				"warn libgohvd: /b/l.so has version v0, and hvdrun has version " + config.Version()},
		},
		"all is well": {
			facts: `{"version": "3.12", "minor": 12, ` + gohvd + `, "library": "/b/l.so", "its": "` +
				config.Version() + `"}`,
			want: []string{"ok python", "ok torch", "ok numpy", "ok gohvd",
				"ok libgohvd: " + config.Version() + " at /b/l.so"},
		},
	} {
		s := soundSystem()
		s.Python = cmp.Or(c.named, s.Python)
		if c.noPython {
			s.LookPath = func(string) (string, error) { return "", refused }
		}
		s.Output = func(_ context.Context, _, argv []string) (string, error) {
			if c.facts == "" {
				return "", refused
			}
			return c.facts, nil
		}
		holds(t, what, look(t, s, "python"), c.want...)
	}
}

// TestThisPython checks that the probe finds the gohvd of this checkout, and the library that hvdrun or the
// environment names.
func TestThisPython(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not in PATH")
	}
	checkout, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	s := Here(slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, "HVD_") ||
			strings.HasPrefix(e, "PYTHON")
	}))
	s.Library = "/no/libgohvd.so"
	s.Environ = append(s.Environ, "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH="+checkout)
	lines := python(t.Context(), s)
	holds(t, "this Python", lines, "ok ", "ok torch", "ok numpy", "ok gohvd: at "+checkout,
		"fail libgohvd: /no/libgohvd.so: LibraryError: cannot load the library of gohvd: /no/libgohvd.so")
	s.Environ = append(s.Environ, config.LibraryVariable+"=/none.so")
	lines = python(t.Context(), s)
	holds(t, "a wrong name", lines, "ok ", "ok torch", "ok numpy", "ok gohvd",
		"fail libgohvd: /none.so: LibraryError: ")
	s.Environ = append(s.Environ, "PYTHONPATH=")
	lines = python(t.Context(), s)
	holds(t, "without gohvd", lines, "ok ", "ok torch", "ok numpy", "ok gohvd: not installed")
}

// TestCurrentFolder checks that the probe runs no module in the current folder, where another user may have
// put it.
func TestCurrentFolder(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not in PATH")
	}
	t.Chdir(t.TempDir())
	for _, name := range []string{"json", "platform", "importlib", "sitecustomize", "torch", "gohvd"} {
		testnet.WriteFile(t, name+".py", "open('"+name+".ran', 'w')\n")
	}
	s := Here(os.Environ())
	holds(t, "in a folder of others", python(t.Context(), s)[:1], "ok ")
	if ran, err := filepath.Glob("*.ran"); err != nil || len(ran) > 0 {
		t.Errorf("modules of the current folder have run: %v, %v", ran, err)
	}
}
