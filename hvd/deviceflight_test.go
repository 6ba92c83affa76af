//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestDeviceInFlight checks that an operation of a process set is launched without waiting for the end of the
// one before it, whose input is still being computed. There are two, because the coordinator grants more only
// while at most one is unfinished. (It grants more at once if they have been submitted together.)
func TestDeviceInFlight(t *testing.T) {
	defer time.AfterFunc(4*time.Minute, func() {
		panic("TestDeviceInFlight: for 4 minutes, an operation has waited for the end of the one before it")
	}).Stop() // the test cannot end by itself then: CUDA would wait for the operations
	const operations = 2
	gate := filepath.Join(t.TempDir(), "open")
	t.Setenv("STANDIN_CUDA_HOLD", gate)
	held := []*device{openDevice(t, 0), openDevice(t, 1)}
	t.Setenv("STANDIN_CUDA_HOLD", "")
	calls := testcuda.Calls(t)
	var once sync.Once
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		d, on := held[e.Rank()], hvd.On(e)
		defer d.stream.Close()
		var ended atomic.Int32
		var waiting sync.WaitGroup
		var buffers []cuda.Buffer[float32]
		for i := range operations {
			x := d.buffer(float32(i), 1)
			h, err := cuda.AllreduceAsync(x, x, hvd.Op(hvd.Sum), hvd.Name(fmt.Sprint(i)), on)
			if err != nil {
				t.Fatal(err)
			}
			buffers = append(buffers, x)
			waiting.Go(func() {
				_, err := h.Wait(ctx)
				d.check(err)
				ended.Add(1)
			})
		}
		once.Do(func() {
			testnet.Eventually(t, "all operations are launched", func() bool {
				return calls("ncclAllReduce") == 2*operations
			})
			if n := ended.Load(); n != 0 {
				t.Errorf("%d operations have ended before their input was computed", n)
			}
			d.check(os.WriteFile(gate, nil, 0o600))
		})
		d.check(hvd.Barrier(ctx, on))
		waiting.Wait()
		for i, x := range buffers {
			d.want(fmt.Sprint("operation ", i), x, nil, 2*float32(i), 2)
		}
	}, "HOROVOD_FUSION_THRESHOLD", "0", "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
		"HVD_CUDART_LIBRARY", testcuda.CUDA())
}
