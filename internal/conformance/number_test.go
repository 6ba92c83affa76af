package conformance

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

// format is a binary floating-point format whose numbers are all float64 numbers too.
type format struct {
	precision int // the number of bits of the significand, including the bit before the point
	least     int // an exponent: the smallest positive number is 2^least
	largest   float64
}

var formats = [...]format{
	tensor.Float16:  {precision: 11, least: -24, largest: 65504},
	tensor.BFloat16: {precision: 8, least: -133, largest: 0x1.fep127},
	tensor.Float32:  {precision: 24, least: -149, largest: 0x1.fffffep127},
	tensor.Float64:  {precision: 53, least: -1074, largest: 0x1.fffffffffffffp1023},
}

// unit returns the unit roundoff, which is the largest relative error of rounding to f.
func (f format) unit() float64 { return power(-f.precision) }

// tiny returns the smallest positive number of f.
func (f format) tiny() float64 { return math.Ldexp(1, f.least) }

// float64 has numbers 2^e with 52 bits after the point for e from minExponent to maxExponent.
const minExponent, maxExponent = -1022, 1023

// power returns 2^e, for e from minExponent to maxExponent. The tests call it for every element, and
// math.Ldexp takes several times as long.
func power(e int) float64 { return math.Float64frombits(uint64(e-minExponent+1) << 52) }

// exponent returns an e with 2^e <= |x| < 2^(e+1). It returns minExponent-1 for a number below the range of
// power, and maxExponent+1 for an infinity or a NaN.
func exponent(x float64) int { return int(math.Float64bits(x)>>52&0x7ff) + minExponent - 1 }

// round returns the number of f that is nearest to x. A tie is rounded to even. The method scales x so that
// the last place of f becomes 1, rounds to an integer, and scales back.
func (f format) round(x float64) float64 {
	exp := exponent(x)
	if f.precision == 53 || exp > maxExponent {
		return x // float64 has every x, and every format has infinities and NaNs
	}
	place := max(exp+1-f.precision, f.least)
	r := math.RoundToEven(x*power(-place)) * power(place)
	if math.Abs(r) > f.largest {
		return math.Inf(int(math.Copysign(1, x)))
	}
	return r
}

// bits16 returns the encoding of x in f, which must be a format with 16 bits.
func (f format) bits16(x float64) uint16 {
	fraction := f.precision - 1
	special := uint16(1)<<(15-fraction) - 1 // the exponent of infinities and NaNs
	var sign uint16
	if math.Signbit(x) {
		sign, x = 1<<15, -x
	}
	switch {
	case math.IsNaN(x):
		return sign | special<<fraction | 1<<(fraction-1)
	case math.IsInf(x, 0):
		return sign | special<<fraction
	}
	// The encoding of a subnormal number is the number divided by the smallest positive number. Each further
	// power of two adds one to the exponent.
	units := x * power(-f.least)
	more := max(0, exponent(units)-fraction)
	return sign | (uint16(more)<<fraction + uint16(units*power(-more)))
}

// from16 returns the number that bits encodes in f, which must be a format with 16 bits.
func (f format) from16(bits uint16) float64 {
	fraction := f.precision - 1
	special := uint16(1)<<(15-fraction) - 1
	exponent, units := bits&0x7fff>>fraction, float64(bits&(1<<fraction-1))
	var x float64
	switch {
	case exponent == special && units == 0:
		x = math.Inf(1)
	case exponent == special:
		return math.NaN()
	case exponent == 0:
		x = units * power(f.least)
	default:
		x = (units + power(fraction)) * power(f.least+int(exponent)-1)
	}
	if bits>>15 == 1 {
		x = -x
	}
	return x
}

// encodeFloats returns the encoding of the numbers in v as elements of type dt.
func encodeFloats(dt tensor.DType, v []float64) []byte {
	b := make([]byte, 0, len(v)*dt.Size())
	for _, x := range v {
		switch dt {
		case tensor.Float64:
			b = binary.NativeEndian.AppendUint64(b, math.Float64bits(x))
		case tensor.Float32:
			b = binary.NativeEndian.AppendUint32(b, math.Float32bits(float32(x)))
		default:
			b = binary.NativeEndian.AppendUint16(b, formats[dt].bits16(x))
		}
	}
	return b
}

// decodeFloats returns the numbers that the bytes encode. It is the inverse of encodeFloats.
func decodeFloats(dt tensor.DType, b []byte) []float64 {
	v := make([]float64, len(b)/dt.Size())
	for i := range v {
		switch dt {
		case tensor.Float64:
			v[i] = math.Float64frombits(binary.NativeEndian.Uint64(b[8*i:]))
		case tensor.Float32:
			v[i] = float64(math.Float32frombits(binary.NativeEndian.Uint32(b[4*i:])))
		default:
			v[i] = formats[dt].from16(binary.NativeEndian.Uint16(b[2*i:]))
		}
	}
	return v
}

