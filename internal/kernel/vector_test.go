package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/tensor"
)

// The tests in this file compare functions in assembly with functions in plain Go, for all levels that this
// processor supports. Other tests check the results of plain Go.

// set has the functions of a level or of plain Go.
type set struct {
	level
	*table
}

func (s set) named() string { return s.name }

var plainSet = set{plainLevel, plainLevel.table()}

// vectorSets returns a set for each level that this processor supports. If there is none, it skips the test.
func vectorSets(t testing.TB) []set {
	var all []set
	for _, l := range levels() {
		all = append(all, set{l, l.table()})
	}
	if len(all) == 0 {
		t.Skip("this build or processor has plain Go alone")
	}
	return all
}

// operation is one operation of this package, with the element types of its sources and its result.
type operation struct {
	name string
	to   tensor.DType
	in   []tensor.DType
	run  func(s set, dst []byte, in [][]byte)
	// variant is set if the operation differs from another operation only in a number. Tests of values
	// include variants. Tests of memory layout do not.
	variant bool
}

var reduceOps = []tensor.ReduceOp{tensor.Sum, tensor.Min, tensor.Max, tensor.Product}

// factors are the factors for scaling. 1 is special for integers. The others cause truncation, saturation,
// rounding to float32, and overflow of float32. Of the three NaNs, the second has all fraction bits of a
// float32 set, and the third is an infinity if its lower bits are cut off.
var factors = []float64{
	1, 0, math.Copysign(0, -1), -1, 0.5, 1.0 / 3, 2.5, -3.999, 1 - 0x1p-30, 1e10, -1e-10, 1e300, 5e-324,
	math.Inf(1), math.Inf(-1), math.NaN(), float64(math.Float32frombits(0x7fffffff)),
	math.Float64frombits(0x7ff0000000000001),
}

var divisors = []int64{1, 2, 3, 7, 255, 256, 1 << 31, 1<<31 - 1, math.MaxInt64, -1, -3, math.MinInt64}

// operations returns all operations.
func operations() []operation {
	var all []operation
	for dt, r := range plainSet.table {
		dt := tensor.DType(dt)
		for _, op := range reduceOps {
			if r.of(op) != nil {
				all = append(all, operation{fmt.Sprintf("%v of %v", op, dt), dt, []tensor.DType{dt, dt},
					func(s set, dst []byte, in [][]byte) {
						s.table[dt].of(op)(dst, in[0], in[1])
					}, false})
			}
		}
		for _, f := range factors {
			if r.scale != nil {
				all = append(all, operation{fmt.Sprintf("%v times %v", dt, f), dt, []tensor.DType{dt},
					func(s set, dst []byte, in [][]byte) {
						copy(dst, in[0])
						s.table[dt].scale(dst, f)
					}, f != 0.5})
			}
		}
		for _, n := range divisors {
			if r.divide != nil {
				all = append(all, operation{fmt.Sprintf("%v by %v", dt, n), dt, []tensor.DType{dt},
					func(s set, dst []byte, in [][]byte) {
						copy(dst, in[0])
						s.table[dt].divide(dst, n)
					}, n != 3})
			}
		}
		for from, f := range r.from {
			if f != nil {
				all = append(all, operation{fmt.Sprintf("%v to %v", tensor.DType(from), dt), dt,
					[]tensor.DType{tensor.DType(from)}, func(s set, dst []byte, in [][]byte) {
						s.table[dt].from[from](dst, in[0])
					}, false})
			}
		}
	}
	return append(all, operation{"stream", tensor.Uint8, []tensor.DType{tensor.Uint8},
		func(s set, dst []byte, in [][]byte) {
			s.stream(dst, in[0])
		}, false})
}

// layoutOperations returns the operations that are not variants.
func layoutOperations() []operation {
	return slices.DeleteFunc(operations(), func(o operation) bool { return o.variant })
}

// inPlace reports whether the destination may also be a source.
func (o operation) inPlace() bool { return len(o.in) == 2 }

// apply returns the result of o for the elements of in, computed by the functions of s.
func (o operation) apply(s set, in [][]byte) []byte {
	dst := make([]byte, len(in[0])/o.in[0].Size()*o.to.Size())
	o.run(s, dst, in)
	return dst
}

