//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	cudart "github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// device is a CUDA device of the stand-in with a stream.
type device struct {
	t      *testing.T
	index  int
	on     *cudart.Device
	stream *cudart.Stream
	kept   [][]float32 // what the stream copies
}

func openDevice(t *testing.T, index int) *device {
	r, err := cudart.Load(testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	d := &device{t: t, index: index}
	if d.on, err = r.Device(index); err == nil {
		d.stream, err = d.on.NewStream()
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *device) check(err error) {
	if err != nil {
		d.t.Errorf("device %d: %v", d.index, err)
	}
}

// buffer returns a buffer on d. The copy of x to it is enqueued on the stream, but has not ended.
func (d *device) buffer(x ...float32) cuda.Buffer[float32] {
	memory, err := d.on.Alloc(4 * len(x))
	d.check(err)
	d.kept = append(d.kept, x)
	d.check(d.stream.Copy(memory, tensor.Bytes(x)))
	return cuda.Buffer[float32]{Pointer: uintptr(unsafe.Pointer(unsafe.SliceData(memory))), Len: len(x),
		Device: d.index, Stream: uintptr(d.stream.Handle())}
}

// wait waits for h, which has no result.
func wait(ctx context.Context, h *hvd.Handle[struct{}]) error {
	_, err := h.Wait(ctx)
	return err
}

// read returns the elements of b, without waiting for its stream.
func (d *device) read(b cuda.Buffer[float32]) []float32 {
	s, err := d.on.NewStream()
	d.check(err)
	x := make([]float32, b.Len)
	memory := unsafe.Slice(*(**byte)(unsafe.Pointer(&b.Pointer)), 4*b.Len)
	d.check(s.Copy(tensor.Bytes(x), memory))
	d.check(s.Synchronize())
	d.check(s.Close())
	return x
}

func (d *device) want(what string, b cuda.Buffer[float32], err error, want ...float32) {
	d.t.Helper()
	if got := d.read(b); err != nil || !slices.Equal(got, want) {
		d.t.Errorf("device %d: %s: got %v and %v, want %v", d.index, what, got, err, want)
	}
}

// TestDeviceBuffers runs the operations on devices in jobs of 1 to 3 ranks. The inputs are still being copied
// to the devices when the operations are submitted.
func TestDeviceBuffers(t *testing.T) {
	t.Setenv("STANDIN_CUDA_DEVICES", "4")
	for n := 1; n <= 3; n++ {
		run(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, size := e.Rank(), float32(n)
			d := openDevice(t, me+1)
			defer d.stream.Close()
			x := d.buffer(float32(me), 2, 3)
			sum := size * (size - 1) / 2
			h, err := cuda.AllreduceAsync(x, x, hvd.Op(hvd.Sum), hvd.Name("a"), hvd.On(e))
			y, out := d.buffer(1), d.buffer(0)
			h2, err2 := cuda.AllreduceAsync(y, out, hvd.Op(hvd.Sum), hvd.Name("b"), hvd.On(e))
			if err != nil || err2 != nil {
				t.Error(err, err2)
				return
			}
			d.want("allreduce in place", x, wait(ctx, h), sum, 2*size, 3*size)
			d.want("allreduce", out, wait(ctx, h2), size)
			d.want("the input", y, nil, 1)

			b := d.buffer(float32(me), 5)
			out = d.buffer(0, 0)
			d.want("broadcast", out, cuda.Broadcast(ctx, b, out, n-1, hvd.On(e)), size-1, 5)

			var all []float32
			for r := range n {
				all = append(all, slices.Repeat([]float32{float32(r)}, r+1)...)
			}
			part := d.buffer(slices.Repeat([]float32{float32(me)}, me+1)...)
			out = d.buffer(make([]float32, len(all))...)
			d.want("allgather", out, cuda.Allgather(ctx, part, out, hvd.On(e)), all...)

			whole, mine := make([]float32, 2*n), make([]float32, 2)
			for i := range whole {
				whole[i] = float32(i)
			}
			out = d.buffer(mine...)
			err = cuda.Reducescatter(ctx, d.buffer(whole...), out, hvd.Op(hvd.Sum), hvd.On(e))
			d.want("reducescatter", out, err, float32(2*me)*size, float32(2*me+1)*size)
		}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
			testcuda.CUDA())
	}
}

// TestMixedDevices checks that ranks get the mismatch error if one of them has its tensor in host memory, and
// that the job goes on.
func TestMixedDevices(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		var err error
		if e.Rank() == 0 {
			_, err = hvd.Allreduce(ctx, []float32{1}, hvd.Name("x"), hvd.On(e))
		} else {
			d := openDevice(t, 0)
			defer d.stream.Close()
			x := d.buffer(1)
			err = cuda.Allreduce(ctx, x, x, hvd.Name("x"), hvd.On(e))
		}
		testnet.WantError(t, err,
			"mismatched devices: rank 0 sent a tensor in host memory, rank 1 sent a tensor on a CUDA device")
		got, err := hvd.Allreduce(ctx, []float32{1}, hvd.Op(hvd.Sum), hvd.Name("x"), hvd.On(e))
		if err != nil || got[0] != 2 {
			t.Errorf("rank %d: afterwards: got %v and %v, want 2", e.Rank(), got, err)
		}
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

func TestDeviceWithoutNCCL(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		x := cuda.Buffer[float32]{Pointer: 4096, Len: 1}
		err := cuda.Allreduce(ctx, x, x, hvd.On(e))
		testnet.WantError(t, err, "HOROVOD_GPU_OPERATIONS is none")
	}, "HOROVOD_GPU_OPERATIONS", "none")
}

