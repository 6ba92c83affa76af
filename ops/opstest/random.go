package opstest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

var seed = flag.Uint64("seed", 0, "choose random operations by this seed; 0 draws one")

// PickSeed returns the seed for a test: that of the flag -seed, or a random one.
func PickSeed(tb testing.TB) uint64 {
	tb.Helper()
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	tb.Logf("seed %d; repeat with -args -seed %d", s, s)
	return s
}

// Random runs random operations, one after another, and compares their results with those of a sequential
// reference. It shows that a backend moves and combines all bytes, whatever their number, their memory and
// the steps are. Numbers at the ends of the range of a type are the subject of internal/conformance.
type Random struct {
	Seed   uint64 // the same at all ranks; errors show it
	Rounds int
	Kinds  []message.Kind
	// Reductions has the reductions to choose from. Adasum is chosen only for allreduces.
	Reductions []Reduction
	// Algorithms returns the algorithms for a kind. The default is Direct. InOrder says which of them add and
	// multiply floats in the order of the ranks. For the others, the numbers are such that the order does not
	// matter.
	Algorithms func(message.Kind, tensor.ReduceOp) []message.Algorithm
	InOrder    func(message.Algorithm) bool
	WideHalves bool // sums of 16-bit floats are rounded once, in whatever order they are added
	// Lists is Registration.Lists. If it is nil, each reduction is of one tensor in place, without scaling.
	Lists func(message.Kind, message.Algorithm) bool
	// Segments has values for SegmentBytes.
	Segments []int
	// Sizes has numbers of elements at which something changes. An operation has as many, one more, or fewer.
	Sizes []int
	// Blocks has sizes of blocks in bytes. The default is sizes up to that of one of the Sizes, divided among
	// the ranks.
	Blocks []int
	// Place returns memory with a copy of a content. shared is 0, 1 or 2, the same for all memory of an
	// operation at all ranks. The default is memory of Go.
	Place func(shared int, own *rand.Rand, content []byte) []byte
}

// Reduction is a reduction of elements of a type.
type Reduction struct {
	Op    tensor.ReduceOp
	DType tensor.DType
}

// Reductions returns all reductions, other than Adasum, with all types that they support.
func Reductions() (all []Reduction) {
	for _, dt := range tensor.DTypes() {
		for _, op := range []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product} {
			if tensor.CheckReduce(op, dt) == nil {
				all = append(all, Reduction{op, dt})
			}
		}
	}
	return all
}

// Adasums returns Adasum with all types that it supports.
func Adasums() []Reduction {
	return []Reduction{{tensor.Adasum, tensor.Float16}, {tensor.Adasum, tensor.BFloat16},
		{tensor.Adasum, tensor.Float32}, {tensor.Adasum, tensor.Float64}}
}

// RunAll returns a function that runs Run, and ends its context at all ranks if it fails at one.
func (x *Random) RunAll(ctx context.Context, n int) func(me int, b *Blocking) error {
	ctx, cancel := context.WithCancelCause(ctx)
	return func(me int, b *Blocking) error {
		err := x.Run(ctx, b, me, n)
		if err != nil {
			cancel(err)
		}
		return err
	}
}

// Run runs the operations of rank me of n. The other ranks must call it at the same time.
func (x *Random) Run(ctx context.Context, b *Blocking, me, n int) error {
	common, own := rand.New(rand.NewPCG(x.Seed, 0)), rand.New(rand.NewPCG(x.Seed, uint64(me)+1))
	place := x.Place
	if place == nil {
		place = func(_ int, _ *rand.Rand, content []byte) []byte { return repeated(content, len(content)) }
	}
	for round := range x.Rounds {
		o := x.choose(common, n)
		shared := common.IntN(3)
		b.Steps = own.IntN(2) == 0
		err := o.run(ctx, b, me, own, func(content []byte) []byte { return place(shared, own, content) })
		if err != nil {
			return fmt.Errorf("seed %d: round %d: rank %d of %d: %v %v %v by %v, %d bytes in segments of %d: %w",
				x.Seed, round, me, n, o.Kind, o.Op, o.DType, o.Algorithm, len(o.want), o.SegmentBytes, err)
		}
	}
	return nil
}

// random is an operation, with the contributions of all ranks.
type random struct {
	ops.Operation           // without buffers
	lists         bool      // the backend takes lists, and scales
	in            [][]byte  // the contribution of each rank
	rows          [][]int64 // the sizes of the blocks from each rank to each rank
	want          []byte    // the results of all ranks, one after another if each rank has its own
}

