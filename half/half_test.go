package half_test

import (
	"math"
	"math/rand/v2"
	"sort"
	"strconv"
	"testing"

	"github.com/gohvd/gohvd/half"
)

// format describes one of the two types, by functions that work on its bits.
type format struct {
	name          string
	exp, fraction int // number of bits of the exponent and of the fraction
	round         func(float32) uint16
	widen         func(uint16) float32
	print         func(uint16) string
}

var formats = []format{
	{
		"float16", 5, 10,
		func(f float32) uint16 { return half.Float16FromFloat32(f).Bits() },
		func(b uint16) float32 { return half.Float16FromBits(b).Float32() },
		func(b uint16) string { return half.Float16FromBits(b).String() },
	},
	{
		"bfloat16", 8, 7,
		func(f float32) uint16 { return half.BFloat16FromFloat32(f).Bits() },
		func(b uint16) float32 { return half.BFloat16FromBits(b).Float32() },
		func(b uint16) string { return half.BFloat16FromBits(b).String() },
	},
}

// inf returns the bits of +Inf.
func (f format) inf() uint16 { return uint16(1<<f.exp-1) << f.fraction }

// value returns the number that the bits encode in IEEE 754, computed from the exponent and the fraction. For
// infinity, it returns the number that the next larger exponent would encode, because rounding treats
// infinity like that number.
func (f format) value(bits uint16) float64 {
	exp, fraction := int(bits&0x7fff)>>f.fraction, float64(bits&(1<<f.fraction-1))
	if exp > 0 {
		fraction += float64(int(1) << f.fraction)
	} else {
		exp = 1
	}
	bias := 1<<(f.exp-1) - 1
	v := math.Ldexp(fraction, exp-bias-f.fraction)
	if bits>>15 == 1 {
		return -v
	}
	return v
}

// values returns all values from 0 to infinity in ascending order.
func (f format) values() []float64 {
	var all []float64
	for bits := range f.inf() + 1 {
		all = append(all, f.value(bits))
	}
	return all
}

// nearest returns the bits of the element of values that is nearest to x. If two elements are equally near,
// nearest chooses the even one.
func nearest(values []float64, x float64) uint16 {
	var sign uint16
	if math.Signbit(x) {
		sign = 0x8000
	}
	x = math.Abs(x)
	above := min(sort.SearchFloat64s(values, x), len(values)-1)
	if above == 0 {
		return sign
	}
	up, down := values[above]-x, x-values[above-1]
	if down < up || down == up && above%2 == 1 {
		above--
	}
	return sign | uint16(above)
}

func each(t *testing.T, test func(t *testing.T, f format)) {
	for _, f := range formats {
		t.Run(f.name, func(t *testing.T) { test(t, f) })
	}
}

// Each of the 65536 bit patterns is widened to the float32 with the same value.
func TestWiden(t *testing.T) {
	each(t, func(t *testing.T, f format) {
		for i := range 1 << 16 {
			bits := uint16(i)
			got, abs := f.widen(bits), bits&0x7fff
			switch {
			case abs == f.inf():
				if sign := 1 - 2*int(bits>>15); !math.IsInf(float64(got), sign) {
					t.Fatalf("%04x is %v, want infinity of sign %d", bits, got, sign)
				}
			case abs > f.inf():
				payload := uint32(abs-f.inf()) << (23 - f.fraction)
				if got == got || math.Float32bits(got)&(1<<22-1) != payload&(1<<22-1) ||
					math.Float32bits(got)>>31 != uint32(bits>>15) {
					t.Fatalf("%04x is %08x, want a NaN of its sign and payload", bits, math.Float32bits(got))
				}
			default:
				if want := f.value(bits); float64(got) != want ||
					math.Signbit(float64(got)) != (bits>>15 == 1) {
					t.Fatalf("%04x is %v, want %v", bits, got, want)
				}
			}
		}
	})
}

func TestRoundTrip(t *testing.T) {
	each(t, func(t *testing.T, f format) {
		quiet := uint16(1) << (f.fraction - 1)
		for i := range 1 << 16 {
			bits := uint16(i)
			want := bits
			if bits&0x7fff > f.inf() {
				want |= quiet
			}
			if got := f.round(f.widen(bits)); got != want {
				t.Fatalf("%04x comes back as %04x, want %04x", bits, got, want)
			}
		}
	})
}

func (f format) check(t *testing.T, values []float64, x float32) {
	if x != x {
		return
	}
	if got, want := f.round(x), nearest(values, float64(x)); got != want {
		t.Fatalf("%v (%08x) is rounded to %04x, want %04x", x, math.Float32bits(x), got, want)
	}
}