// TestDeviceSets submits operations of overlapping process sets in an order of its own at each rank. All of
// them run in one stream of each device, so the ranks must launch them in the same order.
func TestDeviceSets(t *testing.T) {
	runSets(t, 3, [][]int{{0, 1}, {1, 2}, {0, 2}}, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		rng := rand.New(rand.NewPCG(1, uint64(e.Rank())))
		type submitted struct {
			h    *hvd.Handle[struct{}]
			x    cuda.Buffer[float32]
			size int
		}
		var all []submitted
		for _, i := range rng.Perm(4 * 20) {
			set := e.ProcessSets()[i%4]
			if !set.Included() {
				continue
			}
			x := d.buffer(1, float32(i))
			h := must(cuda.AllreduceAsync(x, x, hvd.Op(hvd.Sum), hvd.Over(set),
				hvd.Name(fmt.Sprint("x", i))))
			all = append(all, submitted{h, x, set.Size()})
		}
		for _, s := range all {
			if _, err := s.h.Wait(ctx); err != nil || d.read(s.x)[0] != float32(s.size) {
				t.Errorf("rank %d: got %v and %v, want %d", e.Rank(), d.read(s.x), err, s.size)
				return
			}
		}
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// TestDeviceJoin checks that a rank that has joined contributes to sums on devices.
func TestDeviceJoin(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 3-e.Rank()) // a rank need not use the device with the number of its local rank
		defer d.stream.Close()
		for step := range 3 {
			if e.Rank() == 2 && step == 1 {
				break
			}
			x := d.buffer(1, 2)
			name := hvd.Name(fmt.Sprint("x", step/2))
			err := cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), name, hvd.On(e))
			n := float32(3)
			if step > 0 {
				n = 2
			}
			d.want(fmt.Sprint("step ", step), x, err, n, 2*n)
		}
		must(hvd.Join(ctx, hvd.On(e)))
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// portion returns n elements of b from the given one.
func portion(b cuda.Buffer[float32], from, n int) cuda.Buffer[float32] {
	b.Pointer, b.Len = b.Pointer+uintptr(4*from), n
	return b
}