// widths describes each integer type: the number of its bits, and whether it is signed. Bool counts as an
// integer type with the values 0 and 1.
var widths = [...]struct {
	bits   int
	signed bool
}{
	tensor.Uint8:  {8, false},
	tensor.Int8:   {8, true},
	tensor.Uint16: {16, false},
	tensor.Int16:  {16, true},
	tensor.Int32:  {32, true},
	tensor.Int64:  {64, true},
	tensor.Bool:   {8, false},
}

// limits returns the smallest and the largest number of an integer type.
func limits(dt tensor.DType) (lo, hi int64) {
	w := widths[dt]
	if w.signed {
		return math.MinInt64 >> (64 - w.bits), math.MaxInt64 >> (64 - w.bits)
	}
	return 0, 1<<w.bits - 1
}

// wrap returns the number of type dt that equals x modulo 2^n, where n is the number of bits of dt.
func wrap(dt tensor.DType, x int64) int64 {
	w := widths[dt]
	if w.signed {
		return x << (64 - w.bits) >> (64 - w.bits)
	}
	return x & (1<<w.bits - 1)
}

func encodeInts(dt tensor.DType, v []int64) []byte {
	b := make([]byte, 0, len(v)*dt.Size())
	for _, x := range v {
		switch dt.Size() {
		case 1:
			b = append(b, byte(x))
		case 2:
			b = binary.NativeEndian.AppendUint16(b, uint16(x))
		case 4:
			b = binary.NativeEndian.AppendUint32(b, uint32(x))
		default:
			b = binary.NativeEndian.AppendUint64(b, uint64(x))
		}
	}
	return b
}

func decodeInts(dt tensor.DType, b []byte) []int64 {
	v := make([]int64, len(b)/dt.Size())
	for i := range v {
		switch dt.Size() {
		case 1:
			v[i] = wrap(dt, int64(b[i]))
		case 2:
			v[i] = wrap(dt, int64(binary.NativeEndian.Uint16(b[2*i:])))
		case 4:
			v[i] = wrap(dt, int64(binary.NativeEndian.Uint32(b[4*i:])))
		default:
			v[i] = int64(binary.NativeEndian.Uint64(b[8*i:]))
		}
	}
	return v
}

// The formats of the reference encode known numbers, ties and limits as IEEE 754 does. Decoding and then
// encoding any 16 bits returns the same bits.
func TestFormats(t *testing.T) {
	for _, c := range []struct {
		dt   tensor.DType
		x    float64
		bits uint16
	}{
		{tensor.Float16, 1, 0x3c00}, {tensor.Float16, -2, 0xc000}, {tensor.Float16, 65504, 0x7bff},
		{tensor.Float16, 0x1p-24, 0x0001}, {tensor.Float16, 0x1p-14, 0x0400}, {tensor.Float16, 0.333251953125,
			0x3555},
		{tensor.BFloat16, 1, 0x3f80}, {tensor.BFloat16, -0.15625, 0xbe20},
		{tensor.BFloat16, 0x1p-133, 0x0001},
		{tensor.BFloat16, 0x1.fep127, 0x7f7f}, {tensor.BFloat16, math.Inf(-1), 0xff80},
	} {
		if got := formats[c.dt].bits16(c.x); got != c.bits {
			t.Errorf("%v %v is stored as %#04x, want %#04x", c.dt, c.x, got, c.bits)
		}
	}
	for _, c := range []struct {
		dt   tensor.DType
		x, y float64
	}{
		{tensor.Float16, 2049, 2048}, {tensor.Float16, 2051, 2052}, {tensor.Float16, 65519.9, 65504},
		{tensor.Float16, 65520, math.Inf(1)}, {tensor.Float16, 0x1p-25, 0},
		{tensor.Float16, 0x3p-25, 0x1p-23},
		{tensor.BFloat16, 257, 256}, {tensor.BFloat16, -259, -260},
		{tensor.BFloat16, 0x1.ffp127, math.Inf(1)},
		{tensor.Float32, 1 + 0x1p-24, 1}, {tensor.Float32, 1 + 0x3p-24, 1 + 0x1p-22},
		{tensor.Float32, 1e300, math.Inf(1)},
		{tensor.Float64, 0.1, 0.1}, {tensor.Float64, 5e-324, 5e-324},
	} {
		if got := formats[c.dt].round(c.x); got != c.y {
			t.Errorf("%v is rounded to %v %v, want %v", c.x, c.dt, got, c.y)
		}
	}
	for _, dt := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		f := formats[dt]
		for b := range 1 << 16 {
			x := f.from16(uint16(b))
			if math.IsNaN(x) {
				continue
			}
			if got := f.bits16(f.round(x)); got != uint16(b) {
				t.Fatalf("%v: bits %#04x are %v and then %#04x", dt, b, x, got)
			}
		}
	}
	for x := 1e-44; x < 1e38; x *= 1.37 { // Go's own conversion must give the same result
		if got := formats[tensor.Float32].round(x); got != float64(float32(x)) {
			t.Errorf("%v is rounded to float32 %v, want %v", x, got, float32(x))
		}
	}
}
