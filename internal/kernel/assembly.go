//go:build !noasm && (amd64 || arm64)

package kernel

import (
	"math"
	"math/bits"
	"unsafe"

	"github.com/gohvd/gohvd/tensor"
)

// The functions in assembly. n is the number of elements; pointers need not be aligned for anything. dst may be a, b or
// src if the elements have the same size.
type (
	reduceAssembly  func(dst, a, b *byte, n int)
	factorAssembly  func(dst, src *byte, n int, factor float64)
	convertAssembly func(dst, src *byte, n int)
)

// assembly is a function that takes least elements at least, nil where there is none.
type assembly[F any] struct {
	run   F
	least int
}

// functions are those of a level, indexed by type.
type functions struct {
	reduce [numTypes]reductions[assembly[reduceAssembly]]
	scale  [numTypes]assembly[factorAssembly] // by a number, for integers a finite one
	divide [numTypes]assembly[factorAssembly] // by at least 1
	// convert is indexed by the type to which, and then by that from which.
	convert [numTypes][numTypes]assembly[convertAssembly]
}

// vectorize is that of a level.
func (f *functions) vectorize(dt tensor.DType, r *row) {
	size := dt.Size()
	reduce := f.reduce[dt]
	r.sum = reducing(reduce.sum, size, r.sum)
	r.min = reducing(reduce.min, size, r.min)
	r.max = reducing(reduce.max, size, r.max)
	r.product = reducing(reduce.product, size, r.product)
	r.scale = scaling(f.scale[dt], dt, r.scale)
	r.divide = dividing(f.divide[dt], size, r.divide)
	for from := range r.from {
		r.from[from] = converting(f.convert[dt][from], size, tensor.DType(from).Size(), r.from[from])
	}
}

// stretchBytes is how much a function in assembly gets at a time. Go cannot stop a goroutine inside one, and the garbage
// collector waits for all to stop: so it is tens of microseconds.
const stretchBytes = 1 << 20

// stretch is how many of n elements come next, so that no less than least remain, or none.
func stretch(n, shift, least int) int {
	if next := stretchBytes >> shift; n >= next+least {
		return next
	}
	return n
}

// shiftOf is the logarithm of a type's size: a division would take longer than all else of a call with few elements.
func shiftOf(size int) int { return bits.TrailingZeros(uint(size)) }

// at is the address of byte i of b.
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

func scaling(f assembly[factorAssembly], dt tensor.DType, plain ScaleFunc) ScaleFunc {
	if f.run == nil {
		return plain
	}
	size, whole := dt.Size(), dt.IsInteger()
	run, least := running(f, size), f.least*size
	return func(buf []byte, factor float64) {
		switch {
		case len(buf) < least || len(buf)&(size-1) != 0 || whole && (factor == 1 || factor-factor != 0):
			// For integers 1 is special, and infinities and NaNs give NaNs, for which the assembly has no rule.
			plain(buf, factor)
		case factor != factor:
			// Rounded, some NaNs would be none.
			run(buf, math.NaN())
		default:
			run(buf, factor)
		}
	}
}

func dividing(f assembly[factorAssembly], size int, plain DivideFunc) DivideFunc {
	if f.run == nil {
		return plain
	}
	run, least := running(f, size), f.least*size
	return func(buf []byte, n int64) {
		if len(buf) < least || len(buf)&(size-1) != 0 || n < 1 {
			plain(buf, n)
			return
		}
		run(buf, float64(n))
	}
}

// running is f on all of buf, which has elements of size bytes, f.least at least.
func running(f assembly[factorAssembly], size int) func(buf []byte, factor float64) {
	shift := shiftOf(size)
	return func(buf []byte, factor float64) {
		noteWrite(buf)
		for i, n := 0, len(buf)>>shift; n > 0; {
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
