//go:build nccl && cgo

package pythontest

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestDevicePython runs operations on memory of CUDA devices, with stand-ins for CUDA and NCCL. In some jobs
// the tensors are copied through host memory. In the last ones, ranks die: before the launch of an operation,
// between its parts, while it is on the device, and in the abort after the death of another one.
func TestDevicePython(t *testing.T) {
	run := func(tests string, ranks int, env ...string) (string, error) {
		return onDevices(t, tests, ranks, env...)
	}
	for _, c := range []struct {
		tests string
		ranks int
		env   string
	}{
		{"Values", 1, ""}, {"Values", 2, ""}, {"Values", 3, "STANDIN_CUDA_DEVICES=1"},
		{"Values", 2, "DEFAULT_STREAM=1"},
		{"Values", 2, "HOROVOD_ENABLE_ASYNC_COMPLETION=1"}, {"Fallbacks", 2, ""},
		{"Faulted.test_before_operations", 3, ""}, {"Faulted.test_in_flight", 3, ""},
		{"Values.test_unknown_sizes Values.test_no_memory", 2, "HOROVOD_GPU_OPERATIONS=host"},
		{"WithoutNCCL", 2, "HOROVOD_GPU_OPERATIONS=none"},
	} {
		out, err := run(c.tests, c.ranks, c.env)
		if err != nil || strings.Count(out, ":Ran ") != c.ranks {
			t.Errorf("%s on %d ranks: %v\n%s", c.tests, c.ranks, err, out)
		}
	}
	const killed = 128 + 9
	if out, err := run("Killed", 3); !exited(err, killed) || strings.Count(out, ">:OK\n") != 2 {
		t.Errorf("Killed: got %v, want exit status %d and two ranks that pass\n%s", err, killed, out)
	}
	for at, dead := range map[string]int{
		"2=ncclCommInitRankConfig:1": 1, "2=cudaStreamWaitEvent:1": 1, "2=cudaMemcpyBatchAsync:1": 1,
		"2=ncclAllReduce:1": 1, "2=cudaMemcpyBatchAsync:2": 1, "2=cudaEventQuery:1": 1,
		"1=ncclCommAbort:1 2=ncclAllReduce:2": 2,
	} {
		dir := t.TempDir()
		out, err := run("KilledAt", 3, "KILL_AT="+at, "TMPDIR="+dir, "XDG_RUNTIME_DIR=")
		if !exited(err, killed) || strings.Count(out, ">:OK\n") != 3-dead {
			t.Errorf("killed at %s: got %v, want exit status %d and %d ranks that pass\n%s", at, err, killed, 3-dead, out)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*", "*")); err != nil || len(left) > 0 {
			t.Errorf("killed at %s: %v was left, %v", at, left, err)
		}
	}
}

// exited reports whether err says that a process has ended with the status.
func exited(err error, status int) bool {
	e, ok := err.(*exec.ExitError)
	return ok && e.ExitCode() == status
}

// onDevices runs tests of device_ranks.py with the stand-ins for CUDA and NCCL.
func onDevices(t testing.TB, tests string, ranks int, env ...string) (string, error) {
	program := filepath.Join(python(t), "tests", "device_ranks.py")
	cmd := job(t, ranks, append([]string{program}, strings.Fields(tests)...)...)
	// The streams are slow, so that missing waits show.
	cmd.Env = append(cmd.Env, "HOROVOD_GPU_OPERATIONS=nccl", "HVD_NCCL_LIBRARY="+testcuda.NCCL(),
		"HVD_CUDART_LIBRARY="+testcuda.CUDA(), "LD_LIBRARY_PATH="+testcuda.Folder(),
		"STANDIN_CUDA_DELAY_US=2000")
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// BenchmarkDevicePython measures the processor time of an allreduce from Python, on a device and in host
// memory, with libraries that do nothing. The operations are fused, and then each launched by itself:
//
//	go test -tags nccl -run '^$' -bench DevicePython ./internal/pythontest
func BenchmarkDevicePython(b *testing.B) {
	for b.Loop() {
		for _, threshold := range []string{"67108864", "0"} {
			out, err := onDevices(b, "Cost", 1, "HVD_NCCL_LIBRARY="+testcuda.Null(),
				"HVD_CUDART_LIBRARY="+testcuda.Null(), "HOROVOD_FUSION_THRESHOLD="+threshold)
			figures := regexp.MustCompile("(?m)^.*stdout>:(.* us .*)$").FindAllStringSubmatch(out, -1)
			if err != nil || len(figures) != 2 {
				b.Fatalf("%v: %s", err, out)
			}
			b.Logf("fusion threshold %s: %s; %s", threshold, figures[0][1], figures[1][1])
		}
	}
}
