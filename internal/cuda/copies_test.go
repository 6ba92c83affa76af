//go:build nccl && cgo

package cuda_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestCopies copies memory to a device and back after the work of another stream. If the context ends before
// this work, Copy says whether the device may still use the memory.
func TestCopies(t *testing.T) {
	r, err := cuda.Load(testcuda.CUDA())
	if err != nil {
		t.Fatal(err)
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	d := cuda.NewDevices(r)
	on, err := r.Device(1)
	check(err)
	memory, err := on.Alloc(5)
	check(err)
	host, err := d.Borrow(10)
	check(err)
	copy(host, "hello     ")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	in, out := cuda.Copy{To: memory, From: host[:5]}, cuda.Copy{To: host[5:], From: memory}
	pending, err := d.Copy(ctx, 1, nil, in, cuda.Copy{}, out)
	if check(err); pending || string(host) != "hellohello" {
		t.Errorf("got %q, pending %v", host, pending)
	}
	d.GiveBack(host)
	if again, err := d.Borrow(4000); err != nil || &again[0] != &host[0] {
		t.Errorf("memory that was given back is not used again: %v", err)
	}

	t.Setenv("STANDIN_CUDA_DELAY_US", "3000000")
	slow, err := on.NewStream()
	check(err)
	t.Setenv("STANDIN_CUDA_DELAY_US", "200")
	gaveUp := errors.New("gave up")
	cancel(gaveUp)
	after, err := d.Mark(1, slow.Handle())
	check(err)
	for i, timeout := range []time.Duration{time.Millisecond, time.Minute} {
		d.EndTimeout = timeout
		want := i == 0
		pending, err := d.Copy(ctx, 1, []*cuda.Event{after}, out)
		if pending != want || !errors.Is(err, gaveUp) {
			t.Errorf("waiting for %v after the end: got pending %v and %v, want %v", timeout, pending, err, want)
		}
	}
	d.Release(after)
	check(slow.Close())
	check(on.Free(memory))
	check(d.Close())
}
