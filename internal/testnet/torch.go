package testnet

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

// Python is the Python interpreter for tests: the value of TESTTORCH_PYTHON, or Debian's interpreter by
// default. The first interpreter in PATH may be another one, which does not find Debian's packages.
var Python = cmp.Or(os.Getenv("TESTTORCH_PYTHON"), "/usr/bin/python3")

// haveTorch returns an error if Python cannot import PyTorch.
var haveTorch = sync.OnceValue(func() error {
	return exec.Command(Python, "-c", "import torch.distributed").Run()
})

// NeedTorch skips the test if PyTorch is missing. In CI, which has PyTorch, it fails the test instead.
func NeedTorch(t testing.TB) {
	t.Helper()
	if err := haveTorch(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s cannot import torch: %v; CI installs python3-torch", Python, err)
		}
		t.Skipf("%s cannot import torch: %v; it is in Debian's package python3-torch", Python, err)
	}
}

// StartTorch starts a Python script with args in sys.argv[1:]. The function wait waits until the script has
// ended. If the script has failed, wait fails the test and reports the output. The script is killed when the
// test ends, or after two minutes.
func StartTorch(t testing.TB, script string, args ...string) (wait func()) {
	t.Helper()
	NeedTorch(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
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
