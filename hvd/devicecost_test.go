//go:build nccl && cgo && !race

package hvd_test

import (
	"context"
	"math"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/store"
)

// TestRepeatedDeviceOperationAllocatesLittle checks that a repeated operation on a device makes at most two
// small allocations more than one in host memory: its description and the list of its options. It counts the
// least of many calls, because a call allocates more while the goroutine that ends operations on the device
// has not given back what the call before it used, and on a busy machine that can be so for a hundred calls.
// With the race detector, pools of memory drop some of what they are given.
func TestRepeatedDeviceOperationAllocatesLittle(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 0)
		defer d.stream.Close()
		x := d.buffer(1, 2)
		opts := []cuda.AllreduceOption{hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e)}
		inHost := []hvd.AllreduceOption{hvd.InPlace(), hvd.Op(hvd.Sum), hvd.Name("host"), hvd.On(e)}
		y := []float32{1, 2}
		count := func(once func() error) float64 {
			least := math.Inf(1)
			for range 100 {
				least = min(least, testing.AllocsPerRun(1, func() { d.check(once()) }))
			}
			return least
		}
		host := count(func() error { _, err := hvd.Allreduce(ctx, y, inHost...); return err })
		device := count(func() error { return cuda.Allreduce(ctx, x, x, opts...) })
		if device > host+2 {
			t.Errorf("%v allocations, want at most 2 more than in host memory, where it makes %v", device, host)
		}
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
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
			before := processorTime(b)
			for b.Loop() {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((processorTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
	if err := e.Shutdown(b.Context()); err != nil {
		b.Error(err)
	}
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
