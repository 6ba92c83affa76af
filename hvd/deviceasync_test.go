//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// runAsync is like run, but operations on devices complete when they have been launched. f must shut down the
// rank itself.
func runAsync(t *testing.T, n int, f func(ctx context.Context, e *hvd.Engine), settings ...string) {
	t.Helper()
	engines(t, n, f, nil, append(settings, "HOROVOD_ENABLE_ASYNC_COMPLETION", "1", "HOROVOD_GPU_OPERATIONS",
		"nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY", testcuda.CUDA())...)
}

// memory returns the memory of b.
func memory(b cuda.Buffer[float32]) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&b.Pointer)), 4*b.Len)
}

// TestDeviceAsync checks that an operation completes while its input is still being computed, and that the
// streams of both buffers wait for it: what the program enqueues on them, here a copy of the output and new
// values of the input, comes after the operation.
func TestDeviceAsync(t *testing.T) {
	type buffers = []cuda.Buffer[float32]
	for n := 1; n <= 3; n++ {
		dir := t.TempDir()
		gate := func(r int) string { return filepath.Join(dir, fmt.Sprint("open", r)) }
		var inputs []*device
		for r := range n {
			t.Setenv("STANDIN_CUDA_HOLD", gate(r))
			inputs = append(inputs, openDevice(t, r))
		}
		t.Setenv("STANDIN_CUDA_HOLD", "")
		runAsync(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, size, on := e.Rank(), float32(n), hvd.On(e)
			d, held := openDevice(t, me), inputs[me]
			defer d.stream.Close()
			defer held.stream.Close()
			x, y := held.buffer(1, 2), d.buffer(0, 0)
			d.check(cuda.Allreduce(ctx, x, y, hvd.Op(hvd.Sum), hvd.Name("x"), on))
			end, err := d.on.NewEvent()
			d.check(err)
			d.check(end.Record(d.stream))
			if done, err := end.Query(); done || err != nil {
				t.Errorf("rank %d: the stream of the output has not waited: %v", me, err)
			}
			got := make([]float32, 2)
			d.check(d.stream.Copy(tensor.Bytes(got), memory(y)))
			sevens := []float32{7, 7}
			d.check(held.stream.Copy(memory(x), tensor.Bytes(sevens)))
			d.check(os.WriteFile(gate(me), nil, 0o600))
			d.check(d.stream.Synchronize())
			if want := []float32{size, 2 * size}; !slices.Equal(got, want) {
				t.Errorf("rank %d of %d: got %v, want %v", me, n, got, want)
			}
			d.check(held.stream.Synchronize())
			runtime.KeepAlive(sevens)
			d.want("the new input", x, end.Close(), 7, 7)

			group := buffers{d.buffer(1), d.buffer(2)}
			out := d.buffer(make([]float32, n)...)
			err = cuda.GroupedAllreduce(ctx, group, group, hvd.Op(hvd.Sum), hvd.Name("x"), on)
			in := d.buffer(slices.Repeat([]float32{float32(me)}, n)...)
			rows, err2 := cuda.Alltoall(ctx, in, out, nil, on)
			if want := slices.Repeat([]int{1}, n); !slices.Equal(rows, want) {
				t.Errorf("rank %d of %d: got rows %v, want %v", me, n, rows, want)
			}
			d.check(d.stream.Synchronize())
			d.want("tensor 0 of a group", group[0], err, size)
			d.want("tensor 1 of a group", group[1], err, 2*size)
			d.want("alltoall", portion(out, n-1, 1), err2, size-1)

			z := d.buffer(1, 1)
			d.check(cuda.Allreduce(ctx, z, z, hvd.Op(hvd.Adasum), hvd.Name("copied"), on))
			d.want("without NCCL", z, nil, 1, 1)
			d.check(cuda.Allreduce(ctx, z, z, hvd.Op(hvd.Sum), hvd.Name("x"), on))
			d.want("after a barrier", z, hvd.Barrier(ctx, on), size, size)
			d.check(cuda.Allreduce(ctx, z, z, hvd.Op(hvd.Average), hvd.Name("x"), on))
			if err := e.Shutdown(ctx); err != nil {
				t.Errorf("rank %d: %v", me, err)
			}
			d.want("at the end of the job", z, nil, size, size)
		})
	}
}