// TestDevicePlaces checks where the output may be, and that other places are refused.
func TestDevicePlaces(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me := e.Rank()
		d := openDevice(t, me)
		defer d.stream.Close()
		on, sum := hvd.On(e), hvd.Op(hvd.Sum)
		x := d.buffer(1, 2, 3, 4)
		d.want("reducescatter in place", portion(x, 2*me, 2),
			cuda.Reducescatter(ctx, x, portion(x, 2*me, 2), sum, on), float32(4*me+2), float32(4*me+4))
		y := d.buffer(5, 6, 7, 8)
		d.want("allgather in place", y, cuda.Allgather(ctx, portion(y, me, 1+me), portion(y, 0, 3), on), 5, 6, 7, 8)
		const overlaps = "the output overlaps the input, want an output that begins at element"
		testnet.WantError(t, cuda.Allreduce(ctx, portion(x, 0, 3), portion(x, 1, 3), on), overlaps+" 0")
		testnet.WantError(t, cuda.Broadcast(ctx, portion(x, 1, 3), portion(x, 0, 3), 0, on), overlaps+" 0")
		testnet.WantError(t, cuda.Reducescatter(ctx, x, portion(x, 1, 2), on), overlaps)
		testnet.WantError(t, cuda.Allgather(ctx, portion(x, 1, 3), portion(x, 0, 3), on),
			"the input overlaps the output, but is no part of it")
		err := cuda.Allgather(ctx, portion(x, 1-me, 1), portion(x, 0, 2), on)
		testnet.WantError(t, err, fmt.Sprintf("the input begins at byte %d of the output, want byte %d", 4*(1-me),
			4*me))
		x.Stream = 2
		testnet.WantError(t, cuda.Allreduce(ctx, x, x, on), "got stream 2, which is another stream in each thread")
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// TestDeviceOutputStream checks that an operation waits for work on the stream of its output.
func TestDeviceOutputStream(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 0)
		defer d.stream.Close()
		x := d.buffer(7)
		t.Setenv("STANDIN_CUDA_DELAY_US", "100000")
		slow := openDevice(t, 0)
		t.Setenv("STANDIN_CUDA_DELAY_US", "200")
		defer slow.stream.Close()
		out := slow.buffer(1)
		err := cuda.Allreduce(ctx, x, out, hvd.Op(hvd.Sum), hvd.On(e))
		slow.check(slow.stream.Synchronize())
		d.want("the output", out, err, 7)
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// rows returns n rows of two elements that rank r sends.
func rows(r, n int) (x []float32) {
	for i := range n {
		x = append(x, float32(10*r+i), 0.5)
	}
	return x
}

// TestDeviceRows runs the operations that send rows, and a reduce, in jobs of 1 to 3 ranks. Rank r sends i
// rows to rank i in the alltoall, gathers r+1 rows, and gets r rows of the scatter.
func TestDeviceRows(t *testing.T) {
	for n := 1; n <= 3; n++ {
		run(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, root := e.Rank(), n-1
			d := openDevice(t, me)
			defer d.stream.Close()
			on, two := hvd.On(e), func(n int) hvd.ShapeOption { return hvd.Shape(n, 2) }
			var splits, received, counts []int
			var exchanged, gathered []float32
			total := 0
			for r := range n {
				splits, received, counts = append(splits, r), append(received, me), append(counts, r+1)
				exchanged = append(exchanged, rows(r, n*(n-1)/2)[me*(me-1):][:2*me]...)
				gathered = append(gathered, rows(r, r+1)...)
				total += r
			}
			in, out := d.buffer(rows(me, total)...), d.buffer(make([]float32, len(exchanged))...)
			got, err := cuda.Alltoall(ctx, in, out, splits, two(total), on)
			d.want("alltoall", out, err, exchanged...)
			if !slices.Equal(got, received) {
				t.Errorf("rank %d of %d: alltoall: got rows %v, want %v", me, n, got, received)
			}
			var whole cuda.Buffer[float32]
			if me == root {
				whole = d.buffer(make([]float32, len(gathered))...)
			}
			got, err = cuda.Gather(ctx, d.buffer(rows(me, me+1)...), whole, root, two(me+1), on)
			if err != nil || me == root && !slices.Equal(got, counts) {
				t.Errorf("rank %d of %d: gather: got rows %v and %v, want %v", me, n, got, err, counts)
			}
			var from cuda.Buffer[float32]
			if me == root {
				d.want("gather", whole, err, gathered...)
				from = d.buffer(rows(root, total)...)
			}
			out = d.buffer(make([]float32, 2*me)...)
			err = cuda.Scatter(ctx, from, out, splits, root, two(total), on)
			d.want("scatter", out, err, rows(root, total)[me*(me-1):][:2*me]...)

			x, sum := d.buffer(1, float32(me)), cuda.Buffer[float32]{}
			if me == root {
				sum = x
			}
			err = cuda.Reduce(ctx, x, sum, root, hvd.Op(hvd.Sum), on)
			if want := []float32{1, float32(me)}; me != root {
				d.want("reduce, not root", x, err, want...)
			} else {
				d.want("reduce", x, err, float32(n), float32(total))
			}
		}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
			testcuda.CUDA())
	}
}

