package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
)

// AnyPython is the interpreter that is checked if the user names none. Then it may be missing, because Go
// programs do not need it.
const AnyPython = "python3"

const (
	sidecarName  = config.SidecarProgram
	libgohvdName = "libgohvd"
	libgohvdFix  = "install gohvd from a wheel, build the library in the checkout (make libgohvd), or give its path with " +
		config.LibraryVariable
	oldestPython = 10 // the minor version of the oldest supported Python, 3.10
)

// probe is a Python program that prints pythonFacts as JSON. It does not import torch, because that may take
// longer than the time limit of the checks.
//
// With -c, Python looks for modules in the current folder first, where another user may have put some. So the
// program removes this folder before it imports a module that is not built in. The options -P and -I of
// Python do not fit: Python 3.10 does not have -P, and -I ignores packages that programs of the user find.
const probe = `
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
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
	env := s.Environ
	if s.Library != "" && s.getenv(config.LibraryVariable) == "" {
		// hvdrun sets the variable for its ranks in the same way
		env = append(env[:len(env):len(env)], config.LibraryVariable+"="+s.Library)
	}
	file, err := s.LookPath(s.Python)
	switch {
	case err != nil && s.Python == AnyPython:
		return []Line{ok("", "%s is not in PATH", AnyPython)}
	case err != nil:
		return []Line{fail("", "give the path of a Python interpreter", "%v", err)}
	}
	text, err := s.Output(ctx, env, []string{file, "-c", probe})
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

// findLibgohvd returns an error unless there is a libgohvd.so at the path in HVD_LIBRARY, or where the
// checkout or the wheel of hvdrun has it. A package that is installed elsewhere has a library of its own.
func (s *System) findLibgohvd() error {
	if named := s.getenv(config.LibraryVariable); named != "" {
		if info, err := os.Stat(named); err != nil || !info.Mode().IsRegular() {
			return fmt.Errorf("%s is %q, which is not a file", config.LibraryVariable, named)
		}
		return nil
	}
	if s.Library == "" && s.Packaged == "" {
		return fmt.Errorf("found no %[1]s: %[2]s is not set, and %[1]s is neither beside hvdrun nor in ../lib",
			config.LibraryFile, config.LibraryVariable)
	}
	return nil
}

// findSidecar returns the path of hvdd.
func (s *System) findSidecar() (string, error) {
	if named := s.getenv(config.SidecarBinaryVariable); named != "" {
		if info, err := os.Stat(named); err != nil || !info.Mode().IsRegular() ||
			unix.Access(named, unix.X_OK) != nil {
			return "", fmt.Errorf("%s is %q, which is not a program", config.SidecarBinaryVariable, named)
		}
		return named, nil
	}
	if s.Sidecar != "" {
		return s.Sidecar, nil
	}
	found, err := s.LookPath(sidecarName)
	if err != nil {
		return "", fmt.Errorf("found no %s: %s is not set, and %[1]s is neither beside hvdrun nor on PATH",
			sidecarName, config.SidecarBinaryVariable)
	}
	return found, nil
}
