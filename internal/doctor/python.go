package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
)

// AnyPython is the interpreter that is checked if the user names none. Then it may be missing, because Go
// programs do not need it.
const AnyPython = "python3"

const (
	sidecarName = config.SidecarProgram
	sidecarFix  = "install gohvd from a wheel, build hvdd beside hvdrun (go build ./cmd/hvdd), or give its path with " +
		config.SidecarBinaryVariable
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
    import gohvd, gohvd._sidecar
    facts.update(gohvd=gohvd.__version__, at=gohvd.__file__)
    facts.update(hvdd=gohvd._sidecar.find_sidecar())
except Exception as e:
    facts.update(error="%s: %s" % (type(e).__name__, e), absent=getattr(e, "name", None) == "gohvd")
print(json.dumps(facts))
`

// pythonFacts is the output of probe. If a package is not installed, its version is empty.
type pythonFacts struct {
	Version, Torch, Numpy string
	Minor                 int
	Gohvd, At, Hvdd       string
	// Error says why gohvd cannot be imported, or why it does not find hvdd. Absent is set if gohvd is not
	// installed.
	Error  string
	Absent bool
}

// python reports which interpreter, torch, numpy, gohvd and hvdd a Python program would find. Go programs
// need none of them.
func python(ctx context.Context, s *System) []Line {
	env := s.Environ
	if s.Sidecar != "" && s.getenv(config.SidecarBinaryVariable) == "" {
		// hvdrun sets the variable for its ranks in the same way
		env = append(env[:len(env):len(env)], config.SidecarBinaryVariable+"="+s.Sidecar)
	}
	file, err := s.LookPath(s.Python)
	switch {
	case err != nil && s.Python == AnyPython:
		return []Line{ok("", "%s is not in PATH", AnyPython), s.hvddLine(ctx, s.Sidecar)}
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
		return append(lines, ok("gohvd", "not installed for this Python"), s.hvddLine(ctx, s.Sidecar))
	case facts.Gohvd == "":
		return append(lines, warn("gohvd", "install it again (python/README.md)", "cannot import gohvd: %s",
			facts.Error))
	}
	lines = append(lines, ok("gohvd", "%s at %s", facts.Gohvd, facts.At))
	switch running := s.getenv(config.SidecarVariable); {
	case running != "":
		return append(lines, ok(sidecarName, "%s is %s, which is already running", config.SidecarVariable,
			running))
	case facts.Hvdd == "":
		return append(lines, fail(sidecarName, sidecarFix, "%s", facts.Error))
	}
	return append(lines, s.hvddLine(ctx, facts.Hvdd))
}

// hvddLine runs the hvdd at the path file with --version and returns a line about the result: a failure if
// hvdd does not run, or a warning if its version differs from the version of this program.
func (s *System) hvddLine(ctx context.Context, file string) Line {
	if file == "" {
		return ok(sidecarName, "not beside hvdrun; only Python programs need it")
	}
	text, err := s.Output(ctx, s.Environ, []string{file, "--version"})
	its := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text), sidecarName+" version"))
	switch {
	case err != nil:
		return fail(sidecarName, sidecarFix, "%s: %v", file, err)
	case its != config.VersionText():
		return warn(sidecarName, sidecarFix, "%s has version %s, and hvdrun has version %s", file, its,
			config.VersionText())
	}
	return ok(sidecarName, "%s at %s", its, file)
}

// findSidecar returns the path of the hvdd that ranks in Python start. Ranks also look in the Python package
// gohvd. findSidecar does not, because hvdrun does not know where that package is.
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