// TestDeviceRowsRefused checks that a wrong output of one rank fails only there, and that the job goes on.
func TestDeviceRowsRefused(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me := e.Rank()
		d := openDevice(t, me)
		defer d.stream.Close()
		on := hvd.On(e)
		in, out := d.buffer(1, 2), d.buffer(0, 0)
		_, err := cuda.Alltoall(ctx, in, portion(out, 0, 2-me), nil, on)
		if me == 1 {
			testnet.WantError(t, err, "the result has 8 bytes, but the output has 4 bytes")
		} else {
			d.want("alltoall beside a rank that fails", out, err, 1, 1)
		}
		_, err = cuda.Alltoall(ctx, in, portion(in, 1, 1), nil, on)
		testnet.WantError(t, err, "the output overlaps the input")
		_, err = cuda.Alltoall(ctx, in, out, nil, on)
		d.want("alltoall afterwards", out, err, 1+float32(me), 1+float32(me))
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// TestDeviceEmpty runs operations whose tensors have no elements at some or all ranks, in jobs of 1 to 3
// ranks.
func TestDeviceEmpty(t *testing.T) {
	for n := 1; n <= 3; n++ {
		run(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, on, empty := e.Rank(), hvd.On(e), hvd.Shape(n, 0)
			d := openDevice(t, me)
			defer d.stream.Close()
			none := cuda.Buffer[float32]{Device: me}
			rows := func(what string, got []int, err error, want ...int) {
				t.Helper()
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("rank %d of %d: %s: got rows %v and %v, want %v", me, n, what, got, err, want)
				}
			}
			for _, shape := range []hvd.ShapeOption{hvd.Shape(0), empty} {
				d.want("allreduce", none, cuda.Allreduce(ctx, none, none, shape, on))
				d.want("broadcast", none, cuda.Broadcast(ctx, none, none, 0, shape, on))
				d.want("allgather", none, cuda.Allgather(ctx, none, none, shape, on))
				d.want("reducescatter", none, cuda.Reducescatter(ctx, none, none, shape, on))
				d.want("reduce", none, cuda.Reduce(ctx, none, none, n-1, shape, on))
			}
			some, out := none, d.buffer(0, 0) // only rank 0 has rows
			if me == 0 {
				some = d.buffer(3, 4)
			}
			d.want("allgather of rank 0", out, cuda.Allgather(ctx, some, out, on), 3, 4)
			received := make([]int, n)
			received[0] = 2
			splits := make([]int, n)
			splits[n-1] = some.Len
			if me < n-1 {
				out = none
			}
			got, err := cuda.Alltoall(ctx, some, out, splits, on)
			if me < n-1 {
				received[0] = 0
			}
			rows("alltoall to the last rank", got, err, received...)
			got, err = cuda.Alltoall(ctx, none, none, nil, on)
			rows("alltoall without rows", got, err, make([]int, n)...)

			// Rows without elements have numbers nevertheless.
			for r := range splits {
				splits[r], received[r] = r+me, r+me
			}
			total := n*me + n*(n-1)/2
			got, err = cuda.Alltoall(ctx, none, none, splits, hvd.Shape(total, 0), on)
			rows("alltoall of empty rows", got, err, received...)
			got, err = cuda.Gather(ctx, none, none, n-1, hvd.Shape(me+1, 0), on)
			for r := range received {
				received[r] = 0
				if me == n-1 {
					received[r] = r + 1
				}
			}
			rows("gather of empty rows", got, err, received...)
			d.want("scatter of empty rows", none, cuda.Scatter(ctx, none, none, splits, 0, hvd.Shape(n*(n-1)/2, 0), on))
			x := d.buffer(1)
			d.want("allreduce afterwards", x, cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), on), float32(n))
		}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
			testcuda.CUDA())
	}
}

