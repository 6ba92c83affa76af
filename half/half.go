// Package half implements the two 16-bit floating-point types, float16 and bfloat16.
//
// They are for storing and sending numbers. To compute with them, widen them to float32, which is exact, and
// round the result back. Both types are structs, so that code with an operator such as + or < does not
// compile. The operator == compares bits: -0 is not equal to +0, and a NaN is equal to itself.
package half

import (
	"math"
	"strconv"
)

// Float16 is the binary16 format of IEEE 754: 1 sign bit, 5 exponent bits, 10 fraction bits. Its largest
// number is 65504, its smallest normal number 2^-14, and its smallest number 2^-24. The zero value is +0.
type Float16 struct{ bits uint16 }

// BFloat16 is the upper half of a float32: 1 sign bit, 8 exponent bits, 7 fraction bits. It has the range of
// a float32, and its smallest number is 2^-133. The zero value is +0.
type BFloat16 struct{ bits uint16 }

// Float16FromBits returns the Float16 with the given bits.
func Float16FromBits(bits uint16) Float16 { return Float16{bits} }

// BFloat16FromBits returns the BFloat16 with the given bits.
func BFloat16FromBits(bits uint16) BFloat16 { return BFloat16{bits} }

// Bits returns the bits of h.
func (h Float16) Bits() uint16 { return h.bits }

// Bits returns the bits of h.
func (h BFloat16) Bits() uint16 { return h.bits }

// String formats h as strconv formats a float32: with the fewest digits that distinguish it from other
// float32s.
func (h Float16) String() string { return format(h.Float32()) }

// String formats h as strconv formats a float32: with the fewest digits that distinguish it from other
// float32s.
func (h BFloat16) String() string { return format(h.Float32()) }

func format(f float32) string { return strconv.FormatFloat(float64(f), 'g', -1, 32) }

// These are parts of a float32.
const (
	absMask  = 1<<31 - 1
	expMask  = 0xff << 23
	expOne   = 1 << 23 // the lowest bit of the exponent
	quietBit = 1 << 22
)

// These are differences between float32 and float16.
const (
	fractionShift = 23 - 10
	biasShift     = (127 - 15) * expOne
	minNormal16   = (127 - 14) * expOne // the bits of 2^-14 as a float32
	beyond16      = (127 + 16) * expOne // the bits of 2^16 as a float32
)

// The conversions below compute several values and select one, so that compilers can use conditional moves
// instead of branches. So data with zeros and small numbers at random positions causes no mispredicted
// branches.

// Float32 returns h as a float32, which is exact. A NaN keeps its sign and payload.
func (h Float16) Float32() float32 {
	u := uint32(h.bits&0x7fff) << fractionShift
	v := u + biasShift
	// Zero and subnormals lack the implicit 1 before the fraction. v+expOne has that 1, and the subtraction
	// removes its value.
	subnormal := math.Float32bits(math.Float32frombits(v+expOne) - 0x1p-14)
	if u < expOne {
		v = subnormal
	}
	if u >= 31*expOne {
		v |= expMask // infinity or NaN
	}
	return math.Float32frombits(v | uint32(h.bits>>15)<<31)
}

// Float32 returns h as a float32, which is exact. A NaN keeps all its bits.
func (h BFloat16) Float32() float32 { return math.Float32frombits(uint32(h.bits) << 16) }

// Float16FromFloat32 returns f rounded to nearest, ties to even. Magnitudes from 65520 on become infinity. A
// NaN becomes a quiet NaN with the sign and the upper payload bits of f.
func Float16FromFloat32(f float32) Float16 {
	b := math.Float32bits(f)
	abs := b & absMask
	// The addend is a power of two that is 2^13 times as large as f. So the last bit of the sum as a float32
	// has the value of the last bit of f as a float16, and the addition rounds. The fraction is then in the
	// lowest bits, below the implicit 1 of normal numbers. That 1, and a carry, increment the exponent. 2^16
	// becomes infinity.
	x := min(abs, beyond16)
	exp := max(x&expMask, minNormal16)
	sum := math.Float32bits(math.Float32frombits(x) + math.Float32frombits(exp+fractionShift*expOne))
	v := (exp-minNormal16)>>fractionShift + sum&0xfff
	if abs > expMask {
		v = 0x7e00 | abs>>fractionShift&0x3ff
	}
	return Float16{uint16(b>>16&0x8000 | v)}
}

// BFloat16FromFloat32 returns f rounded to nearest, ties to even. Magnitudes from 2^128 - 2^119 on become
// infinity. A NaN becomes a quiet NaN with the sign and the upper payload bits of f.
func BFloat16FromFloat32(f float32) BFloat16 {
	b := math.Float32bits(f)
	// The addition rounds up with its carry, which may go into the exponent and make an infinity.
	v := b + 0x7fff + b>>16&1
	if b&absMask > expMask {
		v = b | quietBit
	}
	return BFloat16{uint16(v >> 16)}
}
