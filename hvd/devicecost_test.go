//go:build nccl && cgo && !race

package hvd_test

import (
	"context"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// TestRepeatedDeviceOperationAllocatesLittle checks that a repeated operation on a device makes at most two
// small allocations more than one in host memory: its description and the list of its options. It polls for
// the end of each operation, because a wait that has to sleep makes a channel, and whether it has to depends
// on what else the machine does. With the race detector, pools of memory drop some of what they are given.
func TestRepeatedDeviceOperationAllocatesLittle(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 0)
		defer d.stream.Close()
		x := d.buffer(1, 2)
		opts := []cuda.AllreduceOption{hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e)}
		inHost := []hvd.AllreduceOption{hvd.InPlace(), hvd.Op(hvd.Sum), hvd.Name("host"), hvd.On(e)}
		y := []float32{1, 2}
		host := testing.AllocsPerRun(100, func() {
			h, err := hvd.AllreduceAsync(y, inHost...)
			d.check(err)
			d.check(poll(ctx, h))
		})
		device := testing.AllocsPerRun(100, func() {
			h, err := cuda.AllreduceAsync(x, x, opts...)
			d.check(err)
			d.check(poll(ctx, h))
		})
		if device > host+2 {
			t.Errorf("%v allocations, want at most 2 more than in host memory, where it makes %v", device, host)
		}
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

func poll[R any](ctx context.Context, h *hvd.Handle[R]) error {
	for !h.Poll() {
		runtime.Gosched()
	}
	_, err := h.Wait(ctx)
	return err
}

// BenchmarkDeviceAllreduce measures the processor time and the allocations of an allreduce of one rank on a
// device, with libraries that do nothing, and those of the same call in host memory:
//
//	go test -tags nccl -run '^$' -bench DeviceAllreduce ./hvd
func BenchmarkDeviceAllreduce(b *testing.B) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	e, err := hvd.New(b.Context(), place(kv, 0, 1, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY",
		testcuda.Null(), "HVD_CUDART_LIBRARY", testcuda.Null())...)
	if err != nil {
		b.Fatal(err)
	}
	x := make([]float32, 16)
	on := cuda.Buffer[float32]{Pointer: uintptr(unsafe.Pointer(&x[0])), Len: len(x)}
	opts := []cuda.AllreduceOption{hvd.Op(hvd.Sum), hvd.Name("device"), hvd.On(e)}
	inHost := []hvd.AllreduceOption{hvd.InPlace(), hvd.Op(hvd.Sum), hvd.Name("host"), hvd.On(e)}
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"host", func() error { _, err := hvd.Allreduce(b.Context(), x, inHost...); return err }},
		{"device", func() error { return cuda.Allreduce(b.Context(), on, on, opts...) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for range 100 {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			before := testnet.ProcessorTime(b)
			for b.Loop() {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((testnet.ProcessorTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
	if err := e.Shutdown(b.Context()); err != nil {
		b.Error(err)
	}
}
