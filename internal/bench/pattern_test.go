package bench

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/tensor"
)

// The rule of the harness: element i of rank r is (7i+13r) mod 101.
func TestPatternIsTheHarness(t *testing.T) {
	in := inputs{tensor.Float32, tensor.Sum, 4}
	buf := make([]byte, 4*1000)
	in.of(3).fill(buf)
	sum := make([]byte, 4*1000)
	in.reduced().fill(sum)
	for i, v := range tensor.View[float32](buf) {
		if want := float32((7*i + 13*3) % 101); v != want {
			t.Fatalf("element %d of rank 3 is %v, want %v", i, v, want)
		}
		want := 0
		for r := range 4 {
			want += (7*i + 13*r) % 101
		}
		if got := tensor.View[float32](sum)[i]; got != float32(want) {
			t.Fatalf("sum %d is %v, want %d", i, got, want)
		}
	}
}

// The expected results are what the kernels make of the inputs, for every type, reduction and number of ranks.
func TestReducedIsWhatTheKernelsGive(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		for _, o := range ncclOps {
			if o.op.IsAverage() || tensor.CheckReduce(o.op, dt) != nil {
				continue
			}
			reduce, err := kernel.Reduce(o.op, dt)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{1, 2, 3, 8, 20} {
				in := inputs{dt, o.op, n}
				acc, src := make([]byte, 512*dt.Size()), make([]byte, 512*dt.Size())
				in.of(0).fill(acc)
				for r := 1; r < n; r++ {
					in.of(r).fill(src)
					reduce(acc, src)
				}
				if wrong, first := in.reduced().wrong(acc); wrong != 0 {
					t.Errorf("%v %v of %d: %d wrong: %s", o.op, dt, n, wrong, first)
				}
				// A rank that is left out, or counted twice, must be seen. Of a minimum or maximum that need not be so.
				if n == 1 || o.op == tensor.Min || o.op == tensor.Max {
					continue
				}
				in.of(n - 1).fill(src)
				reduce(acc, src)
				if wrong, _ := in.reduced().wrong(acc); wrong == 0 {
					t.Errorf("%v %v of %d: a rank that counts twice is not seen", o.op, dt, n)
				}
			}
		}
	}
}

func TestWrongBytesAreCounted(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		op := tensor.Sum
		if dt == tensor.Bool {
			op = tensor.Max
		}
		p := inputs{dt, op, 2}.reduced()
		buf := make([]byte, 1001*dt.Size())
		p.fill(buf)
		if n, _ := p.wrong(buf); n != 0 {
			t.Errorf("%v: %d wrong where none is", dt, n)
		}
		for _, at := range []int{0, 500, 1000} {
			buf[at*dt.Size()] ^= 1
		}
		if n, first := p.wrong(buf); n != 3 || !strings.HasPrefix(first, "element 0 is ") {
			t.Errorf("%v: %d wrong, the first %q, want 3 from element 0", dt, n, first)
		}
	}
}

func TestAveragesMayBeRounded(t *testing.T) {
	in := inputs{tensor.Float32, tensor.Average, 3}
	p := in.reduced()
	buf := make([]byte, 4*303)
	p.fill(buf)
	x := tensor.View[float32](buf)
	for i := range x {
		x[i] *= 1 + 0x1p-23
	}
	if n, first := p.wrong(buf); n != 0 {
		t.Errorf("rounded: %d wrong: %s", n, first)
	}
	x[7] *= 1 + 0x1p-19
	if n, _ := p.wrong(buf); n != 1 {
		t.Errorf("one too large: %d wrong", n)
	}
	ints := inputs{tensor.Int32, tensor.Average, 3}.reduced()
	ints.fill(buf)
	buf[400] ^= 1
	if n, _ := ints.wrong(buf); n != 1 {
		t.Errorf("averages of integers are exact: %d wrong, want 1", n)
	}
}

func TestFromBeginsLater(t *testing.T) {
	p := inputs{tensor.Int16, tensor.Sum, 2}.reduced()
	whole := make([]byte, 2*500)
	p.fill(whole)
	for _, i := range []int64{0, 1, 100, 101, 250} {
		part := make([]byte, 2*200)
		p.from(i).fill(part)
		if !bytes.Equal(part, whole[2*i:2*i+400]) {
			t.Errorf("from element %d it is another pattern", i)
		}
	}
}