// check fails the test if got and want differ. Two NaNs are equal.
func (o operation) check(t testing.TB, what func() string, got, want []byte, in [][]byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	size := o.to.Size()
	for i := 0; i < len(want); i += size {
		g, w := got[i:i+size], want[i:i+size]
		if bytes.Equal(g, w) || isNaN(o.to, g) && isNaN(o.to, w) {
			continue
		}
		var operands [][]byte
		for k, dt := range o.in {
			operands = append(operands, in[k][i/size*dt.Size():][:dt.Size()])
		}
		t.Fatalf("%s, %s: element %d of %d is % x, want % x, from % x", o.name, what(), i/size,
			len(want)/size, g, w, operands)
	}
}

// number64 returns the element b of a floating-point type.
func number64(dt tensor.DType, b []byte) float64 {
	switch dt {
	case tensor.Float16:
		return float64(half.Float16FromBits(binary.LittleEndian.Uint16(b)).Float32())
	case tensor.BFloat16:
		return float64(half.BFloat16FromBits(binary.LittleEndian.Uint16(b)).Float32())
	case tensor.Float32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b))
}

func isNaN(dt tensor.DType, b []byte) bool { return dt.IsFloat() && math.IsNaN(number64(dt, b)) }

// special returns bit patterns of type dt at which the behaviour of an operation changes.
func special(dt tensor.DType) []uint64 {
	width := 8 * dt.Size()
	top := uint64(1) << (width - 1)
	if !dt.IsFloat() {
		return []uint64{0, 1, 2, 3, 7, 15, 16, top - 1, top, top + 1, top >> 1, 2*top - 1, 2*top - 2, 0x80,
			0x0100, 0xff}
	}
	fraction := map[tensor.DType]int{tensor.Float16: 10, tensor.BFloat16: 7, tensor.Float32: 23,
		tensor.Float64: 52}[dt]
	unit := uint64(1) << fraction // the lowest bit of the exponent
	inf := top - unit
	one := inf / 2 &^ (unit - 1)
	positive := []uint64{
		0, 1, 2, unit - 1, unit, unit + 1, // from subnormal to normal numbers
		one - 1, one, one + 1, one + unit, one + unit/2, one - unit, one + uint64(fraction)*unit,
		one + uint64(fraction+1)*unit,
		inf - unit, inf - 1, inf, // the largest numbers, and infinity
		// These are signalling and quiet NaNs.
		inf + 1, inf + unit/2 - 1, inf + unit/2, inf + unit/2 + 1, inf + unit - 1,
	}
	var all []uint64
	for _, x := range positive {
		all = append(all, x, x|top)
	}
	return all
}

// put stores bits as the first element of b.
func put(dt tensor.DType, b []byte, bits uint64) {
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], bits)
	copy(b[:dt.Size()], word[:])
}

// values returns n elements of type dt: some special values, some random bits, and some numbers of moderate
// size.
func values(r *rand.Rand, dt tensor.DType, n int) []byte {
	buf := make([]byte, n*dt.Size())
	specials := special(dt)
	moderate := make([]byte, dt.Size())
	for i := range n {
		e := buf[i*dt.Size():]
		switch r.IntN(4) {
		case 0:
			put(dt, e, specials[r.IntN(len(specials))])
		case 1:
			if dt.IsFloat() {
				f := math.Ldexp(r.Float64()-0.5, r.IntN(24)-12)
				plainSet.table[dt].from[tensor.Float64](moderate, tensor.Bytes([]float64{f}))
				copy(e, moderate)
				break
			}
			fallthrough
		default:
			put(dt, e, r.Uint64())
		}
	}
	return buf
}

const (
	mostElems = 257 // enough for many turns of every loop, and for every remainder
	fence     = 64
	filling   = 0xa5
)