// choose chooses an operation of n ranks.
func (x *Random) choose(rng *rand.Rand, n int) *random {
	o := &random{Operation: ops.Operation{Kind: pick(rng, x.Kinds), Algorithm: message.Direct,
		Root: rng.IntN(n), Scaling: ops.Scaling{Pre: 1, Post: 1}}}
	if len(x.Segments) > 0 {
		o.SegmentBytes = pick(rng, x.Segments)
	}
	size := pick(rng, x.Sizes)
	switch rng.IntN(3) {
	case 0:
		size++
	case 1:
		size = rng.IntN(size + 1)
	}
	if o.SegmentBytes > 0 {
		size = min(size, 20*o.SegmentBytes) // more segments would take long
	}
	if o.Kind.Reduces() {
		r := pick(rng, x.Reductions)
		for r.Op == tensor.Adasum && o.Kind != message.Allreduce {
			r = pick(rng, x.Reductions)
		}
		o.Op, o.DType = r.Op, r.DType
	}
	if x.Algorithms != nil {
		o.Algorithm = pick(rng, x.Algorithms(o.Kind, o.Op))
	}
	o.lists = x.Lists != nil && x.Lists(o.Kind, o.Algorithm) && o.Op != tensor.Adasum
	switch {
	case o.Op == tensor.Adasum:
		o.adasum(rng, n, min(size, 20_000))
	case o.Kind.Reduces():
		o.reduction(rng, n, size, x.InOrder != nil && x.InOrder(o.Algorithm), x.WideHalves)
	case o.Kind == message.Broadcast:
		for range n {
			o.in = append(o.in, content(rng, 8*size))
		}
		o.want = o.in[o.Root]
	default:
		sizes := func() []int { return x.Blocks }
		if x.Blocks == nil {
			most := pick(rng, []int{7, 2048, 2049, 8*size/n + 1})
			sizes = func() []int { return []int{0, most, rng.IntN(most + 1), rng.IntN(most + 1)} }
		}
		o.blocks(rng, n, sizes)
	}
	return o
}

// blocks chooses blocks, each of one of the sizes: one from each rank in an allgather, otherwise one from
// each rank to each rank.
func (o *random) blocks(rng *rand.Rand, n int, sizes func() []int) {
	o.rows = make([][]int64, n)
	for from := range n {
		o.in = append(o.in, nil)
		for to := range n {
			k := 0
			if o.Sends(from, to) && (o.Kind != message.Allgather || to == 0) {
				k = pick(rng, sizes())
			}
			o.rows[from] = append(o.rows[from], int64(k))
			o.in[from] = append(o.in[from], content(rng, k)...)
		}
		o.Counts = append(o.Counts, o.rows[from][0])
	}
	o.want = slices.Concat(o.in...)
}

func pick[T any](rng *rand.Rand, all []T) T { return all[rng.IntN(len(all))] }

// period is the number of elements after which a contribution repeats, because setting each of many elements
// takes long with the race detector.
const period = 1009

// content returns n bytes.
func content(rng *rand.Rand, n int) []byte {
	first := make([]byte, min(n, period))
	for i := range first {
		first[i] = byte(rng.Uint32())
	}
	return repeated(first, n)
}

// repeated returns n bytes that repeat those of first.
func repeated(first []byte, n int) []byte {
	all := aligned(n)
	for have := copy(all, first); 0 < have && have < n; have *= 2 {
		copy(all[have:], all[:have])
	}
	return all
}

// aligned returns n bytes that are aligned for every type.
func aligned(n int) []byte { return tensor.Bytes(make([]int64, (n+7)/8))[:n] }

// Encode returns the numbers as elements of dt.
func Encode(dt tensor.DType, v []float64) []byte {
	out := aligned(len(v) * dt.Size())
	if dt.IsFloat() {
		must(kernel.Convert(dt, tensor.Float64))(out, tensor.Bytes(v))
		return out
	}
	for i, x := range v {
		copy(out[i*dt.Size():][:dt.Size()], tensor.Bytes([]int64{int64(x)}))
	}
	return out
}

func must[F any](f F, err error) F {
	if err != nil {
		panic(err)
	}
	return f
}