// TestDeviceGroups runs the operations on groups in jobs of 1 to 3 ranks. The inputs are on several streams
// and are still being copied to the devices when the operations are submitted.
func TestDeviceGroups(t *testing.T) {
	type buffers = []cuda.Buffer[float32]
	for n := 1; n <= 3; n++ {
		run(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, size, on := float32(e.Rank()), float32(n), hvd.On(e)
			d, other := openDevice(t, e.Rank()), openDevice(t, e.Rank())
			defer d.stream.Close()
			defer other.stream.Close()
			sum := hvd.Op(hvd.Sum)
			x, y, none := d.buffer(1, me), other.buffer(me), cuda.Buffer[float32]{Device: d.index}
			out := other.buffer(0, 0)
			h, err := cuda.GroupedAllreduceAsync(buffers{x, y, none}, buffers{out, y, none}, sum,
				hvd.Name("a"), on)
			z := d.buffer(5, 6, 7, 8)
			h2, err2 := cuda.GroupedAllreduceAsync(buffers{z}, buffers{z}, sum, hvd.Name("b"), on,
				hvd.Shapes([]int{2, 2}))
			if err != nil || err2 != nil {
				t.Error(err, err2)
				return
			}
			total := size * (size - 1) / 2
			d.want("group, tensor 0", out, wait(ctx, h), size, total)
			d.want("group, tensor 1", y, nil, total)
			d.want("group of one", z, wait(ctx, h2), 5*size, 6*size, 7*size, 8*size)

			whole := func(each ...float32) (all []float32) { return slices.Repeat(each, n) }
			one, two := d.buffer(whole(0)...), other.buffer(whole(0, 0)...)
			err = cuda.GroupedAllgather(ctx, buffers{d.buffer(3), other.buffer(4, 5)},
				buffers{one, two}, on)
			d.want("allgather, tensor 0", one, err, whole(3)...)
			d.want("allgather, tensor 1", two, nil, whole(4, 5)...)

			one, two = d.buffer(0), d.buffer(0, 0)
			err = cuda.GroupedReducescatter(ctx,
				buffers{d.buffer(whole(3)...), other.buffer(whole(4, 4)...)}, buffers{one, two}, sum, on)
			d.want("reducescatter, tensor 0", one, err, 3*size)
			d.want("reducescatter, tensor 1", two, nil, 4*size, 4*size)

			for _, grouped := range []func(ins, outs buffers) error{
				func(ins, outs buffers) error { return cuda.GroupedAllreduce(ctx, ins, outs, on) },
				func(ins, outs buffers) error { return cuda.GroupedAllgather(ctx, ins, outs, on) },
				func(ins, outs buffers) error { return cuda.GroupedReducescatter(ctx, ins, outs, on) },
			} {
				if err := grouped(nil, nil); err != nil {
					t.Errorf("an empty group: %v", err)
				}
				testnet.WantError(t, grouped(buffers{x}, nil), "got 0 outputs, want one for each of 1 inputs")
			}
		}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
			testcuda.CUDA())
	}
}

