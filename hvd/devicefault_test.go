//go:build nccl && cgo

package hvd_test

import (
	"context"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// TestDeviceFaults checks that each fault of NCCL at rank 1 ends the operation with an error at every rank
// that says what has happened, and that later operations and Shutdown return it too. After a fault that no
// library reports, the time limit of the operation or of the connection ends it.
func TestDeviceFaults(t *testing.T) {
	for fault, c := range map[string]struct{ setting, value, want string }{
		"async:1:2": {"HOROVOD_LOG_LEVEL", "error",
			"ops/nccl: allreduce: the communicator: remote process exited or there was a network error (6)"},
		// Rank 1 reports the error of its call, and rank 0 that rank 1 has aborted the communicator. The job
		// fails with the first of them.
		"refuse:1:2": {"HOROVOD_LOG_LEVEL", "error", "rank 0 or rank 1 failed: "},
		"hang:1:2":   {"HVD_OPERATION_TIMEOUT_SECONDS", "1", `"x" timed out after 1s`},
		"slow:1:2":   {"HVD_OPERATION_TIMEOUT_SECONDS", "1", `"x" timed out after 1s`},
		"init:1": {"HOROVOD_GLOO_TIMEOUT_SECONDS", "5",
			"NCCL has not connected the ranks in 5s (HOROVOD_GLOO_TIMEOUT_SECONDS)"},
	} {
		t.Run(fault, func(t *testing.T) {
			t.Setenv("STANDIN_NCCL_FAULT", fault)
			if c.value == "1" { // the limit may pass while NCCL connects the ranks, for which Close waits
				t.Setenv("STANDIN_NCCL_INIT_SECONDS", "3")
			}
			engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
				d := openDevice(t, e.Rank())
				defer d.stream.Close()
				x := d.buffer(1)
				var err error
				for step := 0; err == nil && step < 2; step++ {
					err = cuda.Allreduce(ctx, x, x, hvd.Name("x"), hvd.On(e))
				}
				testnet.WantError(t, err, `hvd: allreduce "x": `, c.want)
				_, err = hvd.Allreduce(ctx, []float32{1}, hvd.Name("next"), hvd.On(e))
				testnet.WantError(t, err, c.want)
				testnet.WantError(t, e.Shutdown(ctx), c.want)
				d.check(d.stream.Synchronize())
			}, nil, c.setting, c.value, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
				"HVD_CUDART_LIBRARY", testcuda.CUDA())
		})
	}
}

// TestDeviceLibraries checks that Init fails at every rank if one of them cannot load a library, and that the
// error says which rank and what it lacks.
func TestDeviceLibraries(t *testing.T) {
	for _, c := range []struct{ setting, file, want string }{
		{"HVD_NCCL_LIBRARY", testcuda.OldNCCL(), "want at least 2.14: it lacks ncclGetLastError"},
		{"HVD_NCCL_LIBRARY", "/missing/libnccl.so.2", "/missing/libnccl.so.2"},
		{"HVD_CUDART_LIBRARY", "/missing/libcudart.so.12", "/missing/libcudart.so.12"},
	} {
		kv := store.NewHashStore(store.Limits{})
		ranks(t, 2, func(r int) {
			libraries := map[string]string{"HVD_NCCL_LIBRARY": testcuda.NCCL(), "HVD_CUDART_LIBRARY": testcuda.CUDA()}
			if r == 1 {
				libraries[c.setting] = c.file
			}
			opts := place(kv, r, 2, "HOROVOD_GPU_OPERATIONS", "nccl")
			for name, file := range libraries {
				opts = append(opts, hvd.WithSetting(name, file))
			}
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			_, err := hvd.New(ctx, opts...)
			testnet.WantError(t, err, "hvd: init: ", "HOROVOD_GPU_OPERATIONS=nccl: ", c.want)
			if r == 0 {
				testnet.WantError(t, err, "rank 1")
			}
		})
		kv.Close()
	}
}
