// Package half has the two 16-bit floating-point types: float16 and bfloat16.
//
// They are for storing and sending numbers. To compute with them widen them to float32, which is exact, and round the
// result back. The types are structs, so that an operator that would add or compare bits does not compile; == compares
// bits, by which -0 is not +0, and a NaN is equal to itself.
package half

import (
	"math"
	"strconv"
)

// Float16 is binary16 of IEEE 754: 1 bit of sign, 5 of exponent, 10 of fraction. Its largest number is 65504, its
// smallest normal one 2^-14, and its smallest 2^-24. The zero value is +0.
type Float16 struct{ bits uint16 }

// BFloat16 is the upper half of a float32: 1 bit of sign, 8 of exponent, 7 of fraction. It has the range of a float32
// and subnormal numbers down to 2^-133. The zero value is +0.
type BFloat16 struct{ bits uint16 }

// Float16FromBits returns the number that is stored as bits.
func Float16FromBits(bits uint16) Float16 { return Float16{bits} }

// BFloat16FromBits returns the number that is stored as bits.
func BFloat16FromBits(bits uint16) BFloat16 { return BFloat16{bits} }

// Bits returns h as it is stored.
func (h Float16) Bits() uint16 { return h.bits }

// Bits returns h as it is stored.
func (h BFloat16) Bits() uint16 { return h.bits }

// String formats h as strconv does a float32: the fewest digits that name it among the float32s.
func (h Float16) String() string { return format(h.Float32()) }

// String formats h as strconv does a float32: the fewest digits that name it among the float32s.
func (h BFloat16) String() string { return format(h.Float32()) }

func format(f float32) string { return strconv.FormatFloat(float64(f), 'g', -1, 32) }

// Parts of a float32.
const (
	absMask  = 1<<31 - 1
	expMask  = 0xff << 23
	expOne   = 1 << 23 // the lowest bit of the exponent
	quietBit = 1 << 22
)

// Differences between float32 and float16.
const (
	fractionShift = 23 - 10
	biasShift     = (127 - 15) * expOne
	minNormal16   = (127 - 14) * expOne // 2^-14 as a float32
	beyond16      = (127 + 16) * expOne // 2^16 as a float32
)

// The conversions below choose between values that are there already, for which compilers have instructions that do
// not jump: data in which zeros and small numbers come at random costs no mispredicted branches.

// Float32 returns h, exactly. A NaN keeps its sign and payload.
func (h Float16) Float32() float32 {
	u := uint32(h.bits&0x7fff) << fractionShift
	v := u + biasShift
	// Zero and subnormals lack the 1 before the fraction: here it is added, and taken away as the number it is.
	subnormal := math.Float32bits(math.Float32frombits(v+expOne) - 0x1p-14)
	if u < expOne {
		v = subnormal
	}
	if u >= 31*expOne {
		v |= expMask // infinity or NaN
	}
	return math.Float32frombits(v | uint32(h.bits>>15)<<31)
}

// Float32 returns h, exactly. A NaN keeps all its bits.
func (h BFloat16) Float32() float32 { return math.Float32frombits(uint32(h.bits) << 16) }

// Float16FromFloat32 returns f, rounded to nearest, ties to even. From 65520 on it is infinite. A NaN becomes a quiet NaN
// with its sign and the top of its payload.
func Float16FromFloat32(f float32) Float16 {
	b := math.Float32bits(f)
	abs := b & absMask
	// Beside a power of two that is 2^13 times the size of f, the last bit of a float32 is worth as much as the last bit
	// of f as a float16: so the addition rounds, and the fraction is in the lowest bits, below the 1 that normal numbers
	// have before it. That 1, and a carry, count up the exponent. 2^16 comes out as infinity.
	x := min(abs, beyond16)
	exp := max(x&expMask, minNormal16)
	sum := math.Float32bits(math.Float32frombits(x) + math.Float32frombits(exp+fractionShift*expOne))
	v := (exp-minNormal16)>>fractionShift + sum&0xfff
	if abs > expMask {
		v = 0x7e00 | abs>>fractionShift&0x3ff
	}
	return Float16{uint16(b>>16&0x8000 | v)}
}

// BFloat16FromFloat32 returns f, rounded to nearest, ties to even. From 2^128 - 2^119 on it is infinite. A NaN becomes a
// quiet NaN with its sign and the top of its payload.
func BFloat16FromFloat32(f float32) BFloat16 {
	b := math.Float32bits(f)
	// The carry of an addition rounds up, into the exponent and to infinity too.
	v := b + 0x7fff + b>>16&1
	if b&absMask > expMask {
		v = b | quietBit
	}
	return BFloat16{uint16(v >> 16)}
}