// TestDeviceGroupsRefused checks the errors of groups. If one tensor of a group fails at all ranks, all
// tensors do, and if one fails at one rank, the group fails there. The job goes on, and no event is lost.
func TestDeviceGroupsRefused(t *testing.T) {
	type buffers = []cuda.Buffer[float32]
	const tries = 50
	calls, tried := testcuda.Calls(t), make(chan struct{})
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me, on := e.Rank(), hvd.On(e)
		d := openDevice(t, me)
		defer d.stream.Close()
		x := d.buffer(1, 2, 3, 4)
		a, b := portion(x, 0, 2), portion(x, 2, 2)
		elsewhere := b
		elsewhere.Device = me + 1
		group := buffers{a, elsewhere}
		testnet.WantError(t, cuda.GroupedAllreduce(ctx, group, group, on),
			fmt.Sprintf("tensor 1 is on cuda:%d and tensor 0 is on cuda:%d, want the same device", me+1, me))
		testnet.WantError(t, cuda.GroupedAllreduce(ctx, buffers{a, b}, buffers{a, a}[:1], on), "got 1 outputs")
		testnet.WantError(t, cuda.GroupedAllreduce(ctx, buffers{a, b}, buffers{a, portion(x, 1, 2)}, on),
			"the output overlaps the input")
		group[1] = portion(b, 0, 1+me)
		err := cuda.GroupedAllreduce(ctx, group, group, on)
		testnet.WantError(t, err, "mismatched shapes")
		out, short := d.buffer(0, 0, 0, 0), d.buffer(0, 0, 0)
		wrong := out
		if me == 1 {
			wrong = short
		}
		err = cuda.GroupedAllgather(ctx, buffers{a, b}, buffers{out, wrong}, on)
		if me == 1 {
			testnet.WantError(t, err, "the result has 16 bytes, but the output has 12 bytes")
		} else if err != nil {
			t.Error(err)
		}
		name := hvd.Name("busy")
		if me == 1 {
			<-tried
		}
		h, err := cuda.GroupedAllreduceAsync(buffers{a, b}, buffers{a, b}, hvd.Op(hvd.Sum), name, on)
		d.check(err)
		for range tries * (1 - me) {
			testnet.WantError(t, cuda.Allreduce(ctx, out, out, name, on), "in flight")
			some := buffers{out, short}
			testnet.WantError(t, cuda.GroupedAllreduce(ctx, some, some, name, on), "in flight")
		}
		if me == 0 {
			close(tried)
		}
		_, err = h.Wait(ctx)
		d.want("allreduce afterwards", x, err, 2, 4, 6, 8)
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
	if n := calls("cudaEventCreateWithFlags"); n == 0 || n >= tries {
		t.Errorf("%d events were made, want fewer than %d", n, tries)
	}
}

// TestDeviceGroupParts checks that a large group is packed in parts of at most 64 MiB. The device has no
// memory for the whole group.
func TestDeviceGroupParts(t *testing.T) {
	const each = 15 << 20 / 4
	t.Setenv("STANDIN_CUDA_MEMORY_BYTES", fmt.Sprint(5*4*each+64<<20))
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 0)
		defer d.stream.Close()
		var group []cuda.Buffer[float32]
		for i := range 5 {
			x := make([]float32, each)
			x[each-1] = float32(i + 1)
			group = append(group, d.buffer(x...))
		}
		err := cuda.GroupedAllreduce(ctx, group, group, hvd.Op(hvd.Sum), hvd.Prescale(2), hvd.On(e))
		for i, x := range group {
			d.want("the last element", portion(x, each-1, 1), err, 2*float32(i+1))
		}
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
}

