package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// TestPatternIsTheHarness checks that element i of rank r is (7i+13r) mod 101, as in the programs for the
// other libraries.
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

// TestReducedIsWhatTheKernelsGive checks that the expected result of a reduction equals what the kernels
// compute from the inputs, for every type, reduction and number of ranks.
func TestReducedIsWhatTheKernelsGive(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		for _, o := range reductions {
			if o.IsAverage() || tensor.CheckReduce(o, dt) != nil {
				continue
			}
			reduce, err := kernel.Reduce(o, dt)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{1, 2, 3, 8, 20} {
				in := inputs{dt, o, n}
				acc, src := make([]byte, 512*dt.Size()), make([]byte, 512*dt.Size())
				in.of(0).fill(acc)
				for r := 1; r < n; r++ {
					in.of(r).fill(src)
					reduce(acc, src)
				}
				if wrong, first := in.reduced().wrong(acc); wrong != 0 {
					t.Errorf("%v %v of %d: %d wrong: %s", o, dt, n, wrong, first)
				}
				// The verification must notice if a rank is counted twice. A minimum or maximum may be right
				// nevertheless.
				if n == 1 || o == tensor.Min || o == tensor.Max {
					continue
				}
				in.of(n - 1).fill(src)
				reduce(acc, src)
				if wrong, _ := in.reduced().wrong(acc); wrong == 0 {
					t.Errorf("%v %v of %d: the check did not notice a rank that counts twice", o, dt, n)
				}
			}
		}
	}
}

// TestMisroutedBlocksAreSeen checks that, for every type, the verification notices a block that comes from
// the wrong rank, goes to the wrong place, or does not arrive.
func TestMisroutedBlocksAreSeen(t *testing.T) {
	const count = 32
	for _, dt := range tensor.DTypes() {
		blocks := make(map[int][]byte)
		block := func(id int) []byte {
			if blocks[id] == nil {
				blocks[id] = make([]byte, count*dt.Size())
				inputs{dt: dt}.of(id).fill(blocks[id])
			}
			return blocks[id]
		}
		for n := 2; n <= 64; n++ {
			for _, kind := range []message.Kind{message.Broadcast, message.Allgather, message.Alltoall} {
				misroute(t, opSpec{kind: kind, dt: dt, root: n - 1, count: count, inPlace: true}, n, block)
			}
		}
	}
}

// misroute checks that wrongBlocks accepts the right result of s at n ranks. It also checks that wrongBlocks
// notices blocks that come from or go to a wrong place.
func misroute(t *testing.T, s opSpec, n int, block func(id int) []byte) {
	// arg returns block b of the argument of a rank. A block that is only room for the data of another rank
	// contains zeros.
	arg := func(rank, b int) []byte {
		switch {
		case s.kind == message.Alltoall:
			return block(rank*n + b)
		case s.kind == message.Allgather && b != rank:
			return make([]byte, len(block(0)))
		}
		return block(rank)
	}
	// route returns where block b in the result of rank r comes from: a rank, and a block in its argument.
	route := func(r, b int) (rank, block int) {
		switch s.kind {
		case message.Broadcast:
			return s.root, 0
		case message.Allgather:
			return b, b
		}
		return b, r
	}
	for _, r := range []int{0, 1, n / 2, n - 1} {
		if s.kind == message.Broadcast && r == s.root {
			continue // the root has its result before the broadcast
		}
		buf := make([]byte, s.bufferBytes(n))
		want := prepareInput(s, r, n, buf)
		// At least an eighth of the wrong elements must be noticed. It is impossible to notice all of them,
		// because half of the bools are right by chance.
		expect := func(what string, blocks int, from func(b int) (rank, block int)) {
			t.Helper()
			got := make([]byte, 0, len(buf))
			for b := range want {
				got = append(got, arg(from(b))...)
			}
			wrong, first := wrongBlocks(got, want, len(got)/len(want))
			if least := int64(blocks) * s.count / 8; wrong < least || blocks == 0 && wrong > 0 {
				t.Errorf("%v of %v, rank %d of %d: %s: %d wrong of %d: %s", s.kind, s.dt, r, n, what, wrong,
					int64(blocks)*s.count, first)
			}
		}
		expect("right", 0, func(b int) (int, int) { return route(r, b) })
		switch s.kind {
		case message.Broadcast:
			for other := range s.root {
				expect(fmt.Sprintf("from rank %d", other), 1, func(int) (int, int) { return other, 0 })
			}
			continue
		case message.Alltoall:
			expect("block b of rank b", n-1, func(b int) (int, int) { return b, b })
		}
		expect("unchanged", n-1, func(b int) (int, int) { return r, b })
		for b := range want {
			if at := b * len(buf) / n; !bytes.Equal(buf[at:][:len(buf)/n], arg(r, b)) {
				t.Errorf("%v of %v, rank %d of %d: block %d of the argument is not what this test expects",
					s.kind, s.dt, r, n, b)
			}
		}
		for _, d := range []int{1, 2, n / 2, n - 1} {
			if d >= n {
				continue
			}
			expect(fmt.Sprintf("sources %d off", d), n, func(b int) (int, int) { return route(r, (b+d)%n) })
			expect(fmt.Sprintf("blocks 0 and %d swapped", d), 2, func(b int) (int, int) {
				switch b {
				case 0:
					b = d
				case d:
					b = 0
				}
				return route(r, b)
			})
		}
	}
}

// TestMovedBlocksDiffer checks that the blocks of an alltoall between 64 ranks all differ.
func TestMovedBlocksDiffer(t *testing.T) {
	for _, dt := range tensor.DTypes() {
		seen := make(map[string]int)
		in := inputs{dt, tensor.NoReduce, 64}
		for id := range 64 * 64 {
			p := string(in.of(id).period)
			if other, ok := seen[p]; ok {
				t.Fatalf("%v: blocks %d and %d are equal", dt, other, id)
			}
			seen[p] = id
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
			t.Errorf("%v: got %d wrong elements, want none", dt, n)
		}
		for _, at := range []int{0, 500, 1000} {
			buf[at*dt.Size()] ^= 1
		}
		if n, first := p.wrong(buf); n != 3 || !strings.HasPrefix(first, "element 0 is ") {
			t.Errorf("%v: %d wrong, the first %q, want 3 from element 0", dt, n, first)
		}
		if n, first := wrongBlocks(nil, []pattern{p}, len(buf)); n != 1001 ||
			!strings.HasPrefix(first, "the result has 0 bytes, want ") {
			t.Errorf("%v: without a result %d are wrong, the first %q, want all 1001", dt, n, first)
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
			t.Errorf("from(%d) gives another pattern than p has there", i)
		}
	}
}