// TestLengthsAndAlignments runs all operations on up to 257 elements, at every position in a cache line that
// an element can have. The destination is separate or equal to a source. Each level must give the same
// results as plain Go, and the bytes around the destination must not change.
func TestLengthsAndAlignments(t *testing.T) {
	sets := vectorSets(t)
	r := rand.New(rand.NewPCG(1, 2))
	for _, o := range layoutOperations() {
		size, places := o.to.Size(), fence/o.to.Size()
		var data [][]byte
		for _, dt := range o.in {
			data = append(data, values(r, dt, mostElems))
		}
		buffer := align(make([]byte, 4*fence+mostElems*size))
		blank := bytes.Repeat([]byte{filling}, len(buffer))
		var sources [2][]byte
		for i, dt := range o.in {
			sources[i] = align(make([]byte, 2*fence+mostElems*dt.Size()))
		}
		for n := range mostElems + 1 {
			in := make([][]byte, len(o.in))
			for i, dt := range o.in {
				in[i] = data[i][:n*dt.Size()]
			}
			want := o.apply(plainSet, in)
			for _, s := range sets {
				for place := range places {
					if testing.Short() && (place+n)%5 != 0 {
						continue
					}
					copy(buffer, blank)
					before := fence + place*size
					behind := before + len(want)
					dst := buffer[before:behind]
					args := make([][]byte, len(o.in))
					for i, dt := range o.in {
						args[i] = sources[i][r.IntN(fence/dt.Size())*dt.Size():][:len(in[i])]
						copy(args[i], in[i])
					}
					same := 0
					if o.inPlace() {
						if same = (place + n) % 3; same > 0 {
							copy(dst, in[same-1])
							args[same-1] = dst
						}
					}
					o.run(s, dst, args)
					what := func() string {
						return fmt.Sprintf("%s, at %d of a line, destination %d", s.name, place*size, same)
					}
					o.check(t, what, dst, want, in)
					if !bytes.Equal(buffer[:before], blank[:before]) ||
						!bytes.Equal(buffer[behind:], blank[behind:]) {
						t.Fatalf("%s of %d, %s: wrote beside the destination", o.name, n, what())
					}
					for i := range in {
						if i != same-1 && !bytes.Equal(args[i], in[i]) {
							t.Fatalf("%s of %d, %s: source %d was changed", o.name, n, what(), i)
						}
					}
				}
			}
		}
	}
}

func fillWith(b []byte, x byte) {
	for i := range b {
		b[i] = x
	}
}

// align returns b without the bytes before the first cache line boundary.
func align(b []byte) []byte { return b[-uintptr(unsafe.Pointer(unsafe.SliceData(b)))%fence:] }

// TestSpecialPairs combines each special value with each other special value, at different positions in a
// vector. Each level must produce the same results as plain Go.
func TestSpecialPairs(t *testing.T) {
	for _, s := range vectorSets(t) {
		for _, o := range operations() {
			in := make([][]byte, len(o.in))
			for _, x := range special(o.in[0]) {
				for _, y := range special(o.in[0]) {
					for i, bits := range []uint64{x, y}[:len(in)] {
						in[i] = append(in[i], make([]byte, o.in[0].Size())...)
						put(o.in[0], in[i][len(in[i])-o.in[0].Size():], bits)
					}
				}
			}
			o.check(t, s.named, o.apply(s, in), o.apply(plainSet, in), in)
		}
	}
}

// TestAllHalves converts, scales and combines all half-precision values. Each level must give the same
// results as plain Go.
func TestAllHalves(t *testing.T) {
	sets := vectorSets(t)
	all := make([]uint16, 1<<16)
	for i := range all {
		all[i] = uint16(i)
	}
	r := rand.New(rand.NewPCG(3, 4))
	rounds := 32
	if testing.Short() {
		rounds = 4
	}
	for _, o := range operations() {
		if !o.in[0].IsHalf() {
			continue
		}
		in := [][]byte{tensor.Bytes(all)}
		for range rounds {
			if o.inPlace() {
				others := make([]uint16, len(all))
				for i := range others {
					others[i] = uint16(r.Uint32())
				}
				in = [][]byte{in[0], tensor.Bytes(others)}
			}
			want := o.apply(plainSet, in)
			for _, s := range sets {
				o.check(t, s.named, o.apply(s, in), want, in)
			}
			if !o.inPlace() {
				break
			}
		}
	}
}