// TestDeviceTimeline checks that a timeline has the activities of operations on devices with Horovod's names,
// in order.
func TestDeviceTimeline(t *testing.T) {
	type buffers = []cuda.Buffer[float32]
	dir := t.TempDir()
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		noError(t, e.StartTimeline(filepath.Join(dir, "t.json"), false))
		d, on := openDevice(t, e.Rank()), hvd.On(e)
		defer d.stream.Close()
		x, y, z := d.buffer(1, 2), d.buffer(3), d.buffer(0, 0, 0, 0)
		for step := range 2 {
			name := hvd.Name(fmt.Sprint("group", step))
			d.check(cuda.GroupedAllreduce(ctx, buffers{x, y}, buffers{x, y}, name, on))
		}
		d.check(cuda.Allreduce(ctx, x, portion(z, 0, 2), hvd.Name("one"), on))
		d.check(cuda.Broadcast(ctx, x, x, 1, hvd.Name("broadcast"), on))
		d.check(cuda.Allgather(ctx, x, z, hvd.Name("allgather"), on))
		_, err := cuda.Alltoall(ctx, x, portion(z, 0, 2), nil, hvd.Name("alltoall"), on)
		d.check(err)
		d.check(cuda.Reducescatter(ctx, x, y, hvd.Name("reducescatter"), on))
		d.check(cuda.Allreduce(ctx, y, y, hvd.Name("adasum"), hvd.Op(hvd.Adasum), on))
		noError(t, e.StopTimeline())
		text := must(os.Open(filepath.Join(dir, []string{"t.json", "t.rank1.json"}[e.Rank()])))
		defer text.Close()
		all := must(timelinetest.Read(text))
		const wait, in, out = "WAIT_FOR_DATA", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
		for name, want := range map[string][]string{
			"group0":        {"INIT_NCCL", wait, in, "NCCL_ALLREDUCE", out},
			"group1":        {wait, in, "NCCL_ALLREDUCE", out},
			"one":           {wait, "NCCL_ALLREDUCE"},
			"broadcast":     {wait, "NCCL_BCAST"},
			"allgather":     {wait, "NCCL_ALLGATHER"},
			"alltoall":      {wait, "NCCL_ALLTOALL"},
			"reducescatter": {wait, "NCCL_REDUCESCATTER"},
			"adasum":        {"MEMCPY_IN_HOST_BUFFER", in, "SHM_ADASUM_ALLREDUCE", out, "MEMCPY_OUT_HOST_BUFFER"},
		} {
			i := slices.IndexFunc(all.Operations, func(o timelinetest.Operation) bool {
				return o.Track == name
			})
			if i < 0 || !slices.Equal(all.Operations[i].Activities, want) {
				t.Errorf("rank %d: %s: got %+v, want activities %v", e.Rank(), name, all.Operations, want)
			}
		}
	}, "HOROVOD_TIMELINE", "DYNAMIC", "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
		"HVD_CUDART_LIBRARY", testcuda.CUDA())
}

// TestDeviceRanges checks that a tool that records NVTX ranges sees all work of an operation on the device in
// a range with its name.
func TestDeviceRanges(t *testing.T) {
	if err := cudart.OpenLibrary(func(*cudart.Library) error { return nil }, testcuda.NVTX()); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "calls")
	t.Setenv("NVTX_INJECTION64_PATH", "tool.so")
	t.Setenv("STANDIN_CUDA_CALLS", file)
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		d := openDevice(t, 0)
		defer d.stream.Close()
		xs := []cuda.Buffer[float32]{d.buffer(1, 2), d.buffer(3)}
		d.check(cuda.GroupedAllreduce(ctx, xs, xs, hvd.Name("gradients"), hvd.On(e)))
	}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
	text, err := os.ReadFile(file)
	const want = "range gohvd: allreduce gradients and 1 more\ncudaStreamWaitEvent\ncudaMemcpyBatchAsync\n" +
		"ncclAllReduce\ncudaMemcpyBatchAsync\nend of range\n"
	if err != nil || !strings.Contains(string(text), want) {
		t.Errorf("got calls %q and %v, want %q", text, err, want)
	}
}

