//go:build !noasm

package kernel

import (
	"math"
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
	scale  [numTypes]assembly[factorAssembly]
	// convert is indexed by the type to which, and then by that from which.
	convert [numTypes][numTypes]assembly[convertAssembly]
}

func (f *functions) vectorize(dt tensor.DType, r *row) {
	size := dt.Size()
	reduce := f.reduce[dt]
	r.sum = reducing(reduce.sum.run, size, r.sum)
	r.min = reducing(reduce.min.run, size, r.min)
	r.max = reducing(reduce.max.run, size, r.max)
	r.product = reducing(reduce.product.run, size, r.product)
	r.scale = scaling(f.scale[dt].run, dt, r.scale)
	for from := range r.from {
		r.from[from] = converting(f.convert[dt][from].run, size, tensor.DType(from).Size(), r.from[from])
	}
}

// stretchBytes is how much a function in assembly gets at a time. Go cannot stop a goroutine inside one, and the garbage
// collector waits for all to stop: so it is tens of microseconds.
const stretchBytes = 1 << 20

func reducing(run reduceAssembly, size int, plain IntoFunc) IntoFunc {
	if run == nil {
		return plain
	}
	return func(dst, a, b []byte) {
		sameLength(dst, a)
		sameLength(dst, b)
		wholeElems(dst, size)
		noteWrite(dst)
		noteRead(a)
		noteRead(b)
		for len(dst) > 0 {
			n := min(len(dst), stretchBytes)
			run(unsafe.SliceData(dst), unsafe.SliceData(a), unsafe.SliceData(b), n/size)
			dst, a, b = dst[n:], a[n:], b[n:]
		}
	}
}

func scaling(run factorAssembly, dt tensor.DType, plain ScaleFunc) ScaleFunc {
	if run == nil {
		return plain
	}
	size, whole := dt.Size(), dt.IsInteger()
	return func(buf []byte, factor float64) {
		wholeElems(buf, size)
		switch {
		case whole && factor == 1: // int64s of more than 53 bits would be rounded
			return
		case factor != factor:
			factor = math.NaN() // rounded to a bfloat16, some NaNs would be none
		}
		noteWrite(buf)
		for len(buf) > 0 {
			n := min(len(buf), stretchBytes)
			run(unsafe.SliceData(buf), unsafe.SliceData(buf), n/size, factor)
			buf = buf[n:]
		}
	}
}

func converting(run convertAssembly, toSize, fromSize int, plain ConvertFunc) ConvertFunc {
	if run == nil {
		return plain
	}
	return func(dst, src []byte) {
		wholeElems(dst, toSize)
		wholeElems(src, fromSize)
		sameCount(len(dst)/toSize, len(src)/fromSize)
		noteWrite(dst)
		noteRead(src)
		for len(dst) > 0 {
			n := min(len(dst)/toSize, stretchBytes/max(toSize, fromSize))
			run(unsafe.SliceData(dst), unsafe.SliceData(src), n)
			dst, src = dst[n*toSize:], src[n*fromSize:]
		}
	}
}
