package doctor

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/gohvd/gohvd/internal/config"
)

const (
	libgohvdName = "libgohvd"
	libgohvdFix  = "install gohvd from a wheel, build the library in the checkout (make libgohvd), or give its path with " +
		config.LibraryVariable
	oldestPython = 10 // the minor version of the oldest supported Python, 3.10
)

// ranksEnviron returns the environment of a rank, in which hvdrun names the library beside itself.
func (s *System) ranksEnviron() []string {
	env := s.Environ
	if s.Library != "" && s.getenv(config.LibraryVariable) == "" {
		env = append(env[:len(env):len(env)], config.LibraryVariable+"="+s.Library)
	}
	return env
}

// notHere is the beginning of Python programs that are run with -c. Then Python looks for modules in the
// current folder first, where another user may have put some. So the program removes this folder before it
// imports a module that is not built in. The options -P and -I of Python do not fit: Python 3.10 does not
// have -P, and -I ignores packages that programs of the user find.
const notHere = `
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
`

// probe is a Python program that prints pythonFacts as JSON. It does not import torch, because that may take
// longer than the time limit of the checks.
const probe = notHere + `
import importlib.util, json, platform
def version(name):
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        from importlib import metadata
        return metadata.version(name)
    except ImportError:
        return "of unknown version"
facts = dict(version=platform.python_version(), minor=sys.version_info[1], torch=version("torch"), numpy=version("numpy"))
try:
    import gohvd, gohvd._library
    facts.update(gohvd=gohvd.__version__, at=gohvd.__file__)
    facts.update(library=gohvd._library.path())
    facts.update(its=gohvd._library.version())
except Exception as e:
    facts.update(error="%s: %s" % (type(e).__name__, e), absent=getattr(e, "name", None) == "gohvd")
print(json.dumps(facts))
`

// pythonFacts is the output of probe. If a package is not installed, its version is empty.
type pythonFacts struct {
	Version, Torch, Numpy string
	Minor                 int
	Gohvd, At             string
	Library, Its          string // the path and the version of the library
	// Error says why gohvd cannot be imported, or why it does not find or load the library. Absent is set if
	// gohvd is not installed.
	Error  string
	Absent bool
}

// python reports which interpreter, torch, numpy, gohvd and libgohvd a Python program would find. Go programs
// need none of them.
func python(ctx context.Context, s *System) []Line {
	file, err := s.LookPath(s.Python)
	switch {
	case err != nil && s.Python == AnyPython:
		return []Line{ok("", "%s is not in PATH", AnyPython)}
	case err != nil:
		return []Line{fail("", "give the path of a Python interpreter", "%v", err)}
	}
	text, err := s.Output(ctx, s.ranksEnviron(), []string{file, "-c", probe})
	var facts pythonFacts
	if err == nil {
		err = json.Unmarshal([]byte(text), &facts)
	}
	if err != nil {
		return []Line{warn("", "run "+file+" by hand to see the error", "%s: %v", file, err)}
	}
	lines := []Line{ok("", "%s at %s", facts.Version, file)}
	if facts.Minor < oldestPython {
		lines[0] = warn("", fmt.Sprintf("install Python 3.%d or newer", oldestPython),
			"%s at %s is too old for gohvd", facts.Version, file)
	}
	for _, l := range []struct{ name, version string }{{"torch", facts.Torch}, {"numpy", facts.Numpy}} {
		if l.version == "" {
			l.version = "not installed"
		}
		lines = append(lines, ok(l.name, "%s", l.version))
	}
	switch {
	case facts.Absent:
		return append(lines, ok("gohvd", "not installed for this Python"))
	case facts.Gohvd == "":
		return append(lines, warn("gohvd", "install it again (python/README.md)", "cannot import gohvd: %s",
			facts.Error))
	}
	lines = append(lines, ok("gohvd", "%s at %s", facts.Gohvd, facts.At))
	switch {
	case facts.Library == "":
		return append(lines, fail(libgohvdName, libgohvdFix, "%s", facts.Error))
	case facts.Its == "":
		return append(lines, fail(libgohvdName, libgohvdFix, "%s: %s", facts.Library, facts.Error))
	case facts.Its != config.Version():
		return append(lines, warn(libgohvdName, libgohvdFix, "%s has version %s, and hvdrun has version %s",
			facts.Library, facts.Its, config.Version()))
	}
	return append(lines, ok(libgohvdName, "%s at %s", facts.Its, facts.Library))
}