// Every float32 is rounded to the nearest number, ties to even. The test covers every number of the 16-bit
// type, the middle between every two neighbours, and the float32s next to all of these.
func TestRoundBoundaries(t *testing.T) {
	each(t, func(t *testing.T, f format) {
		inf := float32(math.Inf(1))
		values := f.values()
		for i, low := range values[:len(values)-1] {
			high := values[i+1]
			for _, x := range []float32{float32(low), float32(low + (high-low)/2)} {
				for _, y := range []float32{x, math.Nextafter32(x, inf), math.Nextafter32(x, -inf)} {
					f.check(t, values, y)
					f.check(t, values, -y)
				}
			}
		}
	})
}

func TestRoundRandom(t *testing.T) {
	n := 1 << 18
	if testing.Short() {
		n >>= 3
	}
	each(t, func(t *testing.T, f format) {
		r := rand.New(rand.NewPCG(1, 2))
		values := f.values()
		for range n {
			f.check(t, values, math.Float32frombits(r.Uint32()))
			// This number is in the range of float16, which few of the random float32s above are.
			f.check(t, values, float32(math.Ldexp(r.Float64()*2-1, r.IntN(44)-27)))
		}
	})
}

func TestRoundNaN(t *testing.T) {
	each(t, func(t *testing.T, f format) {
		quiet := uint16(1) << (f.fraction - 1)
		for _, payload := range []uint32{1, 1 << 12, 1 << 13, 1 << 15, 1 << 16, 1<<22 - 1, 1 << 22, 1<<23 - 1,
			0x2aaaaa, 0x555555} {
			for _, sign := range []uint32{0, 1} {
				x := math.Float32frombits(sign<<31 | 0xff<<23 | payload)
				want := uint16(sign<<15) | f.inf() | uint16(payload>>(23-f.fraction)) | quiet
				if got := f.round(x); got != want {
					t.Errorf("%08x is rounded to %04x, want %04x", math.Float32bits(x), got, want)
				}
			}
		}
	})
}

// The numbers in the doc comments of the two types are right.
func TestKnown(t *testing.T) {
	for _, c := range []struct {
		f    format
		in   float32
		bits uint16
	}{
		{formats[0], 1, 0x3c00},
		{formats[0], 65504, 0x7bff},
		{formats[0], math.Nextafter32(65520, 0), 0x7bff},
		{formats[0], 65520, 0x7c00},
		{formats[0], 0x1p-14, 0x0400},
		{formats[0], 0x1p-24, 0x0001},
		{formats[0], 0x1p-25, 0x0000},
		{formats[0], -0x1p-149, 0x8000},
		{formats[1], 1, 0x3f80},
		{formats[1], 0x1p-126, 0x0080},
		{formats[1], 0x1p-133, 0x0001},
		{formats[1], 0x1p-134, 0x0000},
		{formats[1], math.Nextafter32(0x1p127+(0x1p127-0x1p119), 0), 0x7f7f},
		{formats[1], 0x1p127 + (0x1p127 - 0x1p119), 0x7f80},
	} {
		if got := c.f.round(c.in); got != c.bits {
			t.Errorf("%s of %v is %04x, want %04x", c.f.name, c.in, got, c.bits)
		}
	}
}

func TestString(t *testing.T) {
	each(t, func(t *testing.T, f format) {
		for _, x := range []float32{0, float32(math.Copysign(0, -1)), 1.5, -0.25, float32(math.Inf(-1)),
			float32(math.NaN())} {
			want := strconv.FormatFloat(float64(x), 'g', -1, 32)
			if got := f.print(f.round(x)); got != want {
				t.Errorf("%s prints as %q, want %q", f.name, got, want)
			}
		}
	})
}

func BenchmarkConvert(b *testing.B) {
	for _, f := range formats {
		r := rand.New(rand.NewPCG(1, 2))
		wide, bits := make([]float32, 4096), make([]uint16, 4096)
		for i := range wide {
			wide[i] = float32(r.NormFloat64())
			bits[i] = f.round(wide[i])
		}
		b.Run("widen/"+f.name, func(b *testing.B) {
			b.SetBytes(int64(2 * len(bits)))
			for b.Loop() {
				for i, h := range bits {
					wide[i] = f.widen(h)
				}
			}
		})
		b.Run("round/"+f.name, func(b *testing.B) {
			b.SetBytes(int64(2 * len(bits)))
			for b.Loop() {
				for i, x := range wide {
					bits[i] = f.round(x)
				}
			}
		})
	}
}
