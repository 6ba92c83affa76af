//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestDeviceWaits counts how often streams wait on the device for events. However many tensors are fused, the
// operation waits once for each stream of the program. With HOROVOD_ENABLE_ASYNC_COMPLETION, each stream of
// the program also waits once for the operation.
func TestDeviceWaits(t *testing.T) {
	for _, async := range []int{0, 1} {
		gate := filepath.Join(t.TempDir(), "open")
		t.Setenv("STANDIN_CUDA_HOLD", gate)
		held := []*device{openDevice(t, 0), openDevice(t, 1)}
		t.Setenv("STANDIN_CUDA_HOLD", "")
		calls := testcuda.Calls(t)
		var submitted sync.WaitGroup
		submitted.Add(2)
		var operations [2]int
		runSets(t, 2, [][]int{{0}, {1}}, func(ctx context.Context, e *hvd.Engine) {
			me, on := e.Rank(), hvd.On(e)
			one, two := held[me], openDevice(t, me)
			defer one.stream.Close()
			defer two.stream.Close()
			var handles []*hvd.Handle[struct{}]
			var outputs []cuda.Buffer[float32]
			for i := range 20 {
				x, y := one.buffer(float32(i)), two.buffer(0)
				h, err := cuda.AllreduceAsync(x, y, hvd.Op(hvd.Sum), hvd.Name(fmt.Sprint(i)), on)
				one.check(err)
				handles, outputs = append(handles, h), append(outputs, y)
			}
			// Rank 0 gets the request of the barrier after those before it.
			one.check(hvd.Barrier(ctx, hvd.Over(e.ProcessSets()[1+me])))
			submitted.Done()
			submitted.Wait()
			if me == 0 {
				one.check(os.WriteFile(gate, nil, 0o600))
			}
			for i, h := range handles {
				if _, err := h.Wait(ctx); err != nil {
					t.Errorf("rank %d: operation %d: %v", me, i, err)
				}
			}
			one.check(two.stream.Synchronize()) // for operations that have only been launched
			for i, y := range outputs {
				two.want("the output", y, nil, 2*float32(i))
			}
			operations[me] = int(e.Inside().Engine.Stats().FusionResponses)
		}, "HOROVOD_ENABLE_ASYNC_COMPLETION", fmt.Sprint(async), "HOROVOD_GPU_OPERATIONS", "nccl",
			"HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY", testcuda.CUDA())
		// No operation ends before the inputs exist. Until then rank 0 grants two at most, later the rest.
		want := (operations[0] + operations[1]) * 2 * (1 + async)
		if got := calls("cudaStreamWaitEvent"); got != want || operations[0] > 3 {
			t.Errorf("async %d: got %d waits in %v operations, want %d in at most 3", async, got, operations, want)
		}
	}
}
