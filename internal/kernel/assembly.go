//go:build !noasm && (amd64 || arm64)

package kernel

import (
	"math"
	"math/bits"
	"unsafe"

	"github.com/gohvd/gohvd/internal/tensor"
)

// These are the types of the functions in assembly. n is the number of elements. The pointers need not be
// aligned. dst may be equal to a, b or src if the elements have the same size.
type (
	reduceAssembly  func(dst, a, b *byte, n int)
	factorAssembly  func(dst, src *byte, n int, factor float64)
	convertAssembly func(dst, src *byte, n int)
)

// assembly is a function together with the smallest number of elements that it may be called with: the field
// least. If run is nil, there is no function.
type assembly[F any] struct {
	run   F
	least int
}

// functions has the functions of a level. Each field is indexed by element type.
type functions struct {
	reduce [numTypes]reductions[assembly[reduceAssembly]]
	scale  [numTypes]assembly[factorAssembly] // for floating-point types
	// widen converts half-precision types to float32, and narrow converts float32 to half-precision types.
	widen, narrow [numTypes]assembly[convertAssembly]
}

// vectorize replaces a plain function of t wherever f has a function for the same operation.
func (f *functions) vectorize(t *table) {
	for i := range t {
		dt, r := tensor.DType(i), &t[i]
		r.sum = reducing(f.reduce[dt].sum, dt.Size(), r.sum)
		r.min = reducing(f.reduce[dt].min, dt.Size(), r.min)
		r.max = reducing(f.reduce[dt].max, dt.Size(), r.max)
		r.scale = scaling(f.scale[dt], dt.Size(), r.scale)
		r.from[tensor.Float32] = converting(f.narrow[dt], dt.Size(), 4, r.from[tensor.Float32])
		wide := &t[tensor.Float32].from[dt]
		*wide = converting(f.widen[dt], 4, dt.Size(), *wide)
	}
}

// stretchBytes is the number of bytes that one call of a function in assembly handles. Such a call takes tens
// of microseconds. Calls must be short because Go cannot preempt a goroutine inside a call, and the garbage
// collector waits for all goroutines to stop.
const stretchBytes = 1 << 20

// stretch returns how many of n elements the next call handles. If elements remain after that call, their
// number is at least the parameter least.
func stretch(n, shift, least int) int {
	if next := stretchBytes >> shift; n >= next+least {
		return next
	}
	return n
}

// shiftOf returns the binary logarithm of an element size. With it, callers shift instead of dividing. A
// division would take longer than the rest of a call with few elements.
func shiftOf(size int) int { return bits.TrailingZeros(uint(size)) }

// at returns the address of byte i of b.
func at(b []byte, i int) *byte { return (*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i)) }

func reducing(f assembly[reduceAssembly], size int, plain IntoFunc) IntoFunc {
	if f.run == nil {
		return plain
	}
	shift := shiftOf(size)
	return func(dst, a, b []byte) {
		n := len(dst) >> shift
		if n < f.least || len(a) != len(dst) || len(b) != len(dst) || n<<shift != len(dst) {
			plain(dst, a, b)
			return
		}
		noteWrite(dst)
		noteRead(a)
		noteRead(b)
		for i := 0; n > 0; {
			k := stretch(n, shift, f.least)
			f.run(at(dst, i), at(a, i), at(b, i), k)
			i, n = i+k<<shift, n-k
		}
	}
}

func scaling(f assembly[factorAssembly], size int, plain ScaleFunc) ScaleFunc {
	if f.run == nil {
		return plain
	}
	shift := shiftOf(size)
	return func(buf []byte, factor float64) {
		n := len(buf) >> shift
		if n < f.least || n<<shift != len(buf) {
			plain(buf, factor)
			return
		}
		if factor != factor {
			factor = math.NaN() // other NaNs may become infinities when they are rounded to float32
		}
		noteWrite(buf)
		for i := 0; n > 0; {
			k := stretch(n, shift, f.least)
			f.run(at(buf, i), at(buf, i), k, factor)
			i, n = i+k<<shift, n-k
		}
	}
}

func converting(f assembly[convertAssembly], toSize, fromSize int, plain ConvertFunc) ConvertFunc {
	if f.run == nil {
		return plain
	}
	toShift, fromShift := shiftOf(toSize), shiftOf(fromSize)
	return func(dst, src []byte) {
		n := len(dst) >> toShift
		if n < f.least || len(dst) != n<<toShift || len(src) != n<<fromShift {
			plain(dst, src)
			return
		}
		noteWrite(dst)
		noteRead(src)
		for to, from := 0, 0; n > 0; {
			k := stretch(n, max(toShift, fromShift), f.least)
			f.run(at(dst, to), at(src, from), k)
			to, from, n = to+k<<toShift, from+k<<fromShift, n-k
		}
	}
}