// reduction chooses the contributions to a reduction of numElems elements, and computes the result. If
// inOrder is set, sums and products of floats depend on the order. If wide is set, sums of 16-bit floats
// depend on how often they are rounded.
func (o *random) reduction(rng *rand.Rand, n, numElems int, inOrder, wide bool) {
	dt, first := o.DType, min(numElems, period)
	rounds := dt.IsFloat() && (o.Op == tensor.Sum || o.Op == tensor.Product)
	acc := dt
	if rounds && dt.IsHalf() {
		acc = tensor.Float32
	}
	if o.lists && o.Op == tensor.Sum {
		o.Scaling.Pre, o.Scaling.Post = float64(1+rng.IntN(2)), float64(1+rng.IntN(2))
		if dt.IsInteger() {
			o.Scaling.Divisor = int64(rng.IntN(4))
		}
	}
	var sum []byte
	for range n {
		v := make([]float64, first)
		for i := range v {
			switch {
			case rounds && !inOrder && wide && dt.IsHalf() && o.Op == tensor.Sum:
				v[i] = 1 + float64(rng.IntN(128))/128 // float32 has the sum of many
			case rounds && !inOrder:
				v[i] = []float64{-2, -1, 1, 2}[rng.IntN(4)]
			case dt.IsFloat():
				v[i] = rng.NormFloat64() * math.Exp2(float64(rng.IntN(8)))
			case dt == tensor.Bool:
				v[i] = float64(rng.IntN(2))
			default:
				v[i] = float64(rng.Int64() >> 11)
			}
		}
		x := Encode(dt, v)
		o.in = append(o.in, repeated(x, numElems*dt.Size()))
		if o.Scaling.Pre != 1 {
			must(kernel.Scale(dt))(x, o.Scaling.Pre)
		}
		if acc != dt {
			narrow := x
			x = aligned(first * acc.Size())
			must(kernel.Convert(acc, dt))(x, narrow)
		}
		if sum == nil {
			sum = x
		} else {
			must(kernel.Reduce(o.Op, acc))(sum, x)
		}
	}
	if acc != dt {
		narrow := aligned(first * dt.Size())
		must(kernel.Convert(dt, acc))(narrow, sum)
		sum = narrow
	}
	if o.Scaling.Divisor > 1 {
		kernel.Divide(dt)(sum, o.Scaling.Divisor)
	}
	if o.Scaling.Post != 1 {
		must(kernel.Scale(dt))(sum, o.Scaling.Post)
	}
	o.want = repeated(sum, numElems*dt.Size())
	if o.Kind == message.Reducescatter {
		for rest, r := numElems, 0; r < n; r++ {
			k := rest
			if r < n-1 {
				k = rng.IntN(min(rest, 2*numElems/n+1) + 1)
			}
			o.Counts, rest = append(o.Counts, int64(k*dt.Size())), rest-k
		}
	}
}

// adasum chooses vectors that are equal at all ranks, whose combination is the same vector, vectors that are
// orthogonal, whose combination is their sum, and vectors that are multiples of one, of which the average of
// each pair counts. The results are exact, except for multiples of type float64.
func (o *random) adasum(rng *rand.Rand, n, numElems int) {
	v, sum := make([][]float64, n), []float64(nil)
	for rest := numElems; ; {
		k := rng.IntN(rest + 1)
		if rng.IntN(4) == 0 {
			k = rest
		}
		o.Counts = append(o.Counts, int64(k*o.DType.Size()))
		relation, factors := rng.IntN(3), make([]float64, n)
		for r := range factors {
			factors[r] = 1
			if relation == 0 && o.DType != tensor.Float64 {
				factors[r] = float64(int(1) << rng.IntN(3))
			}
		}
		average := averageOfPairs(slices.Clone(factors))
		for i := range k {
			x := []float64{-2, -1, 1, 2}[rng.IntN(4)]
			sum = append(sum, x*average)
			for r := range v {
				if relation == 1 && i%n != r {
					v[r] = append(v[r], 0)
				} else {
					v[r] = append(v[r], x*factors[r])
				}
			}
		}
		if rest -= k; rest == 0 {
			break
		}
	}
	for r := range v {
		o.in = append(o.in, Encode(o.DType, v[r]))
	}
	o.want = Encode(o.DType, sum)
}

// averageOfPairs combines numbers in the tree of package ops/adasum, each pair to its average.
func averageOfPairs(x []float64) float64 {
	p := 1 << (bits.Len(uint(len(x))) - 1)
	for i, y := range x[p:] {
		x[i] = (x[i] + y) / 2
	}
	for x = x[:p]; len(x) > 1; x = x[:len(x)/2] {
		for i := range len(x) / 2 {
			x[i] = (x[2*i] + x[2*i+1]) / 2
		}
	}
	return x[0]
}