// TestBoundaries converts numbers to half-precision types at which rounding changes: each half-precision
// number, the middle to the next one, and the neighbours of both. A neighbouring float64 may be nearer than
// any float32. It also converts many other numbers. Each level must produce the same results as plain Go.
func TestBoundaries(t *testing.T) {
	sets := vectorSets(t)
	for _, to := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		var wide []float64
		for i := range 1 << 15 {
			var b [4]byte
			binary.LittleEndian.PutUint16(b[:], uint16(i))
			binary.LittleEndian.PutUint16(b[2:], uint16(i+1))
			low, high := number64(to, b[:]), number64(to, b[2:])
			for _, x := range []float64{low, low + (high-low)/2} {
				wide = append(wide, x, -x)
				for _, inf := range []float64{math.Inf(1), math.Inf(-1)} {
					next := math.Nextafter(x, inf)
					next32 := float64(math.Nextafter32(float32(x), float32(inf)))
					wide = append(wide, next, -next, next32, -next32, math.Nextafter(next32, -inf),
						math.Nextafter(next32, inf))
				}
			}
		}
		narrow := make([]float32, len(wide))
		for i, x := range wide {
			narrow[i] = float32(x)
		}
		for bits := uint64(0); bits < 1<<32; bits += 9973 {
			narrow = append(narrow, math.Float32frombits(uint32(bits)))
		}
		for from, src := range map[tensor.DType][]byte{tensor.Float32: tensor.Bytes(narrow),
			tensor.Float64: tensor.Bytes(wide)} {
			o := operation{fmt.Sprintf("%v to %v", from, to), to, []tensor.DType{from},
				func(s set, dst []byte, in [][]byte) {
					s.table[to].from[from](dst, in[0])
				}, false}
			want := o.apply(plainSet, [][]byte{src})
			for _, s := range sets {
				o.check(t, s.named, o.apply(s, [][]byte{src}), want, [][]byte{src})
			}
		}
	}
}

// TestQuotients divides and scales numbers next to multiples of the divisor, where the quotient is nearest to
// an integer. Each level must produce the same results as plain Go.
func TestQuotients(t *testing.T) {
	sets := vectorSets(t)
	r := rand.New(rand.NewPCG(5, 6))
	for _, dt := range []tensor.DType{tensor.Uint8, tensor.Int8, tensor.Uint16, tensor.Int16, tensor.Int32,
		tensor.Int64} {
		for range 300 {
			n := int64(r.Uint32()>>r.IntN(32)) | 1
			in := [][]byte{make([]byte, 200*dt.Size())}
			for i := range 200 {
				put(dt, in[0][i*dt.Size():], uint64(n*int64(r.Uint64()>>r.IntN(64))+int64(r.IntN(3)-1)))
			}
			for _, o := range []operation{
				{fmt.Sprintf("%v by %d", dt, n), dt, []tensor.DType{dt},
					func(s set, dst []byte, in [][]byte) {
						copy(dst, in[0])
						s.table[dt].divide(dst, n)
					}, true},
				{fmt.Sprintf("%v times 1/%d", dt, n), dt, []tensor.DType{dt},
					func(s set, dst []byte, in [][]byte) {
						copy(dst, in[0])
						s.table[dt].scale(dst, 1/float64(n))
					}, true},
			} {
				want := o.apply(plainSet, in)
				for _, s := range sets {
					o.check(t, s.named, o.apply(s, in), want, in)
				}
			}
		}
	}
}

// TestLong uses so many elements that a function in assembly is called more than once. Each level must give
// the same results as plain Go.
func TestLong(t *testing.T) {
	sets := vectorSets(t)
	r := rand.New(rand.NewPCG(7, 8))
	for _, o := range layoutOperations() {
		largest := o.to.Size()
		for _, dt := range o.in {
			largest = max(largest, dt.Size())
		}
		whole := longBytes / largest
		var data [][]byte
		for _, dt := range o.in {
			chunk := values(r, dt, 1021) // a prime, so that no two lanes or calls get the same elements
			data = append(data, bytes.Repeat(chunk, 2*whole/1021+2))
		}
		lengths := []int{whole + 1, 2*whole + 3}
		if testing.Short() {
			lengths = lengths[:1]
		}
		for _, n := range lengths {
			in := make([][]byte, len(o.in))
			for i, dt := range o.in {
				in[i] = data[i][:n*dt.Size()]
			}
			want := o.apply(plainSet, in)
			for _, s := range sets {
				o.check(t, s.named, o.apply(s, in), want, in)
			}
		}
	}
}

// longBytes is at least the number of bytes that one call of a function in assembly handles.
const longBytes = 1 << 20

