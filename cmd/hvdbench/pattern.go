package main

import (
	"bytes"
	"fmt"
	"math"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// pattern is a periodic sequence of elements. It describes the input or the expected contents of a buffer.
type pattern struct {
	dt     tensor.DType
	period []byte // the elements of one period
	ulps   int    // tolerance for floats, in units in the last place (ulps)
}

// movedModulus is the period of the values in operations that only move data, such as a broadcast. It does
// not depend on the number of ranks. Every element type represents the integers below it exactly.
const movedModulus = 101

// modulus returns the period m of the values to reduce: element i of rank r is (7i+13r) mod m. m is 101, as
// in the programs of bench/peers. If a sum of n such values would not be exact in type dt, m is smaller.
func modulus(dt tensor.DType, n int) int {
	exact := math.MaxInt
	switch dt {
	case tensor.Bool:
		return 2
	case tensor.BFloat16:
		exact = 1 << 8
	case tensor.Float16:
		exact = 1 << 11
	case tensor.Uint8, tensor.Int8:
		exact = 127
	}
	m := min(101, max(2, exact/n))
	for m%7 == 0 || m%13 == 0 { // with such an m, the values would depend less on i or on r
		m--
	}
	return m
}

// inputs describes input values whose result is known for n ranks and the reduction op.
type inputs struct {
	dt tensor.DType
	op tensor.ReduceOp // NoReduce if values are moved and not reduced
	n  int
}

// period returns the number of elements after which the values repeat.
func (in inputs) period() int {
	switch in.op {
	case tensor.NoReduce:
		return movedModulus
	case tensor.Product:
		return in.n
	}
	return modulus(in.dt, in.n)
}

// value returns element i of rank r. For a product, one rank has a 2 and the others have ones. So the product
// is small, and a missing rank makes it wrong.
func (in inputs) value(i, r int) int {
	switch in.op {
	case tensor.NoReduce:
		return in.moved(i, r)
	case tensor.Product:
		if i%in.n == r {
			return 2
		}
		return 1
	}
	return (7*i + 13*r) % in.period()
}

// moved returns element i of block r. All blocks must differ, and an alltoall has n*n of them. The first 101
// blocks are the same as in the programs of bench/peers, and they differ from each other in every element. A
// block is a straight line modulo the prime 101, and later blocks have other slopes. Two such lines meet once
// in a period. So any two of the first 101*100 blocks agree in at most one of 101 elements.
func (in inputs) moved(i, r int) int {
	const m = movedModulus
	if in.dt == tensor.Bool {
		return int(mix(uint64(r*m+i%m)) & 1)
	}
	slope := 1 + (6+r/m)%(m-1)
	return (slope*i + 13*r) % m
}

// mix returns bits that look random (the finalizer of SplitMix64: Steele, Lea and Flood, 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// of returns the pattern of the input of rank r. If values are moved and not reduced, r may be any number
// that identifies a block.
func (in inputs) of(r int) pattern {
	return in.build(func(i int) float64 { return float64(in.value(i, r)) })
}

// reduced returns the pattern of the result of the reduction over all ranks.
func (in inputs) reduced() pattern {
	p := in.build(func(i int) float64 {
		acc := float64(in.value(i, 0))
		for r := 1; r < in.n; r++ {
			v := float64(in.value(i, r))
			switch in.op {
			case tensor.Min:
				acc = min(acc, v)
			case tensor.Max:
				acc = max(acc, v)
			case tensor.Product:
				acc *= v
			default:
				acc += v
			}
		}
		if in.op.IsAverage() {
			acc /= float64(in.n)
		}
		return acc
	})
	if in.op.IsAverage() && in.dt.IsFloat() {
		p.ulps = 2 // 1/n is rounded, and then the product with it is rounded
	}
	return p
}

// build returns the pattern whose element i is value(i), for one period.
func (in inputs) build(value func(i int) float64) pattern {
	p := pattern{dt: in.dt, period: make([]byte, in.period()*in.dt.Size())}
	for i := range in.period() {
		put(p.period[i*in.dt.Size():], in.dt, value(i))
	}
	return p
}

// put stores v in b as an element of type dt. Integer types truncate v.
func put(b []byte, dt tensor.DType, v float64) {
	switch dt {
	case tensor.Uint8:
		b[0] = uint8(int64(v))
	case tensor.Int8:
		tensor.View[int8](b[:1])[0] = int8(int64(v))
	case tensor.Uint16:
		tensor.View[uint16](b[:2])[0] = uint16(int64(v))
	case tensor.Int16:
		tensor.View[int16](b[:2])[0] = int16(int64(v))
	case tensor.Int32:
		tensor.View[int32](b[:4])[0] = int32(int64(v))
	case tensor.Int64:
		tensor.View[int64](b[:8])[0] = int64(v)
	case tensor.Float16:
		tensor.View[half.Float16](b[:2])[0] = half.Float16FromFloat32(float32(v))
	case tensor.BFloat16:
		tensor.View[half.BFloat16](b[:2])[0] = half.BFloat16FromFloat32(float32(v))
	case tensor.Float32:
		tensor.View[float32](b[:4])[0] = float32(v)
	case tensor.Float64:
		tensor.View[float64](b[:8])[0] = v
	case tensor.Bool:
		b[0] = 0
		if v != 0 {
			b[0] = 1
		}
	}
}

// get returns an element as a float64. That is exact for all values of a pattern.
func get(b []byte, dt tensor.DType) float64 {
	switch dt {
	case tensor.Float16:
		return float64(tensor.View[half.Float16](b[:2])[0].Float32())
	case tensor.BFloat16:
		return float64(tensor.View[half.BFloat16](b[:2])[0].Float32())
	case tensor.Float32:
		return float64(tensor.View[float32](b[:4])[0])
	case tensor.Float64:
		return tensor.View[float64](b[:8])[0]
	case tensor.Int8:
		return float64(tensor.View[int8](b[:1])[0])
	case tensor.Uint16:
		return float64(tensor.View[uint16](b[:2])[0])
	case tensor.Int16:
		return float64(tensor.View[int16](b[:2])[0])
	case tensor.Int32:
		return float64(tensor.View[int32](b[:4])[0])
	case tensor.Int64:
		return float64(tensor.View[int64](b[:8])[0])
	}
	return float64(b[0])
}

// from returns the pattern that begins at element i of p.
func (p pattern) from(i int64) pattern {
	at := int(i%int64(len(p.period)/p.dt.Size())) * p.dt.Size()
	p.period = append(bytes.Clone(p.period[at:]), p.period[:at]...)
	return p
}

// fill fills buf with the pattern p, which begins at the start of buf.
func (p pattern) fill(buf []byte) {
	for n := copy(buf, p.period); n < len(buf); {
		n += copy(buf[n:], buf[:n]) // all copies except the last are whole periods
	}
}

// wrong returns how many elements of buf differ from the pattern, and a description of the first wrong
// element.
func (p pattern) wrong(buf []byte) (count int64, first string) {
	size := p.dt.Size()
	for at := 0; at < len(buf); at += len(p.period) {
		part := buf[at:min(at+len(p.period), len(buf))]
		if bytes.Equal(part, p.period[:len(part)]) {
			continue
		}
		for i := 0; i < len(part); i += size {
			if p.accepts(part[i:i+size], p.period[i:i+size]) {
				continue
			}
			if count == 0 {
				first = fmt.Sprintf("element %d is %v, want %v", (at+i)/size, get(part[i:], p.dt),
					get(p.period[i:], p.dt))
			}
			count++
		}
	}
	return count, first
}

// accepts reports whether the element got equals want, within the tolerance of the pattern.
func (p pattern) accepts(got, want []byte) bool {
	if bytes.Equal(got, want) {
		return true
	}
	if p.ulps == 0 {
		return false
	}
	w := get(want, p.dt)
	// The unit in the last place of w is at most |w| times the distance from 1 to the next greater number,
	// unit(p.dt).
	return math.Abs(get(got, p.dt)-w) <= float64(p.ulps)*math.Abs(w)*unit(p.dt)
}

// unit returns the distance from 1 to the next greater number of type dt.
func unit(dt tensor.DType) float64 {
	switch dt {
	case tensor.Float16:
		return 0x1p-10
	case tensor.BFloat16:
		return 0x1p-7
	case tensor.Float32:
		return 0x1p-23
	}
	return 0x1p-52
}

// prepareInput fills buf with the input of rank r, one of n ranks, for the operation s. It returns the
// expected result: a pattern for each block.
func prepareInput(s opSpec, r, n int, buf []byte) (want []pattern) {
	in := inputs{s.dt, s.op, n}
	count := int(s.count) * s.dt.Size()
	switch s.kind {
	case message.Allreduce:
		in.of(r).fill(buf)
		return []pattern{in.reduced()}
	case message.Broadcast:
		in.of(r).fill(buf)
		return []pattern{in.of(s.root)}
	case message.Reducescatter:
		in.of(r).fill(buf)
		return []pattern{in.reduced().from(int64(r) * s.count)}
	case message.Allgather:
		mine := buf
		if s.inPlace {
			clear(buf)
			mine = buf[r*count : (r+1)*count]
		}
		in.of(r).fill(mine)
		for i := range n {
			want = append(want, in.of(i))
		}
	case message.Alltoall:
		for i := range n {
			in.of(r*n + i).fill(buf[i*count : (i+1)*count])
			want = append(want, in.of(i*n+r))
		}
	}
	return want
}

// wrongBlocks compares each block of buf with its pattern in want. Each block has numBytes bytes. It returns
// how many elements are wrong, and a description of the first wrong element. If buf has another size than the
// blocks together, all elements are wrong.
func wrongBlocks(buf []byte, want []pattern, numBytes int) (count int64, first string) {
	if len(want) > 0 && len(buf) != len(want)*numBytes {
		return int64(len(want) * numBytes / want[0].dt.Size()),
			fmt.Sprintf("the result has %d bytes, want %d", len(buf), len(want)*numBytes)
	}
	for i, p := range want {
		n, text := p.wrong(buf[i*numBytes : (i+1)*numBytes])
		if count == 0 && n > 0 {
			first = fmt.Sprintf("block %d: %s", i, text)
		}
		count += n
	}
	return count, first
}
