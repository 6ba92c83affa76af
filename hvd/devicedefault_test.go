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

// TestDeviceDefault checks that operations on devices run with NCCL without a setting if all ranks have it,
// and that no rank uses it if one lacks it or HOROVOD_GPU_OPERATIONS is none.
func TestDeviceDefault(t *testing.T) {
	for _, c := range []struct {
		name, library string // of NCCL at rank 1
		settings      []string
		want          string // in the error of an operation
	}{
		{"all have it", testcuda.NCCL(), nil, ""},
		{"rank 1 lacks it", testcuda.OldNCCL(), nil,
			"rank 1 cannot use the backend nccl: nccl: " + testcuda.OldNCCL() + " has version 2.23.4, want at least 2.14: it lacks"},
		{"none", testcuda.NCCL(), []string{"HOROVOD_GPU_OPERATIONS", "none"}, "HOROVOD_GPU_OPERATIONS is none"},
	} {
		t.Run(c.name, func(t *testing.T) {
			kv := store.NewHashStore(store.Limits{})
			defer kv.Close()
			ranks(t, 2, func(r int) {
				library := []string{testcuda.NCCL(), c.library}[r]
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				e, err := hvd.New(ctx, place(kv, r, 2, append(c.settings, "HVD_NCCL_LIBRARY", library,
					"HVD_CUDART_LIBRARY", testcuda.CUDA())...)...)
				if err != nil {
					t.Errorf("rank %d: %v", r, err)
					return
				}
				d := openDevice(t, r)
				defer d.stream.Close()
				x := d.buffer(1, 2)
				err = cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e))
				if c.want == "" {
					d.want("the sum", x, err, 2, 4)
				} else {
					testnet.WantError(t, err, c.want)
				}
				d.check(e.Shutdown(ctx))
			})
		})
	}
}

// TestDeviceDefaultStartsLate checks that Init does not look for devices if no setting asks for NCCL, so that
// the program can set CUDA_VISIBLE_DEVICES afterwards.
func TestDeviceDefaultStartsLate(t *testing.T) {
	t.Setenv("STANDIN_CUDA_NO_DEVICE", "100")
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		t.Setenv("STANDIN_CUDA_NO_DEVICE", "0")
		d := openDevice(t, 0)
		defer d.stream.Close()
		x := d.buffer(1, 2)
		d.want("the sum", x, cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e)), 1, 2)
	}, "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY", testcuda.CUDA())
}
