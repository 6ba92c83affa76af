//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestDeviceStreamsFit checks that operations in several streams of a device leave each other enough
// multiprocessors. The streams begin operations in any order, so ranks would wait for each other for ever if
// only some of the operations were on their devices. The stand-in has no room for two operations of the size
// that it chooses itself.
func TestDeviceStreamsFit(t *testing.T) {
	t.Setenv("STANDIN_CUDA_PROCESSORS", "40")
	runSets(t, 3, [][]int{{0, 1}, {1, 2}, {0, 2}}, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		rng := rand.New(rand.NewPCG(2, uint64(e.Rank())))
		type submitted struct {
			h    *hvd.Handle[struct{}]
			x, y cuda.Buffer[float32]
			size int
		}
		var all []submitted
		for _, i := range rng.Perm(4 * 20) {
			set := e.ProcessSets()[i%4]
			if !set.Included() {
				continue
			}
			x, y := d.buffer(1, float32(i)), d.buffer(2)
			group := []cuda.Buffer[float32]{x, y}
			h := must(cuda.GroupedAllreduceAsync(group, group, hvd.Op(hvd.Sum), hvd.Over(set),
				hvd.Name(fmt.Sprint("x", i))))
			all = append(all, submitted{h, x, y, set.Size()})
		}
		for _, s := range all {
			_, err := s.h.Wait(ctx)
			if n := float32(s.size); err != nil || d.read(s.x)[0] != n || d.read(s.y)[0] != 2*n {
				t.Errorf("rank %d: got %v, %v and %v, want %v and %v", e.Rank(), d.read(s.x), d.read(s.y), err, n,
					2*n)
				return
			}
		}
	}, "HOROVOD_NUM_NCCL_STREAMS", "3", "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
		"HVD_CUDART_LIBRARY", testcuda.CUDA())
}

// TestDeviceStreamsOverlap checks that an operation of one process set does not wait on the device for one of
// another set that was submitted before it, if the device has several streams.
func TestDeviceStreamsOverlap(t *testing.T) {
	gate := filepath.Join(t.TempDir(), "open")
	t.Setenv("STANDIN_CUDA_HOLD", gate)
	waiting := []*device{openDevice(t, 0), openDevice(t, 1), openDevice(t, 2)}
	t.Setenv("STANDIN_CUDA_HOLD", "")
	runSets(t, 3, [][]int{{0, 1}, {1, 2}}, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		held := waiting[e.Rank()]
		defer held.stream.Close()
		on := hvd.On(e)
		x, y := held.buffer(1), d.buffer(2)
		h := must(cuda.AllreduceAsync(x, x, hvd.Op(hvd.Sum), hvd.Name("x"), on))
		if set := e.ProcessSets()[2]; set.Included() {
			noError(t, hvd.Barrier(ctx, hvd.Name("all have submitted it"), hvd.Over(set)))
		}
		if other := e.ProcessSets()[1]; other.Included() {
			d.want("of the other set", y, cuda.Allreduce(ctx, y, y, hvd.Op(hvd.Sum), hvd.Over(other)), 4)
			if h.Poll() {
				t.Errorf("rank %d: the operation has not waited for the stream of its input", e.Rank())
			}
			noError(t, hvd.Barrier(ctx, hvd.Name("both have polled"), hvd.Over(other)))
			noError(t, os.WriteFile(gate, nil, 0o600))
		}
		d.want("of all ranks", x, wait(ctx, h), 3)
	}, "HOROVOD_NUM_NCCL_STREAMS", "2", "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
		"HVD_CUDART_LIBRARY", testcuda.CUDA())
}

// TestDeviceStreamsRefused checks that Init fails if NCCL cannot bound the size of operations.
func TestDeviceStreamsRefused(t *testing.T) {
	t.Setenv("STANDIN_NCCL_VERSION", "21605")
	_, err := hvd.New(t.Context(), hvd.WithSetting("HOROVOD_GPU_OPERATIONS", "nccl"),
		hvd.WithSetting("HOROVOD_NUM_NCCL_STREAMS", "2"), hvd.WithSetting("HVD_NCCL_LIBRARY", testcuda.NCCL()),
		hvd.WithSetting("HVD_CUDART_LIBRARY", testcuda.CUDA()))
	testnet.WantError(t, err,
		"has version 2.16.5, want at least 2.17 for 2 streams (HOROVOD_NUM_NCCL_STREAMS)")
}