// run runs the operation at rank me, and checks its result.
func (o *random) run(ctx context.Context, b *Blocking, me int, own *rand.Rand,
	place func([]byte) []byte) error {
	op, in, want := o.Operation, o.in[me], o.want
	op.Counts = slices.Clone(o.Counts)
	var got func() []byte
	switch {
	case o.Kind == message.Allreduce || o.Kind == message.Reduce:
		op.Tensors = o.cut(own, in, place)
		given := slices.Clone(op.Tensors)
		if o.Kind == message.Reduce && me != o.Root {
			want = nil
			for i := range op.Tensors {
				given[i].Out = nil
				if o.lists {
					op.Tensors[i].Out = nil
				}
			}
		}
		got = func() (all []byte) {
			for _, x := range given {
				all = append(all, x.Out...)
			}
			return all
		}
	case o.Kind == message.Reducescatter:
		op.Buf = place(in)
		from, to := block(o.Counts, me)
		want, got = want[from:to], func() []byte { return op.Buf[from:to] }
		if o.lists && own.IntN(2) == 0 {
			op.Result = place(make([]byte, to-from))
			got = func() []byte { return op.Result }
		}
	case o.Kind == message.Allgather:
		buf := bytes.Repeat([]byte{0xee}, len(want))
		from, _ := block(o.Counts, me)
		copy(buf[from:], in)
		op.Buf = place(buf)
		got = func() []byte { return op.Buf }
	case o.Kind == message.Broadcast:
		op.Buf = place(in)
		got = func() []byte { return op.Buf }
	default:
		op.Buf, op.Counts = place(in), slices.Clone(o.rows[me])
		var counts []int64
		want = nil
		for from, to := range o.rows {
			begin, end := block(to, me)
			counts, want = append(counts, to[me]), append(want, o.in[from][begin:end]...)
		}
		var out []byte
		calls := 0
		op.Allocate = func(said []int64) ([]byte, error) {
			if calls++; calls > 1 || !slices.Equal(said, counts) {
				return nil, fmt.Errorf("function Allocate: got %d calls, the last one with %v, want one with %v", calls,
					said, counts)
			}
			out = place(make([]byte, len(want)))
			return out, nil
		}
		got = func() []byte { return out }
	}
	if err := b.Run(ctx, op); err != nil {
		return err
	}
	if at := difference(got(), want); at >= 0 {
		return fmt.Errorf("byte %d is not that of the reference", at)
	}
	if op.Result != nil && !bytes.Equal(op.Buf, in) {
		return errors.New("the input has changed")
	}
	for _, x := range op.Tensors {
		if k := len(x.In); k > 0 && (x.Out == nil || &x.In[0] != &x.Out[0]) && !bytes.Equal(x.In, in[:k]) {
			return errors.New("an input has changed")
		}
		in = in[len(x.In):]
	}
	return nil
}

// block returns where the block of a rank begins and ends.
func block(counts []int64, rank int) (from, to int64) {
	for _, k := range counts[:rank] {
		from += k
	}
	return from, from + counts[rank]
}

// difference returns the index of the first byte that differs, or -1.
func difference(got, want []byte) int {
	if bytes.Equal(got, want) {
		return -1
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return i
		}
	}
	return min(len(got), len(want))
}

// cut returns the tensors of this rank. If the backend takes lists, their number and sizes are random. Some
// are empty, some have a size at which backends pack them, and some are reduced in place.
func (o *random) cut(own *rand.Rand, p []byte, place func([]byte) []byte) (list []ops.Tensor) {
	if !o.lists {
		in := place(p)
		return []ops.Tensor{{In: in, Out: in}}
	}
	size := o.DType.Size()
	most := pick(own, []int{400, 10_000, math.MaxInt})
	for len(p) > 0 || own.IntN(3) == 0 {
		k := pick(own, []int{0, 1, 10, 1000, 16 << 10 / size, 16<<10/size + 1, 40_000})
		if own.IntN(2) == 0 {
			k = own.IntN(k + 1)
		}
		k = min(k*size, most/size*size, len(p))
		in := place(p[:k])
		out := in
		if own.IntN(2) == 0 {
			out = place(make([]byte, k))
		}
		list, p = append(list, ops.Tensor{In: in, Out: out}), p[k:]
	}
	return list
}