// awaitEnd waits until the job has ended for e.
func awaitEnd(ctx context.Context, t *testing.T, e *hvd.Engine) {
	select {
	case <-e.Done():
	case <-ctx.Done():
		t.Errorf("rank %d: the job does not end: %v", e.Rank(), ctx.Err())
	}
}

// TestDeviceAsyncFails checks that an error after the completion of an operation fails the job: each rank
// gets it from the next operation and from Shutdown. The streams that wait for the operation go on.
func TestDeviceAsyncFails(t *testing.T) {
	t.Setenv("STANDIN_NCCL_FAULT", "late:1:1")
	const want = "remote process exited or there was a network error"
	runAsync(t, 2, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		x := d.buffer(1)
		err := cuda.Allreduce(ctx, x, x, hvd.Name("x"), hvd.On(e))
		// If rank 0 is slow, rank 1 has already aborted the communicator. At rank 1, the stand-in reports the
		// error only when the operation has been launched.
		if err != nil && e.Rank() == 1 {
			t.Errorf("the operation fails at once: %v", err)
		}
		awaitEnd(ctx, t, e)
		testnet.WantError(t, e.Err(), want)
		_, err = hvd.Allreduce(ctx, []float32{1}, hvd.Name("next"), hvd.On(e))
		testnet.WantError(t, err, want)
		testnet.WantError(t, e.Shutdown(ctx), want)
		d.check(d.stream.Synchronize())
	})
}

// TestDeviceAsyncTimeout checks that the time limit of an operation also applies after it has completed. The
// test repeats with a longer limit if the limit passes before the operation has been launched.
func TestDeviceAsyncTimeout(t *testing.T) {
	t.Setenv("STANDIN_NCCL_FAULT", "hang:1:2")
	for limit := 250 * time.Millisecond; ; limit *= 4 {
		var early atomic.Bool
		runAsync(t, 2, func(ctx context.Context, e *hvd.Engine) {
			d := openDevice(t, e.Rank())
			defer d.stream.Close()
			x := d.buffer(1)
			d.check(cuda.Allreduce(ctx, x, x, hvd.On(e))) // connects the ranks
			err := cuda.Allreduce(ctx, x, x, hvd.Name("x"), hvd.On(e), hvd.Timeout(limit))
			if err != nil {
				early.Store(true)
			}
			awaitEnd(ctx, t, e)
			want := fmt.Sprintf(`"x" timed out after %vs`, limit.Seconds())
			testnet.WantError(t, e.Err(), want)
			testnet.WantError(t, e.Shutdown(ctx), want)
			d.check(d.stream.Synchronize())
		})
		if !early.Load() || limit > time.Minute {
			return
		}
	}
}

// TestDeviceAsyncDeath checks that a rank learns of the death of another one after its operation has
// completed, and that its stream does not wait for ever.
func TestDeviceAsyncDeath(t *testing.T) {
	t.Setenv("STANDIN_NCCL_FAULT", "hang:1:1")
	completed := make(chan struct{}) // at rank 0
	runAsync(t, 2, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		x := d.buffer(1)
		d.check(cuda.Allreduce(ctx, x, x, hvd.On(e)))
		if e.Rank() == 1 {
			<-completed
			d.check(e.Inside().Close())
		} else {
			close(completed)
			awaitEnd(ctx, t, e)
			testnet.WantError(t, e.Shutdown(ctx), "rank 1 failed")
		}
		d.check(d.stream.Synchronize())
	})
}
