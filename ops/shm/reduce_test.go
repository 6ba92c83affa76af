package shm_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
)

// input returns the contribution of the given rank to tensor number t. Its elements are small integers, so
// the order of the additions does not change their sum.
func input(dt tensor.DType, rank, t, numElems int) []byte {
	v := make([]float64, min(numElems, period))
	for i := range v {
		v[i] = float64((7*i + 13*rank + 3*t) % 5)
		if dt == tensor.Bool {
			v[i] = float64((i + rank) % 2)
		}
	}
	first := aligned(len(v) * dt.Size())
	encode(dt, first, v)
	return repeated(first, numElems*dt.Size())
}

// period is the number of elements after which the elements of an input repeat. Setting each element
// separately would take minutes with the race detector.
const period = 10

// repeated returns numBytes bytes that repeat those of first.
func repeated(first []byte, numBytes int) []byte {
	b := aligned(numBytes)
	for have := copy(b, first); 0 < have && have < len(b); have *= 2 {
		copy(b[have:], b[:have])
	}
	return b
}

// encode stores the numbers v in dst as elements of dt.
func encode(dt tensor.DType, dst []byte, v []float64) {
	for i, x := range v {
		switch dt {
		case tensor.Uint8, tensor.Bool:
			tensor.View[uint8](dst)[i] = uint8(x)
		case tensor.Int8:
			tensor.View[int8](dst)[i] = int8(x)
		case tensor.Uint16:
			tensor.View[uint16](dst)[i] = uint16(x)
		case tensor.Int16:
			tensor.View[int16](dst)[i] = int16(x)
		case tensor.Int32:
			tensor.View[int32](dst)[i] = int32(x)
		case tensor.Int64:
			tensor.View[int64](dst)[i] = int64(x)
		case tensor.Float32:
			tensor.View[float32](dst)[i] = float32(x)
		case tensor.Float64:
			tensor.View[float64](dst)[i] = x
		default:
			f, err := kernel.Convert(dt, tensor.Float64)
			if err != nil {
				panic(err)
			}
			f(dst[i*dt.Size():(i+1)*dt.Size()], tensor.Bytes([]float64{x}))
		}
	}
}

// reduced returns the expected result for tensor number t: the reduction of the inputs of n ranks.
func reduced(dt tensor.DType, op tensor.ReduceOp, n, t, numElems int) []byte {
	f, err := kernel.Reduce(op, dt)
	if err != nil {
		panic(err)
	}
	first := min(numElems, period)
	sum := input(dt, 0, t, first)
	for r := 1; r < n; r++ {
		f(sum, input(dt, r, t, first))
	}
	return repeated(sum, numElems*dt.Size())
}

var one = ops.Scaling{Pre: 1, Post: 1}

// sizes are numbers of elements just below and above each limit: a cache line, the largest small operation,
// one step, several steps, and a partial last block.
var sizes = []int{0, 1, 2, 15, 16, 17, 500, 1000, 1007, 1009, 2000, 4099, 16384, 16401, 50_000}

// Allreduces of all sizes of elements and tensors produce the correct result with 1 to 5 ranks. Depending on
// the rank, the tensors are in ordinary memory, in arenas, or in both.
func TestAllreduce(t *testing.T) {
	for n := 1; n <= 5; n++ {
		for _, dt := range []tensor.DType{tensor.Uint8, tensor.BFloat16, tensor.Int64} {
			t.Run(fmt.Sprintf("%d/%v", n, dt), func(t *testing.T) {
				run(t, n, shm.Config{StageBytes: 16 << 10}, func(r *rank) error {
					for k, size := range sizes {
						for _, op := range []tensor.ReduceOp{tensor.Sum, tensor.Max, tensor.Product} {
							buf := input(dt, r.me, 0, size)
							if arenas := (k + int(op)) % 3; size > 0 &&
								(arenas == 1 || arenas == 2 && r.me%2 == 1) {
								buf = r.mem.alloc(len(buf))
								copy(buf, input(dt, r.me, 0, size))
							}
							if err := r.Allreduce(t.Context(), message.Direct, dt, op, buf); err != nil {
								return err
							}
							if want := reduced(dt, op, n, 0, size); !bytes.Equal(buf, want) {
								return fmt.Errorf("%v of %d elements: %s", op, size, difference(buf, want))
							}
						}
					}
					return nil
				})
			})
		}
	}
}

// A reduce gives its root the bits of an allreduce. The other ranks pass no outputs and keep their inputs.
// Ranks divide the bytes into tensors in their own ways, in arenas and in ordinary memory.
func TestReduce(t *testing.T) {
	const dt = tensor.Float32
	for n := 1; n <= 4; n++ {
		run(t, n, shm.Config{StageBytes: 16 << 10, DirectBytes: 1}, func(r *rank) error {
			for k, size := range append([]int{400_000}, sizes...) {
				root := k % n
				in, tensors := input(dt, r.me, 0, size), []ops.Tensor(nil)
				for i, rest := 0, in; len(rest) > 0; i++ {
					from := rest[:min(len(rest), (1+i*(r.me+1))*1000*dt.Size())]
					rest = rest[len(from):]
					x := ops.Tensor{In: aligned(len(from))}
					if (i+r.me+k)%2 == 0 {
						x.In = r.mem.alloc(len(from))
					}
					copy(x.In, from)
					if r.me == root {
						x.Out = x.In
						if k%3 == 0 {
							x.Out = aligned(len(from))
						}
					}
					tensors = append(tensors, x)
				}
				given := slices.Clone(tensors)
				err := r.Reduce(t.Context(), message.Direct, dt, tensor.Sum, root, tensors...)
				if err != nil {
					return err
				}
				want, got := in, []byte(nil)
				if r.me == root {
					want = reduced(dt, tensor.Sum, n, 0, size)
				}
				for _, x := range given {
					if r.me == root {
						x.In = x.Out
					}
					got = append(got, x.In...)
				}
				if !bytes.Equal(got, want) {
					return fmt.Errorf("%d elements to rank %d: %s", size, root, difference(got, want))
				}
			}
			return nil
		})
	}
}

