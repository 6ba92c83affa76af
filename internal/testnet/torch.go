package testnet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Python is the Python interpreter for tests: the value of TESTTORCH_PYTHON, or Debian's interpreter by
// default. The first interpreter in PATH may be another one, which does not find Debian's packages.
var Python = cmp.Or(os.Getenv("TESTTORCH_PYTHON"), "/usr/bin/python3")

// haveTorch returns an error if Python does not have PyTorch.
var haveTorch = sync.OnceValue(func() error { return torchIn(Python, "0") })

// torchIn returns an error if the interpreter does not have PyTorch, or an older one than oldest. It does not
// import PyTorch, which takes seconds of processor time.
func torchIn(python, oldest string) error {
	out, err := exec.Command(python, "-c", `
import importlib.util, os, re, runpy, sys
spec = importlib.util.find_spec("torch")
if spec is None:
    sys.exit("it has no torch")
version = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))["__version__"]
numbers = lambda version: [int(n) for n in re.findall(r"\d+", version)]
if numbers(version) < numbers(sys.argv[1]):
    sys.exit("it has torch " + version)
`, oldest).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", python, err, bytes.TrimSpace(out))
	}
	return err
}

// NeedTorch skips the test if PyTorch is missing. In CI, which has PyTorch, it fails the test instead.
func NeedTorch(t testing.TB) {
	t.Helper()
	need(t, haveTorch(), "needs torch, which is in Debian's package python3-torch")
}

// newTorch finds the interpreter that NewTorch returns.
var newTorch = sync.OnceValues(func() (string, error) {
	const oldest = "2.1"
	err := torchIn(Python, oldest)
	if err == nil {
		return Python, nil
	}
	cache, none := os.UserCacheDir()
	if none != nil {
		return "", errors.Join(err, none)
	}
	python := filepath.Join(cache, "gohvd", "torch", "bin", "python")
	if other := torchIn(python, oldest); other != nil {
		return "", errors.Join(err, other)
	}
	return python, nil
})

// NewTorch returns a Python interpreter with PyTorch 2.1 or newer: Python, or the one that
// scripts/new-torch.sh has installed. If there is none, it skips the test. In CI, which has one, it fails the
// test instead.
func NewTorch(t testing.TB) string {
	t.Helper()
	python, err := newTorch()
	need(t, err, "needs torch 2.1 or newer, which scripts/new-torch.sh installs (some GB)")
	return python
}

// NewestTorch returns what NewTorch returns, or outside of CI Python if NewTorch would skip the test.
func NewestTorch(t testing.TB) string {
	t.Helper()
	if _, err := newTorch(); err != nil && os.Getenv("CI") == "" {
		NeedTorch(t)
		return Python
	}
	return NewTorch(t)
}

// need skips the test, or in CI fails it, if err says that what it needs is missing.
func need(t testing.TB, err error, what string) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("CI") != "":
		t.Fatalf("%s, and CI installs it: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}

// StartTorch starts a Python script with args in sys.argv[1:]. The function wait waits until the script has
// ended. If the script has failed, wait fails the test and reports the output. The script is killed when the
// test ends, or after five minutes.
func StartTorch(t testing.TB, script string, args ...string) (wait func()) {
	t.Helper()
	NeedTorch(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	cmd := exec.CommandContext(ctx, Python, append([]string{"-c", script}, args...)...)
	cmd.Env = append(cmd.Environ(), "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
	done := make(chan struct{})
	var out []byte
	var err error
	go func() {
		defer close(done)
		out, err = cmd.CombinedOutput()
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() {
		t.Helper()
		if <-done; err != nil {
			t.Fatalf("python: %v\n%s", err, out)
		}
	}
}