// TestDeviceInHost checks that operations that NCCL cannot run get copies of the tensors in host memory, and
// that each rank logs the reason once.
func TestDeviceInHost(t *testing.T) {
	type buffers = []cuda.Buffer[float32]
	core, logged := observer.New(zap.WarnLevel)
	engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me, on := float32(e.Rank()), hvd.On(e)
		d, other := openDevice(t, e.Rank()+1), openDevice(t, e.Rank()+1)
		defer d.stream.Close()
		defer other.stream.Close()
		x, y := d.buffer(1, me, 3), other.buffer(2, 2)
		one := portion(x, 0, 1)
		d.want("min", x, cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Min), hvd.Prescale(2), on), 2, 0, 6)
		d.want("adasum", y, cuda.Allreduce(ctx, y, y, hvd.Op(hvd.Adasum), on), 2, 2)
		d.want("allgather with NCCL", y, cuda.Allgather(ctx, one, y, on), 2, 2)
		err := cuda.GroupedAllreduce(ctx, buffers{x, y}, buffers{x, y}, hvd.CompressFP16(), on)
		d.want("compressed group, tensor 0", x, err, 2, 0, 6)
		d.want("compressed group, tensor 1", y, nil, 2, 2)
		out := d.buffer(0)
		err = cuda.Reducescatter(ctx, y, out, hvd.Op(hvd.Max), hvd.Postscale(2), on)
		d.want("reducescatter", out, err, 4)
		z := d.buffer(1, 1+me)
		into := cuda.Buffer[float32]{}
		if e.Rank() == 1 {
			into = z
		}
		err = cuda.Reduce(ctx, z, into, 1, hvd.Op(hvd.Product), hvd.Prescale(2), on)
		if e.Rank() == 1 {
			d.want("reduce", z, err, 4, 8)
		} else {
			d.want("reduce, not root", z, err, 1, 1)
		}
		if e.Rank() == 0 {
			d.want("allreduce while rank 1 has joined", y,
				cuda.Allreduce(ctx, y, y, hvd.Op(hvd.Max), hvd.Prescale(2), on), 4, 4)
		}
		must(hvd.Join(ctx, on))
		noError(t, e.Shutdown(ctx))
	}, []hvd.InitOption{hvd.WithLogger(writesTo(core))}, "HOROVOD_GPU_OPERATIONS", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(), "HVD_CUDART_LIBRARY",
		testcuda.CUDA())
	warnings := make(map[string]int)
	for _, line := range logged.FilterMessageSnippet("tensors on CUDA devices are copied to host memory").All() {
		warnings[fmt.Sprint(line.ContextMap()["rank"], " ", line.ContextMap()["error"])]++
	}
	for _, reason := range []string{"NCCL has no adasum", "NCCL scales only sums and averages of floats",
		"tensors on a device are not compressed"} {
		for r := range 2 {
			if n := warnings[fmt.Sprint(r, " ", reason)]; n != 1 {
				t.Errorf("rank %d has logged %q %d times, want once: %v", r, reason, n, warnings)
			}
		}
	}
}

// TestDeviceOnlyInHost runs operations on devices without NCCL. They use the same host memory one after
// another.
func TestDeviceOnlyInHost(t *testing.T) {
	for n := 1; n <= 3; n++ {
		calls := testcuda.Calls(t)
		run(t, n, func(ctx context.Context, e *hvd.Engine) {
			me, on := float32(e.Rank()), hvd.On(e)
			d := openDevice(t, e.Rank())
			defer d.stream.Close()
			x, all := d.buffer(1, me), d.buffer(make([]float32, 2*n)...)
			d.want("allreduce", x, cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), on), float32(n), float32(n*(n-1)/2))
			err := cuda.Allgather(ctx, x, all, hvd.Shape(1, 2), on)
			d.want("allgather", portion(all, 2*n-2, 2), err, float32(n), float32(n*(n-1)/2))
			y := d.buffer(me, 0)
			d.want("broadcast", y, cuda.Broadcast(ctx, y, y, n-1, on), float32(n-1), 0)
			y, out := d.buffer(slices.Repeat([]float32{me}, n)...), d.buffer(make([]float32, n)...)
			got, err := cuda.Alltoall(ctx, y, out, nil, on)
			d.want("alltoall", portion(out, n-1, 1), err, float32(n-1))
			if want := slices.Repeat([]int{1}, n); !slices.Equal(got, want) {
				t.Errorf("alltoall: got rows %v, want %v", got, want)
			}
			err = cuda.Allgather(ctx, x, portion(all, 0, 1), on)
			testnet.WantError(t, err, "but the output has 4 bytes")
		}, "HOROVOD_GPU_OPERATIONS", "host", "HVD_CUDART_LIBRARY", testcuda.CUDA())
		if got := calls("cudaHostAlloc"); got != n {
			t.Errorf("%d ranks have allocated host memory %d times", n, got)
		}
	}
}

// TestDeviceWithoutCUDA checks that Init fails if the CUDA runtime cannot be loaded.
func TestDeviceWithoutCUDA(t *testing.T) {
	_, err := hvd.New(t.Context(), hvd.WithSetting("HOROVOD_GPU_OPERATIONS", "host"),
		hvd.WithSetting("HVD_CUDART_LIBRARY", "/missing/libcudart.so"))
	testnet.WantError(t, err, "HOROVOD_GPU_OPERATIONS=host", "/missing/libcudart.so")
}
