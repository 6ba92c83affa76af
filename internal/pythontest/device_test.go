//go:build nccl && cgo

package pythontest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testcuda"
)

// withStandIns runs the tests with stand-ins for the libraries of GPUs.
func withStandIns(m *testing.M) int { return testcuda.Main(m) }

// TestDevicePython runs operations on memory of CUDA devices that Python has exported. In some jobs the
// sidecar cannot use this memory. Each sidecar is hvdd, which executes an hvdd-gpu beside it.
func TestDevicePython(t *testing.T) {
	gpu := filepath.Join(filepath.Dir(hvdd), "hvdd-gpu")
	out, err := exec.Command("go", "build", "-tags", "nccl", "-o", gpu,
		"github.com/gohvd/gohvd/cmd/hvdd").CombinedOutput()
	if err != nil {
		t.Fatalf("building hvdd-gpu: %v\n%s", err, out)
	}
	t.Cleanup(func() { os.Remove(gpu) })
	program := filepath.Join(python(t), "tests", "device_ranks.py")
	for _, c := range []struct {
		tests string
		ranks int
		env   string
	}{
		{"Values", 1, ""}, {"Values", 2, ""}, {"Values", 3, "STANDIN_CUDA_DEVICES=1"},
		{"Fallbacks", 2, ""}, {"OtherDevices", 2, "STANDIN_CUDA_DEVICES=2"}, {"WithoutDriver", 2, ""},
		{"WithoutNCCL", 2, "HOROVOD_GPU_OPERATIONS="},
	} {
		cmd := job(t, c.ranks, program, c.tests)
		// The stand-in for the driver is found in the folder. The streams are slow, so that missing waits
		// show.
		cmd.Env = append(cmd.Env, "HOROVOD_GPU_OPERATIONS=nccl", "HVD_NCCL_LIBRARY="+testcuda.NCCL(),
			"HVD_CUDART_LIBRARY="+testcuda.CUDA(), "LD_LIBRARY_PATH="+testcuda.Folder(),
			"STANDIN_CUDA_DELAY_US=2000", c.env)
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Count(string(out), ":Ran ") != c.ranks {
			t.Errorf("%s on %d ranks: %v\n%s", c.tests, c.ranks, err, out)
		}
	}
}