func difference(got, want []byte) string {
	for i := range got {
		if got[i] != want[i] {
			return fmt.Sprintf("byte %d of %d is %d, want %d", i, len(got), got[i], want[i])
		}
	}
	return "the lengths differ"
}

// A fused allreduce produces the same result as an allreduce of one tensor with the same bytes. Every rank
// divides the bytes into tensors in its own way. The tensors are in ordinary memory or in arenas, and are
// reduced in place or into separate outputs.
func TestAllreduceFused(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for n := 2; n <= 4; n++ {
		run(t, n, shm.Config{StageBytes: 4 << 10}, func(r *rank) error {
			common := rand.New(rand.NewPCG(seed, 0))
			own := rand.New(rand.NewPCG(seed, uint64(r.me)+1))
			for round := range 60 {
				total := common.IntN([]int{300, 3000, 30_000}[round%3]) + 1
				longest := total
				if round%4 == 0 {
					// With this limit some tensors are small enough to be packed, and others are not.
					longest = min(total, 700)
				}
				if round == 32 {
					total, longest = 200_000, 400 // more bytes of small tensors than one operation can pack
				}
				whole := input(tensor.Float32, r.me, round, total)
				var tensors []ops.Tensor
				for at := 0; at < len(whole); {
					size := min(4*(own.IntN(longest)+own.IntN(2)), len(whole)-at)
					if size == 0 && own.IntN(2) == 0 {
						continue
					}
					tensors = append(tensors, r.tensor(own, whole[at:at+size]))
					at += size
				}
				if err := r.AllreduceFused(t.Context(), message.Direct, tensor.Float32, tensor.Sum, one,
					tensors); err != nil {
					return err
				}
				var got []byte
				for _, x := range tensors {
					got = append(got, x.Out...)
				}
				if want := reduced(tensor.Float32, tensor.Sum, n, round, total); !bytes.Equal(got, want) {
					return fmt.Errorf("round %d, %d tensors: %s", round, len(tensors), difference(got, want))
				}
			}
			return nil
		})
	}
}

// tensor returns a tensor with the given content. It chooses at random whether the memory is in an arena, and
// whether the output is the input or a separate buffer.
func (r *rank) tensor(rng *rand.Rand, content []byte) ops.Tensor {
	memory := func() []byte {
		if len(content) > 0 && rng.IntN(2) == 0 {
			return r.mem.alloc(len(content))
		}
		return aligned(len(content))
	}
	in := memory()
	copy(in, content)
	if rng.IntN(2) == 0 {
		return ops.Tensor{In: in, Out: in}
	}
	return ops.Tensor{In: in, Out: memory()}
}

// Floats are added in the order of the ranks. Neither the position of an element in its tensor nor the other
// tensors of the operation change the result. All ranks get the same bits.
func TestOrderOfAdditions(t *testing.T) {
	const n, numElems = 4, 3000
	rng := rand.New(rand.NewPCG(1, 2))
	inputs := make([][]float32, n)
	want := make([]float32, numElems)
	for r := range inputs {
		inputs[r] = tensor.View[float32](aligned(4 * numElems))
		for i := range want {
			inputs[r][i] = rng.Float32() - 0.5
			want[i] += inputs[r][i]
			if r == 0 {
				want[i] = inputs[r][i]
			}
		}
	}
	for _, cut := range []int{0, 17, 100, 1003} {
		run(t, n, shm.Config{StageBytes: 2 << 10}, func(r *rank) error {
			buf := tensor.Bytes(append([]float32(nil), inputs[r.me]...))
			for _, part := range [][]byte{buf[:4*cut], buf[4*cut:]} {
				if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum,
					part); err != nil {
					return err
				}
			}
			if !bytes.Equal(buf, tensor.Bytes(want)) {
				return fmt.Errorf("cut at %d: %s", cut, difference(buf, tensor.Bytes(want)))
			}
			return nil
		})
	}
}

// Once the first operations have run, an allreduce and an Adasum allocate nothing.
func TestAllreduceAllocatesNothing(t *testing.T) {
	run(t, 2, shm.Config{}, func(r *rank) error {
		small, large := aligned(64), aligned(1<<20)
		tensors := []ops.Tensor{{In: small, Out: small}, {In: large, Out: large}}
		counts := []int64{1 << 19, 0, 1 << 19}
		op := func() {
			for range 2 { // both ranks must run the same number of operations
				if err := r.Adasum(t.Context(), message.Direct, tensor.Float32, large, counts); err != nil {
					t.Error(err)
				}
				for _, buf := range [][]byte{small, large} {
					if err := r.Allreduce(t.Context(), message.Direct, tensor.Float32, tensor.Sum,
						buf); err != nil {
						t.Error(err)
					}
				}
				if err := r.AllreduceFused(t.Context(), message.Direct, tensor.Float32, tensor.Sum, one,
					tensors); err != nil {
					t.Error(err)
				}
			}
		}
		if r.me == 1 {
			for range 11 {
				op()
			}
			return nil
		}
		if allocs := testing.AllocsPerRun(10, op); allocs > 0 {
			return fmt.Errorf("%v allocations in 8 operations, want none", allocs)
		}
		return nil
	})
}
