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

// Python is the interpreter that TESTTORCH_PYTHON names, or else Debian's. The one that is first on the path may be another,
// which does not see Debian's packages.
var Python = cmp.Or(os.Getenv("TESTTORCH_PYTHON"), "/usr/bin/python3")

var haveTorch = sync.OnceValue(func() error { return exec.Command(Python, "-c", "import torch.distributed").Run() })

// NeedTorch skips the test where there is no PyTorch, but not in CI, which has it.
func NeedTorch(t testing.TB) {
	t.Helper()
	if err := haveTorch(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s cannot import torch: %v; CI installs python3-torch", Python, err)
		}
		t.Skipf("%s cannot import torch: %v; it is in Debian's package python3-torch", Python, err)
	}
}

// StartTorch starts a script, which gets args from sys.argv[1] on. Its output is the test's log if it fails. wait waits for it,
// and fails the test if it does.
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
