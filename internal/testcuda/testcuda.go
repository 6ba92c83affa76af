// Package testcuda builds the stand-ins for libcuda, libcudart, libnccl and NVTX, with which tests run on
// machines without a GPU. The folder standin has their sources, which say what they check. On a machine with
// a GPU, a folder with the real libraries can take their place.
package testcuda

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
)

// folder is the environment variable with the folder of the libraries. Processes that a test starts inherit
// it.
const folder = "GOHVD_TEST_STANDINS"

// Main runs the tests of a package and returns the exit status. In a build with CUDA it calls WithLibraries.
func Main(m *testing.M) int {
	if !cuda.Built {
		return m.Run()
	}
	return WithLibraries(m.Run)
}

// WithLibraries builds the stand-ins with gcc and returns what run returns. If the environment names a folder
// of libraries, run uses these.
func WithLibraries(run func() int) int {
	if os.Getenv(folder) == "" {
		dir, err := os.MkdirTemp("", "standin")
		if err == nil {
			err = build(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "testcuda:", err)
			return 1
		}
		defer os.RemoveAll(dir)
		os.Setenv(folder, dir)
		os.Setenv("STANDIN_NCCL_FOLDER", dir) // so that nothing is left of ranks that die
	}
	return run()
}

// M runs the tests of a package as Main does.
type M struct{ *testing.M }

// Run calls Main.
func (m M) Run() int { return Main(m.M) }

// Folder returns the folder of the libraries.
func Folder() string { return os.Getenv(folder) }

// CUDA returns the path of the stand-in for libcudart.
func CUDA() string { return filepath.Join(Folder(), "libcudart.so.12") }

// Driver returns the path of the stand-in for libcuda, which that for libcudart loads.
func Driver() string { return filepath.Join(Folder(), "libcuda.so.1") }

// NCCL returns the path of the stand-in for libnccl.
func NCCL() string { return filepath.Join(Folder(), "libnccl.so.2") }

// NVTX returns the path of the stand-in for NVTX.
func NVTX() string { return filepath.Join(Folder(), "libnvtx3interop.so.1") }

// Null returns the path of a stand-in for all three libraries with which everything has ended at once. A
// process that uses it cannot use the others.
func Null() string { return filepath.Join(Folder(), "null", "libcuda.so.1") }

// OldNCCL returns the path of a stand-in that has only the functions of NCCL 2.7.
func OldNCCL() string { return filepath.Join(Folder(), "libnccl-old.so.2") }

// ShareDevice sets the environment variables with which NCCL accepts several ranks on one device. To NCCL
// each rank then looks like a host of its own, so rank is its number. Each rank must be a process.
func ShareDevice(t *testing.T, rank int) {
	for name, value := range map[string]string{
		"NCCL_HOSTID": fmt.Sprint("rank", rank), "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
		"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
		"NCCL_CUMEM_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "1048576",
	} {
		t.Setenv(name, value)
	}
}

// Calls returns a function that returns how often this process, and those that it starts, have called a
// function of CUDA since the last call of Calls. The stand-in counts only some functions, which it names.
func Calls(t *testing.T) func(function string) int {
	file := filepath.Join(t.TempDir(), "calls")
	t.Setenv("STANDIN_CUDA_CALLS", file)
	return func(function string) (n int) {
		called, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		for line := range strings.Lines(string(called)) {
			if line == function+"\n" {
				n++
			}
		}
		return n
	}
}

func build(dir string) error {
	_, file, _, _ := runtime.Caller(0)
	out, err := exec.Command("sh", filepath.Join(filepath.Dir(file), "standin", "build.sh"), dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build.sh: %w\n%s", err, out)
	}
	return nil
}
