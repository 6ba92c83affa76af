//go:build nccl && cgo

package nccl_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/nccl"
	"github.com/gohvd/gohvd/ops/tcp"
)

// launcher returns a function that launches an allreduce of the given number of tensors with libraries that
// cost no time, and waits until the backend has seen its end.
func launcher(t testing.TB, tensors int) func() {
	l, err := nccl.Load(testcuda.Null(), testcuda.Null())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Register(nccl.Config{StartTimeout: time.Minute,
		Host: tcp.Register(mem.New(1).Mesh(0), tcp.Config{})}).New(0, []topo.Rank{0}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Close()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	op := ops.Operation{Kind: message.Allreduce, DType: tensor.Float32, Op: tensor.Sum,
		Scaling: ops.Scaling{Pre: 1, Post: 1}, Tensors: make([]ops.Tensor, tensors)}
	for i := range op.Tensors {
		buf := make([]byte, 64)
		op.Tensors[i] = ops.Tensor{In: buf, Out: buf}
	}
	ended := make(follower, 1)
	part := ops.DevicePart{Devices: []tensor.Device{tensor.CUDA(0)}, Ready: make([]*cuda.Event, 1),
		Follower: ended}
	op.Device = &part
	return func() {
		e, err := l.Devices.Mark(0, 1)
		if err == nil {
			part.Ready[0] = e
			err = b.Start(op)
		}
		if err == nil {
			_, err = b.Step(t.Context(), true)
		}
		if err == nil {
			err = <-ended
		}
		if err != nil {
			t.Fatal(err)
		}
		l.Devices.Release(e)
		part.Order++
	}
}

// TestLaunchAllocates checks that a launch allocates no memory once everything was used. It needs a process
// with other libraries than those of the other tests.
func TestLaunchAllocates(t *testing.T) {
	const variable = "COUNT_ALLOCATIONS"
	if os.Getenv(variable) == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "TestLaunchAllocates$")
		cmd.Env = append(os.Environ(), variable+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	for _, tensors := range []int{1, 50} {
		if n := testing.AllocsPerRun(1000, launcher(t, tensors)); n > 0 {
			t.Errorf("got %v allocations for %d tensors, want none", n, tensors)
		}
	}
}

// BenchmarkLaunch measures what this package costs for a launched allreduce:
//
//	go test -tags nccl -run '^$' -bench Launch ./ops/nccl
func BenchmarkLaunch(b *testing.B) {
	launch := launcher(b, 1)
	launch()
	b.ReportAllocs()
	for b.Loop() {
		launch()
	}
}
