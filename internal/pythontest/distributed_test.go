package pythontest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// distributed returns a command that runs Python with gohvd's package, without hvdrun.
func distributed(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, testnet.Python, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+python(t), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1",
		"HVD_SIDECAR_BINARY="+hvdd)
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// hasDistributed reports whether torch is new enough for gohvd.torch.distributed. If it is too old, the
// import must say which version is needed.
func hasDistributed(t *testing.T) bool {
	t.Helper()
	testnet.NeedTorch(t)
	out, err := distributed(t, "-c", "import gohvd.torch.distributed").CombinedOutput()
	if err == nil {
		return true
	}
	if !strings.Contains(string(out), "ImportError: gohvd.torch.distributed needs torch 2.1 or newer, but torch 1.") {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// TestTorchDistributed runs the tests of gohvd.torch.distributed, with ranks that torchrun or
// torch.multiprocessing has started. With a version of torch that is too old, it checks only the error.
func TestTorchDistributed(t *testing.T) {
	if !hasDistributed(t) {
		return
	}
	program := filepath.Join(python(t), "tests", "distributed_ranks.py")
	for _, n := range []int{1, 2, 3} {
		t.Run("spawn "+strconv.Itoa(n), func(t *testing.T) {
			passed(t, n, distributed(t, program, strconv.Itoa(n)))
		})
	}
	t.Run("torchrun", func(t *testing.T) {
		args := append([]string{"-m", "torch.distributed.run"}, testnet.Standalone(t)...)
		passed(t, 2, distributed(t, append(args, "--nproc_per_node=2", program)...))
	})
}

// passed runs a job of n ranks that runs distributed_ranks.py.
func passed(t *testing.T, n int, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), strconv.Itoa(n)+" ranks: ") {
		t.Fatalf("%v\n%s", err, out)
	}
}
