package pythontest

import (
	"errors"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestDevicePython runs operations on memory of CUDA devices, with stand-ins for CUDA and NCCL. In some jobs
// the tensors are copied through host memory. In the last ones, ranks die: before the launch of an operation,
// between its parts, while it is on the device, and in the abort after the death of another one.
func TestDevicePython(t *testing.T) {
	t.Parallel()
	testnet.NeedTorch(t) // which brings Python
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
		{"Faulted.test_shutdown_after_launch", 2, ""},
		{"Faulted.test_shutdown_after_launch", 2, "HOROVOD_ENABLE_ASYNC_COMPLETION=1"},
		{"Values.test_unknown_sizes Values.test_no_memory", 2, "HOROVOD_GPU_OPERATIONS=host"},
		{"WithoutNCCL", 2, "HOROVOD_GPU_OPERATIONS=none"},
	} {
		out, err := run(c.tests, c.ranks, c.env)
		if err != nil || strings.Count(out, ":Ran ") != c.ranks {
			t.Errorf("%s on %d ranks: %v\n%s", c.tests, c.ranks, err, out)
		}
	}
	elastic := elasticJobOf(t, []string{testnet.Python}, "device_ranks.py", []string{"-np", "2", "--min-np", "2"}, "Elastic")
	elastic.Env = append(elastic.Env, standIns()...)
	if out, err := elastic.CombinedOutput(); err != nil || strings.Count(string(out), ":Ran ") != 2 {
		t.Errorf("an elastic job: %v\n%s", err, out)
	}
	out, err := run("Faulted.test_exit_after_launch", 2)
	if err == nil || !strings.Contains(out, "exit status 120") ||
		strings.Count(out, ":gohvd: the job has failed, so results of this process may be undefined: ") != 2 {
		t.Errorf("ranks that exit after a failure: %v\n%s", err, out)
	}
	for _, c := range []struct {
		tests, at string
		dead      []int
	}{
		{"Killed", "", []int{2}},
		{"KilledAt", "2=ncclCommInitRankConfig:1", []int{2}},
		{"KilledAt", "2=cudaStreamWaitEvent:1", []int{2}},
		{"KilledAt", "2=cudaMemcpyBatchAsync:1", []int{2}},
		{"KilledAt", "2=ncclAllReduce:1", []int{2}},
		{"KilledAt", "2=cudaMemcpyBatchAsync:2", []int{2}},
		{"KilledAt", "2=cudaEventQuery:1", []int{2}},
		{"KilledAt", "1=ncclCommAbort:1 2=ncclAllReduce:2", []int{1, 2}},
	} {
		dir := t.TempDir()
		env := append(standIns(), "KILL_AT="+c.at, "TMPDIR="+dir, "XDG_RUNTIME_DIR=")
		for r, end := range ranksOf(t, 3, env, deviceRanks(t), c.tests) {
			out, err := end()
			passed := err == nil && strings.HasSuffix(out, "\nOK\n")
			killed := err != nil && err.Error() == "signal: killed"
			if dies := slices.Contains(c.dead, r); !dies && !passed || dies && !killed {
				t.Errorf("%s %s: rank %d: got %v, want that ranks %v are killed and the others pass\n%s", c.tests,
					c.at, r, err, c.dead, out)
			}
		}
		// Only the folder of the user, gohvd-UID, stays.
		inside, err := filepath.Glob(filepath.Join(dir, "gohvd-*", "*"))
		beside, otherErr := filepath.Glob(filepath.Join(dir, "[^g]*"))
		if left := append(inside, beside...); errors.Join(err, otherErr) != nil || len(left) > 0 {
			t.Errorf("%s %s: %v was left, %v, %v", c.tests, c.at, left, err, otherErr)
		}
	}
}

// onDevices runs tests of device_ranks.py with the stand-ins for CUDA and NCCL.
func onDevices(t testing.TB, tests string, ranks int, env ...string) (string, error) {
	cmd := job(t, ranks, append([]string{deviceRanks(t)}, strings.Fields(tests)...)...)
	cmd.Env = append(append(cmd.Env, standIns()...), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// deviceRanks returns the path of device_ranks.py.
func deviceRanks(t testing.TB) string { return filepath.Join(python(t), "tests", "device_ranks.py") }

// standIns returns the variables with which programs use the stand-ins. The streams are slow, so that missing
// waits show.
func standIns() []string {
	return []string{"HOROVOD_GPU_OPERATIONS=nccl", "HVD_NCCL_LIBRARY=" + testcuda.NCCL(),
		"HVD_CUDART_LIBRARY=" + testcuda.CUDA(), "LD_LIBRARY_PATH=" + testcuda.Folder(),
		"STANDIN_CUDA_DELAY_US=2000"}
}

// BenchmarkDevicePython measures the processor time of an allreduce from Python, on a device and in host
// memory, with libraries that do nothing. The operations are fused, and then each launched by itself:
//
//	go test -run '^$' -bench DevicePython ./internal/pythontest
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