// FuzzLevels decodes from its input an operation, two offsets in a cache line and the operands, and compares
// every level of vector instructions with plain Go.
func FuzzLevels(f *testing.F) {
	all := operations()
	for i, o := range all {
		var seed []byte
		for _, dt := range o.in {
			for _, bits := range special(dt) {
				e := make([]byte, dt.Size())
				put(dt, e, bits)
				seed = append(seed, e...)
			}
		}
		f.Add(uint16(i), uint8(i), uint8(3*i), seed)
	}
	sets := vectorSets(f)
	f.Fuzz(func(t *testing.T, which uint16, at, from uint8, data []byte) {
		o := all[int(which)%len(all)]
		unit := 0
		for _, dt := range o.in {
			unit += dt.Size()
		}
		n := min(len(data)/unit, 4096)
		var in [][]byte
		for _, dt := range o.in {
			b := align(make([]byte, 2*fence+n*dt.Size()))[int(from)%fence/dt.Size()*dt.Size():][:n*dt.Size()]
			data = data[copy(b, data):]
			in = append(in, b)
		}
		want := o.apply(plainSet, in)
		for _, s := range sets {
			dst := align(make([]byte, 2*fence+len(want)))[int(at)%fence/o.to.Size()*o.to.Size():][:len(want)]
			o.run(s, dst, in)
			o.check(t, s.named, dst, want, in)
			if o.inPlace() {
				copy(dst, in[0])
				o.run(s, dst, [][]byte{dst, in[1]})
				o.check(t, func() string { return s.name + " in place" }, dst, want, in)
			}
		}
	})
}

func TestLevel(t *testing.T) {
	want := "none"
	if all := levels(); len(all) > 0 {
		want = all[0].name
	}
	if got := Level(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestStream(t *testing.T) {
	src := values(rand.New(rand.NewPCG(9, 10)), tensor.Uint8, 1<<16)
	for _, n := range []int{0, 1, streamBytes - 1, streamBytes, streamBytes + 1, 1 << 15} {
		for _, place := range []int{0, 1, 63, 64} {
			buffer := make([]byte, n+2*fence)
			Stream(buffer[place:place+n], src[7:7+n])
			if !bytes.Equal(buffer[place:place+n], src[7:7+n]) ||
				bytes.ContainsFunc(buffer[:place], nonZero) || bytes.ContainsFunc(buffer[place+n:], nonZero) {
				t.Errorf("%d bytes to %d: not copied, or more than that", n, place)
			}
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("no panic for a destination that is too short")
		}
	}()
	Stream(make([]byte, 8191), make([]byte, 8192))
}

func nonZero(r rune) bool { return r != 0 }

// BenchmarkReduce counts the bytes of the destination, which is also a source. 8 KiB stay in the first-level
// cache, and 64 KiB in the second. All elements are zero, which every operation keeps zero, so there are no
// overflows and no denormals.
func BenchmarkReduce(b *testing.B) {
	run := func(s set, dt tensor.DType, op tensor.ReduceOp, size int) {
		reduce := s.table[dt].inPlace.of(op)
		if reduce == nil {
			return
		}
		b.Run(fmt.Sprintf("%v/%v/bytes=%d/%s", dt, op, size, s.name), func(b *testing.B) {
			dst, src := align(make([]byte, size+fence))[:size], align(make([]byte, size+fence))[:size]
			for _, buf := range [][]byte{dst, src} {
				fillWith(buf, 0) // otherwise all pages would be the same page of zeros
			}
			b.SetBytes(int64(size))
			for b.Loop() {
				reduce(dst, src)
			}
			b.ReportMetric(float64(size)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GB/s")
		})
	}
	sets := []set{plainSet}
	for _, l := range levels() {
		sets = append(sets, set{l, l.table()})
	}
	for _, dt := range tensor.DTypes() {
		for _, op := range reduceOps {
			for _, s := range sets {
				run(s, dt, op, 8<<10)
				run(s, dt, op, 64<<10)
			}
		}
	}
	for _, s := range sets {
		run(s, tensor.Float32, tensor.Sum, 256<<20) // too large for the caches
	}
}

func BenchmarkStream(b *testing.B) {
	for _, size := range []int{64 << 10, 64 << 20} {
		dst, src := make([]byte, size), make([]byte, size)
		fillWith(src, 1)
		for name, f := range map[string]func(dst, src []byte){"stream": Stream,
			"copy": func(dst, src []byte) { copy(dst, src) }} {
			b.Run(fmt.Sprintf("bytes=%d/%s", size, name), func(b *testing.B) {
				b.SetBytes(int64(size))
				for b.Loop() {
					f(dst, src)
				}
			})
		}
	}
}
