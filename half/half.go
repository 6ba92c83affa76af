// Package half implements the two 16-bit floating-point types, float16 and bfloat16.
//
// They are for storing and sending numbers. To compute with them, convert them to float32, which is exact,
// and round the result back. Both types are structs, so that code with an operator such as + or < does not
// compile. The operator == compares bits: -0 is not equal to +0, and a NaN is equal to itself.
package half

import (
	"math"
	"strconv"
)

// Float16 is the binary16 format of IEEE 754: 1 sign bit, 5 exponent bits, 10 fraction bits. Its largest
// number is 65504, its smallest positive normal number is 2^-14, and its smallest positive number is 2^-24.
// The zero value is +0.
type Float16 struct{ bits uint16 }

// BFloat16 is the upper half of a float32: 1 sign bit, 8 exponent bits, 7 fraction bits. It has the range of
// a float32, and its smallest positive number is 2^-133. The zero value is +0.
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

// Parts of the bits of a float32.
const (
	absMask  = 1<<31 - 1
	expMask  = 0xff << 23
	expOne   = 1 << 23 // the lowest bit of the exponent
	quietBit = 1 << 22
)

// Differences between the formats of float32 and float16.
const (
	fractionShift = 23 - 10
	biasShift     = (127 - 15) * expOne
	minNormal16   = (127 - 14) * expOne // the bits of 2^-14 as a float32
	beyond16      = (127 + 16) * expOne // the bits of 2^16 as a float32
)

// The conversions below compute several values and select one of them. Compilers can use conditional moves
// for that instead of branches, so that zeros and small numbers at random positions cause no mispredicted
// branches.

// Float32 converts h to a float32, which is exact. A NaN keeps its sign and payload.
func (h Float16) Float32() float32 {
	u := uint32(h.bits&0x7fff) << fractionShift
	v := u + biasShift
	// Zero and subnormal numbers have no implicit 1 before the fraction. The float32 with the bits v+expOne
	// has one, so the subtraction removes the value of that 1.
	subnormal := math.Float32bits(math.Float32frombits(v+expOne) - 0x1p-14)
	if u < expOne {
		v = subnormal
	}
	if u >= 31*expOne {
		v |= expMask // infinity or NaN
	}
	return math.Float32frombits(v | uint32(h.bits>>15)<<31)
}

// Float32 converts h to a float32, which is exact. A NaN keeps all its bits.
func (h BFloat16) Float32() float32 { return math.Float32frombits(uint32(h.bits) << 16) }

// Float16FromFloat32 rounds f to the nearest Float16, ties to even. Magnitudes of 65520 and more become
// infinity. A NaN becomes a quiet NaN with the sign and the upper payload bits of f.
func Float16FromFloat32(f float32) Float16 {
	b := math.Float32bits(f)
	abs := b & absMask
	// Round by adding a power of two that is 2^13 times as large as the leading bit of f, or as 2^-14 if that
	// is larger. The last bit of the sum as a float32 then has the weight of the last bit of the result as a
	// float16, so the addition rounds. The low bits of the sum hold the rounded significand, with the leading
	// 1 of a normal number. When they are added, that 1 and any carry increment the exponent. f is clamped to
	// 2^16, which becomes infinity.
	x := min(abs, beyond16)
	exp := max(x&expMask, minNormal16)
	sum := math.Float32bits(math.Float32frombits(x) + math.Float32frombits(exp+fractionShift*expOne))
	v := (exp-minNormal16)>>fractionShift + sum&0xfff
	if abs > expMask {
		v = 0x7e00 | abs>>fractionShift&0x3ff
	}
	return Float16{uint16(b>>16&0x8000 | v)}
}

// BFloat16FromFloat32 rounds f to the nearest BFloat16, ties to even. Magnitudes of 2^128 - 2^119 and more
// become infinity. A NaN becomes a quiet NaN with the sign and the upper payload bits of f.
func BFloat16FromFloat32(f float32) BFloat16 {
	b := math.Float32bits(f)
	// The addition rounds by its carry. The carry may reach the exponent and turn the number into infinity.
	v := b + 0x7fff + b>>16&1
	if b&absMask > expMask {
		v = b | quietBit
	}
	return BFloat16{uint16(v >> 16)}
}
