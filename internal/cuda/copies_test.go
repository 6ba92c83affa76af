//go:build nccl && cgo

package cuda_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
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
	host, err := d.Borrow(1, 10)
	check(err)
	copy(host, "hello     ")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	in, out := cuda.Copy{To: memory, From: host[:5]}, cuda.Copy{To: host[5:], From: memory}
	pending, err := d.Copy(ctx, 1, nil, in, cuda.Copy{}, out)
	if check(err); pending || string(host) != "hellohello" {
		t.Errorf("got %q, pending %v", host, pending)
	}
	for n, most := range map[int]int{10: 4096, 5 << 20: 5 << 20, 5<<20 + 1: 6 << 20, 300 << 20: 320 << 20} {
		b, err := d.Borrow(1, n)
		if check(err); cap(b) > most {
			t.Errorf("%d bytes take %d bytes of pinned memory, want at most %d", n, cap(b), most)
		}
		d.GiveBack(1, b)
	}
	d.GiveBack(1, host)
	if again, err := d.Borrow(1, 4000); err != nil || &again[0] != &host[0] {
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

// TestBorrow lends the same memory to one operation at a time, and keeps the memory that was used last if
// there is too much.
func TestBorrow(t *testing.T) {
	r, _ := load(t)
	d := cuda.NewDevices(r)
	borrow := func(n int) []byte { return must[[]byte](t)(d.Borrow(1, n)) }
	var lanes sync.WaitGroup
	for lane := range byte(4) {
		lanes.Go(func() {
			for range 2000 {
				b, err := d.Borrow(1, 4096)
				if err != nil {
					t.Error(err)
					return
				}
				b[0] = lane
				runtime.Gosched()
				if b[0] != lane {
					t.Errorf("lanes %d and %d use the same memory", lane, b[0])
				}
				d.GiveBack(1, b)
			}
		})
	}
	lanes.Wait()
	calls := testcuda.Calls(t)
	for range 3 {
		large, small := borrow(250<<20), borrow(10<<20)
		d.GiveBack(1, large)
		d.GiveBack(1, small)
		d.GiveBack(1, borrow(10<<20))
	}
	if n := calls("cudaHostAlloc"); n != 4 {
		t.Errorf("got %d allocations, want one of 10 MiB, and 3 of 250 MiB, for which there is no room", n)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestBatches checks that several copies cost one call of CUDA if the runtime and the driver have the
// function for that, and one call each otherwise.
func TestBatches(t *testing.T) {
	for _, c := range []struct {
		runtime, driver string
		copies          int
		batched         bool
	}{
		{"12060", "13000", 3, false}, {"12080", "12060", 3, false}, {"14000", "14000", 3, false},
		{"12080", "12080", 3, true}, {"12090", "13000", 2, true}, {"13000", "13000", 3, true},
		{"13000", "13000", 1, false}, {"12080", "12080", 0, false},
	} {
		t.Setenv("STANDIN_CUDA_VERSION", c.runtime)
		t.Setenv("STANDIN_CUDA_DRIVER", c.driver)
		_, d := load(t)
		s, memory := must[*cuda.Stream](t)(d.NewStream()), must[[]byte](t)(d.Alloc(32))
		in, got := []byte("0123456789abcdef"), make([]byte, 16)
		copies := []cuda.Copy{{To: memory[16:20], From: memory[:4]}, {To: memory[20:21], From: memory[8:9]},
			{To: memory[21:32], From: memory[2:13]}}[:c.copies]
		want, length := "0123"+"8"+"23456789abc", 0
		for _, c := range copies {
			length += len(c.To)
		}
		if err := s.Copy(memory[:16], in); err != nil {
			t.Fatal(err)
		}
		calls := testcuda.Calls(t)
		if err := s.CopyAll(copies); err != nil {
			t.Error(err)
		}
		single, batch := c.copies, 0
		if c.batched {
			single, batch = 0, 1
		}
		if a, b := calls("cudaMemcpyAsync"), calls("cudaMemcpyBatchAsync"); a != single || b != batch {
			t.Errorf("%+v: got %d single copies and %d batches, want %d and %d", c, a, b, single, batch)
		}
		err := errors.Join(s.Copy(got, memory[16:]), s.Synchronize(), s.Close(), d.Free(memory))
		if err != nil {
			t.Fatal(err)
		}
		runtime.KeepAlive(in)
		if string(got[:length]) != want[:length] {
			t.Errorf("%+v: got %q, want %q", c, got[:length], want[:length])
		}
	}
}

// TestBatchFails checks that the error of a batch names the copy at which it failed, if the runtime says it.
func TestBatchFails(t *testing.T) {
	for version, want := range map[string]string{
		"12080": "cuda: cudaMemcpyBatchAsync: invalid argument (cudaErrorInvalidValue, 1): copy 1 of 2, of 3 bytes",
		"13000": "cuda: cudaMemcpyBatchAsync: invalid argument (cudaErrorInvalidValue, 1)",
	} {
		t.Setenv("STANDIN_CUDA_VERSION", version)
		_, d := load(t)
		s, memory := must[*cuda.Stream](t)(d.NewStream()), must[[]byte](t)(d.Alloc(32))
		t.Setenv("STANDIN_CUDA_BATCH_FAILS", "1")
		copies := []cuda.Copy{{To: memory[:2], From: memory[8:10]}, {To: memory[2:5], From: memory[8:11]}}
		if err := s.CopyAll(copies); err == nil || err.Error() != want {
			t.Errorf("CUDA %s: got %v, want %s", version, err, want)
		}
		t.Setenv("STANDIN_CUDA_BATCH_FAILS", "")
		copies[1].From = memory[8:10]
		testnet.WantError(t, s.CopyAll(copies), "cuda: copy 1 of 2: got 2 bytes for 3 bytes")
		if err := errors.Join(s.Close(), d.Free(memory)); err != nil {
			t.Error(err)
		}
	}
}

// TestCapture checks that a stream that is being captured for a graph is refused, instead of waiting for an
// event that is a part of the graph, and that other calls go on while it is captured. If the capture begins
// between the question for it and a wait for an event, the error of CUDA is no error of the caller.
func TestCapture(t *testing.T) {
	r, on := load(t)
	d := cuda.NewDevices(r)
	other := must[*cuda.Stream](t)(on.NewStream())
	t.Setenv("STANDIN_CUDA_CAPTURE", "1")
	s := must[*cuda.Stream](t)(on.NewStream())
	_, err := d.Mark(1, s.Handle())
	testnet.WantError(t, err, "is being captured for a CUDA graph", "submit them outside of the capture")
	memory, host := must[[]byte](t)(on.Alloc(8)), must[[]byte](t)(on.AllocHost(8))
	e := must[*cuda.Event](t)(d.Mark(1, other.Handle()))
	if err := cuda.Poll(t.Context(), e.Query); err != nil {
		t.Error(err)
	}
	t.Setenv("STANDIN_CUDA_CAPTURE", "2")
	later := must[*cuda.Stream](t)(on.NewStream())
	if waits, err := later.Follow(e); waits || err != nil {
		t.Errorf("a stream whose capture has just begun: got %v and %v, want no wait", waits, err)
	}
	d.Release(e)
	err = errors.Join(on.Free(memory), on.FreeHost(host), s.Close(), later.Close(), other.Close(), d.Close())
	if err != nil {
		t.Error(err)
	}
}

// TestLatest checks that of the events on a stream only the last one is kept, also if the events are in
// another order in the list, and that those of other devices are.
func TestLatest(t *testing.T) {
	r, on := load(t)
	d := cuda.NewDevices(r)
	newStream := func() uintptr { return must[*cuda.Stream](t)(on.NewStream()).Handle() }
	streams := []uintptr{newStream(), newStream()}
	mark := func(index, stream int) *cuda.Event {
		return must[*cuda.Event](t)(d.Mark(index, streams[stream]))
	}
	on2, err := r.Device(2)
	if err != nil {
		t.Fatal(err)
	}
	streams = append(streams, must[*cuda.Stream](t)(on2.NewStream()).Handle())
	a, b, c, other := mark(1, 0), mark(1, 1), mark(1, 0), mark(2, 2)
	for _, test := range []struct{ list, want []*cuda.Event }{
		{nil, nil}, {[]*cuda.Event{a}, []*cuda.Event{a}}, {[]*cuda.Event{a, b, c}, []*cuda.Event{c, b}},
		{[]*cuda.Event{c, b, a}, []*cuda.Event{c, b}},
		{[]*cuda.Event{other, a, c}, []*cuda.Event{other, c}},
	} {
		if got := cuda.Latest(slices.Clone(test.list)); !slices.Equal(got, test.want) {
			t.Errorf("of %v: got %v, want %v", test.list, got, test.want)
		}
	}
	d.Release(a)
	again, got := mark(1, 1), cuda.Latest([]*cuda.Event{b, a, c})
	if again != a || !slices.Equal(got, []*cuda.Event{a, c}) {
		t.Error("an event that was used again has not followed the other one on its stream")
	}
}
