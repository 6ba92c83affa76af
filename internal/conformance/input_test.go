package conformance

import (
	"math"

	"github.com/gohvd/gohvd/internal/tensor"
)

// hash mixes numbers into 64 pseudorandom bits. After each number it applies the finalizer of splitmix64.
func hash(numbers ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, n := range numbers {
		h += n + 0x9e3779b97f4a7c15
		h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
		h = (h ^ h>>27) * 0x94d049bb133111eb
		h ^= h >> 31
	}
	return h
}

// fraction maps h to a number in [0, 1) with 53 random bits, as many as the significand of a float64 has.
func fraction(h uint64) float64 { return float64(h>>11) / (1 << 53) }

// source determines the inputs of all members. Element i of member m is a function of the source, m and i.
type source struct {
	dt   tensor.DType
	op   tensor.ReduceOp // NoReduce if elements are moved and not reduced
	seed uint64
	// wild adds extreme numbers to the inputs: the largest and the smallest number, infinities, NaNs, and
	// zeros of both signs.
	wild bool
}

// normal returns s with the same op for all reductions that use the same inputs, so that these inputs are
// computed only once.
func (s source) normal() source {
	if s.op != tensor.NoReduce && s.op != tensor.Product && s.op != tensor.Adasum ||
		s.op != tensor.NoReduce && !s.dt.IsFloat() {
		s.op = tensor.Sum
	}
	return s
}

// bytes returns the input of member m.
func (s source) bytes(m, elements int) []byte {
	switch {
	case elements == 0:
		return nil
	case s.op == tensor.NoReduce:
		return s.raw(m, elements*s.dt.Size())
	case s.dt.IsFloat():
		v := make([]float64, elements)
		for i := range v {
			v[i] = formats[s.dt].round(s.float(m, i))
		}
		return encodeFloats(s.dt, v)
	default:
		v := make([]int64, elements)
		for i := range v {
			v[i] = s.int(m, i)
		}
		return encodeInts(s.dt, v)
	}
}

// raw returns n pseudorandom bytes. For bools, each byte is 0 or 1.
func (s source) raw(m, n int) []byte {
	b := make([]byte, n)
	var h uint64
	for i := range b {
		if h >>= 8; i%8 == 0 {
			h = hash(s.seed, uint64(m), uint64(i))
		}
		b[i] = byte(h)
		if s.dt == tensor.Bool {
			b[i] &= 1
		}
	}
	return b
}

// int returns a small number. If s is wild, one number in eight is the smallest of the type, one in eight is
// the largest, and the remaining numbers are any numbers of the type.
func (s source) int(m, i int) int64 {
	h := hash(s.seed, uint64(m), uint64(i))
	lo, hi := limits(s.dt)
	switch {
	case s.dt == tensor.Bool:
		// One member in four gets the opposite value. If the bools were random and independent, the minimum
		// would nearly always be false and the maximum nearly always true.
		x := int64(i & 1)
		if h%4 == 0 {
			x = 1 - x
		}
		return x
	case s.wild && h%8 == 0:
		return lo
	case s.wild && h%8 == 1:
		return hi
	case s.wild:
		return wrap(s.dt, int64(h>>3))
	default:
		return wrap(s.dt, int64(h%41)-20)
	}
}

// float returns a number of ordinary size that is not yet rounded to the type. For sums it is below 8, and
// for products it is near 1, so that results neither overflow nor underflow. For Adasum the vectors have a
// common part, because otherwise all factors of Adasum would be near 1.
func (s source) float(m, i int) float64 {
	h := hash(s.seed, uint64(m), uint64(i))
	sign := float64(int(h&1)*2 - 1)
	if s.wild && s.op != tensor.Adasum && i%4 == 3 {
		return s.edge(m, i/4)
	}
	switch s.op {
	case tensor.Product:
		return sign * (0.75 + fraction(h)/2)
	case tensor.Adasum:
		common := fraction(hash(s.seed, math.MaxUint64, uint64(i))) - 0.5
		return common + (fraction(h)-0.5)*float64(1+m%3)
	default:
		return sign * (1 + fraction(h)) * power(int(h>>1%6)-4)
	}
}

// edge returns a number for which an implementation is likely to be wrong. The numbers are chosen so that the
// result does not depend on the order of additions, even if sums overflow or if there are infinities of both
// signs.
func (s source) edge(m, i int) float64 {
	f := formats[s.dt]
	// true for at most one member, which is one of the first four
	special := uint64(m) == hash(s.seed, uint64(i))%4
	pick := func(x, others float64) float64 {
		if special {
			return x
		}
		return others
	}
	negativeZero := math.Copysign(0, -1)
	switch i % 9 {
	case 0:
		return pick(math.NaN(), 1)
	case 1:
		return pick(math.Inf(1), -2)
	case 2:
		return pick(math.Inf(1), math.Inf(-1))
	case 3:
		return negativeZero
	case 4:
		return pick(0, negativeZero)
	case 5:
		return pick(-f.largest, 0)
	case 6:
		return f.largest
	case 7:
		return f.tiny()
	default:
		return pick(math.NaN(), math.Inf(-1))
	}
}
