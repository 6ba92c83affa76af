//go:build nccl && cgo

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestDeviceCheckGPUs checks what --check-gpus says about the stand-ins, an old NCCL, and missing libraries.
func TestDeviceCheckGPUs(t *testing.T) {
	for _, c := range []struct{ nccl, cuda, devices, code, version, wrong string }{
		{testcuda.NCCL(), testcuda.CUDA(), "2", "22809", "2.28.9", ""},
		{testcuda.NCCL(), testcuda.CUDA(), "0", "21403", "2.14.3", ""},
		{testcuda.OldNCCL(), testcuda.CUDA(), "2", "2708", "2.7.8", "want at least 2.14: it lacks "},
		{"/none/libnccl.so.2", "/none/libcudart.so", "2", "", "", "/none/libnccl.so.2: cannot open"},
	} {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "--check-gpus")
		cmd.Env = append(os.Environ(), asDaemon+"=1", "HVD_SIDECAR=spawn", "HVD_NCCL_LIBRARY="+c.nccl, "HVD_CUDART_LIBRARY="+c.cuda,
			"STANDIN_CUDA_DEVICES="+c.devices, "STANDIN_NCCL_VERSION="+c.code)
		out, err := cmd.Output()
		var found cuda.Found
		if err == nil {
			err = json.Unmarshal(out, &found)
		}
		if err != nil {
			t.Fatalf("%v: %v and %s", c, err, out)
		}
		want := cuda.Found{Built: true, NCCL: found.NCCL, CUDA: found.CUDA}
		if c.version != "" {
			want.Driver, want.NCCL.File, want.CUDA.File = found.CUDA.Version, c.nccl, c.cuda
			want.Devices = int(c.devices[0] - '0')
		}
		if found != want || found.NCCL.Version != c.version ||
			!strings.Contains(found.NCCL.Error, c.wrong) || (found.NCCL.Error == "") != (c.wrong == "") ||
			(found.CUDA.Error == "") != (c.version != "") {
			t.Errorf("%v: got %s", c, out)
		}
	}
}
