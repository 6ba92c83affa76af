package library

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/rank"
)

// TestRepeatedOperationsAllocateLittle checks that repeated operations make at most 2 small allocations each,
// which are those of the coordinator and of its frames, however many are in flight.
func TestRepeatedOperationsAllocateLittle(t *testing.T) {
	l := alone(t)
	const many, most = 100, 2
	var all [many]*Op
	for i := range all {
		all[i] = sum(fmt.Sprint("x", i), make([]float32, 2), true)
	}
	ran := func() {
		for _, o := range all {
			if _, err := l.Run(o, Forever, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	submitted := func() {
		var handles [many]Handle
		for i, o := range all {
			var err error
			if handles[i], err = l.Submit(o); err != nil {
				t.Fatal(err)
			}
		}
		for _, h := range handles {
			if err := l.Wait(h, Forever, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	for what, do := range map[string]func(){"run": ran, "submitted": submitted} {
		for range 10 {
			do()
		}
		if got := testing.AllocsPerRun(20, do) / many; got > most {
			t.Errorf("%s: %v allocations an operation, want at most %d", what, got, most)
		}
	}
}

// TestOperations checks that a name can be that of several operations one after another, whose descriptions
// the program changes in place, and that errors of an operation do not come from the operation before.
func TestOperations(t *testing.T) {
	l := alone(t)
	name := []byte("x")
	x := []float32{1, 2, 3, 4}
	o := sum("", x, true)
	o.Spec.Name = string(name)
	for _, test := range []struct {
		change func(s *rank.Spec)
		want   float32 // or an error
	}{
		{func(*rank.Spec) {}, 1},
		{func(*rank.Spec) {}, 1},
		{func(s *rank.Spec) { s.Postscale = 3 }, 3},
		{func(s *rank.Spec) { s.Tensors[0].Shape[0] = 3 }, 0},
		{func(s *rank.Spec) { s.Tensors[0].Shape[0] = 4 }, 9},
		{func(s *rank.Spec) { s.DType = 99 }, 0},
		{func(s *rank.Spec) { s.DType = 9 }, 27},
	} {
		test.change(&o.Spec)
		var result Result
		switch _, err := l.Run(o, Forever, &result); {
		case test.want == 0 && err == nil:
			t.Errorf("%+v: got no error", o.Spec)
		case test.want == 0:
		case err != nil:
			t.Error(err)
		case x[0] != test.want:
			t.Errorf("%+v: got %v, want %v", o.Spec, x[0], test.want)
		case result.Outputs[0].Shape[0] != 4:
			t.Errorf("got shape %v", result.Outputs[0].Shape)
		}
	}
}

// TestOperationsAreBounded submits operations with many names, and large groups.
func TestOperationsAreBounded(t *testing.T) {
	var all operations
	find := func(name string, tensors int) *rank.Operation {
		s := rank.Spec{Kind: 1, DType: 9, Name: name, Prescale: 1, Postscale: 1, Grouped: true,
			Tensors: make([]rank.TensorSpec, tensors)}
		o, err := all.find(&s)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := all.find(&s); err != nil || again != o {
			t.Fatalf("%s is not kept", name)
		}
		weight := 0
		for _, o := range all.all {
			weight += o.Weight()
		}
		if weight != all.weight || weight > maxWeight && len(all.all) > 1 {
			t.Fatalf("after %s: got weight %d of %d operations, counted %d", name, weight, len(all.all), all.weight)
		}
		return o
	}
	text := strings.Repeat("x", 10)
	for i := range 10 {
		find(text[:i], maxWeight/6)
		find("y", 1+i)
	}
	if o := find("y", 2); len(o.Tensors) != 2 {
		t.Errorf("got %d tensors", len(o.Tensors))
	}
	find("large", 2*maxWeight)
	find("small", 1)
}

// TestFreeCalls checks that the memory of operations is dropped if there is much of it, and when the job
// ends.
func TestFreeCalls(t *testing.T) {
	l := alone(t)
	x := make([]float32, 1)
	for range 2 {
		if _, err := l.Run(sum("", x, true), Forever, nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(l.calls.all); n != 1 {
		t.Errorf("%d calls are free after two operations, want 1", n)
	}
	for range maxFree {
		l.calls.add(new(call))
	}
	if n := len(l.calls.all); n != maxFree {
		t.Errorf("%d calls are free, want %d", n, maxFree)
	}
	if err := l.Wait(l.Shutdown("", false), Forever, nil); err != nil {
		t.Error(err)
	}
	if n := len(l.calls.all); n != 0 {
		t.Errorf("%d calls are free after the job, want 0", n)
	}
	if n, weight := len(l.operations.all), l.operations.weight; n != 0 || weight != 0 {
		t.Errorf("%d operations of weight %d are known after the job, want none", n, weight)
	}
}

// TestUsedCallIsNotFree checks that the memory of an operation is not used again while another call uses its
// handle.
func TestUsedCallIsNotFree(t *testing.T) {
	l := alone(t)
	x := make([]float32, 1)
	for _, end := range []func(Handle) error{
		func(h Handle) error { return l.Wait(h, Forever, nil) },
		l.Release,
	} {
		for used := range 2 {
			h, err := l.Submit(sum("x", x, true))
			if err != nil {
				t.Fatal(err)
			}
			p, err := l.handles.use("test", h)
			if err != nil {
				t.Fatal(err)
			}
			await(p, Forever)
			if used == 0 {
				l.handles.unuse(h)
			}
			before := len(l.calls.all)
			if err := end(h); err != nil {
				t.Error(err)
			}
			if freed := len(l.calls.all) - before; freed != 1-used {
				t.Errorf("used by %d other calls: %d calls became free", used, freed)
			}
			if used == 1 {
				l.handles.unuse(h) // has no effect on the slot, which may be that of another operation
			}
			if again, err := l.Submit(sum("x", x, true)); err != nil {
				t.Error(err)
			} else if err := l.Wait(again, Forever, nil); err != nil {
				t.Error(err)
			}
		}
	}
}
