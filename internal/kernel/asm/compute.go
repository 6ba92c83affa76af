package main

import (
	"fmt"
	"math"
)

// vectors returns the functions that load and store vectors with elements of size bytes.
func vectors(l level, size int) (load, store access) {
	move := "VMOVDQU"
	if l.masks {
		move = fmt.Sprintf("VMOVDQU%d", 8*size)
	}
	load = func(w *writer, r int, mem string, masked bool) {
		if masked {
			w.op(move+".Z", mem, "K1", l.full(r))
		} else {
			w.op(move, mem, l.full(r))
		}
	}
	store = func(w *writer, r int, mem string, masked bool) {
		if masked {
			w.op(move, l.full(r), "K1", mem)
		} else {
			w.op(move, l.full(r), mem)
		}
	}
	return load, store
}

// logic returns the name of a bitwise instruction at this level. In AVX-512 the name ends with the element
// size.
func (l level) logic(name string) string {
	if l.masks {
		return name + "D"
	}
	return name
}

// reduction returns the kernel that computes dst = a op b.
func reduction(l level, e elem, op string) *kernel {
	if l == avx512 && !e.half() {
		l = narrow
	}
	k := &kernel{name: op + e.name + l.name, level: l, in: []int{e.size, e.size}, out: e.size,
		unit: l.size / e.size, unroll: 4}
	k.load, k.store = vectors(l, e.size)
	switch {
	case e.half() && op != "sum":
		firstHalf(k, e, op)
	case e == float16:
		addFloat16(k)
	case e == bfloat16:
		addBFloat16(k)
	case e == float32s || e == float64s:
		reduceFloats(k, e, op)
	case op != "sum" && e == int64s && !l.masks:
		firstInt64(k, op)
	default:
		single(k, integerInstruction(e, op))
	}
	return k
}

// single makes k compute a = a op b with one instruction.
func single(k *kernel, instruction string) {
	k.fused = instruction
	k.compute = func(w *writer, r int) {
		a, b := k.level.full(r), k.level.full(r+b)
		w.op(instruction, b, a, a)
	}
}

func integerInstruction(e elem, op string) string {
	letter := map[elem]string{uint8s: "B", int32s: "D", int64s: "Q"}[e]
	if op == "sum" {
		return "VPADD" + letter
	}
	sign := "S"
	if e == uint8s {
		sign = "U"
	}
	return map[string]string{"min": "VPMIN", "max": "VPMAX"}[op] + sign + letter
}

func firstInt64(k *kernel, op string) {
	l := k.level
	k.compute = func(w *writer, r int) {
		a, b, greater := l.full(r), l.full(r+b), l.full(t)
		w.op("VPCMPGTQ", b, a, greater)
		if op == "min" {
			w.op("VBLENDVPD", greater, b, a, a)
		} else {
			w.op("VBLENDVPD", greater, a, b, a)
		}
	}
}

// reduceFloats makes k reduce floats with op. If an operand is a NaN or both are zeros, VMIN and VMAX return
// the second operand. So the kernel computes min with both orders of the operands and combines the results
// with OR: a NaN combined with any bits is a NaN, and -0 combined with +0 is -0. For max the zeros need AND,
// and the NaNs are set afterwards.
func reduceFloats(k *kernel, e elem, op string) {
	l := k.level
	suffix := "PS"
	if e.size == 8 {
		suffix = "PD"
	}
	switch op {
	case "sum":
		single(k, "VADD"+suffix)
	case "min":
		k.compute = func(w *writer, r int) {
			a, b, other := l.full(r), l.full(r+b), l.full(t)
			w.op("VMIN"+suffix, b, a, other)
			w.op("VMIN"+suffix, a, b, a)
			w.op("VOR"+suffix, other, a, a)
		}
	case "max":
		k.compute = func(w *writer, r int) {
			a, b, other, nan := l.full(r), l.full(r+b), l.full(t), l.full(t+1)
			if l.masks {
				nan = "K2"
			}
			w.op("VCMP"+suffix, unordered, b, a, nan)
			w.op("VMAX"+suffix, b, a, other)
			w.op("VMAX"+suffix, a, b, a)
			w.op("VAND"+suffix, other, a, a)
			setOnes(w, e.size, nan, a)
		}
	}
}

// unordered is the predicate of VCMP that is true if an operand is a NaN.
const unordered = 0x03

// setOnes sets the elements of r that mask selects to all ones, which is a NaN. Elements have size bytes.
// mask is a vector register or a mask register.
func setOnes(w *writer, size int, mask, r string) {
	switch {
	case mask[0] != 'K':
		w.op("VORPS", mask, r, r)
	case size == 8:
		w.op("VPTERNLOGQ", 0xff, r, r, mask, r)
	default:
		w.op("VPTERNLOGD", 0xff, r, r, mask, r)
	}
}

// addFloat16 makes k widen both halves of the float16 vectors, add them as float32s and round the sums.
//
// It adds with a fused multiply-add that multiplies by 1. This rounds once, so it gives the same bits as an
// addition. It is faster on AMD's Zen, which adds on the same units that convert, but multiplies on other
// units.
func addFloat16(k *kernel) {
	l := k.level
	one := l.constant(0)
	k.setup = func(w *writer) { w.broadcast(l, math.Float32bits(1), one) }
	k.compute = func(w *writer, r int) {
		upperHalf(w, l, r, t+1)
		upperHalf(w, l, r+b, t+2)
		w.op("VCVTPH2PS", l.half(r), l.full(t))
		w.op("VCVTPH2PS", l.half(t+1), l.full(t+1))
		w.op("VCVTPH2PS", l.half(r+b), l.full(r+b))
		w.op("VCVTPH2PS", l.half(t+2), l.full(t+2))
		for _, x := range [][2]int{{t, r + b}, {t + 1, t + 2}} {
			w.op("VFMADD213PS", l.full(x[1]), l.full(one), l.full(x[0]))
		}
		roundFloat16s(w, l, r)
	}
}

// roundFloat16s rounds the float32s in t and t+1 to float16s in register r.
func roundFloat16s(w *writer, l level, r int) {
	w.op("VCVTPS2PH", 0, l.full(t), l.half(t))
	w.op("VCVTPS2PH", 0, l.full(t+1), l.half(t+1))
	joinHalves(w, l, t, t+1, r)
}

// upperHalf copies the upper half of one register, from, to the lower half of another register, to.
func upperHalf(w *writer, l level, from, to int) {
	if l.size == 64 {
		w.op("VEXTRACTI64X4", 1, l.full(from), l.half(to))
	} else {
		w.op("VEXTRACTI128", 1, l.full(from), l.half(to))
	}
}

// joinHalves joins the lower halves of two registers. The result is stored in a third register, to: its lower
// half comes from lower, and its upper half comes from upper.
func joinHalves(w *writer, l level, lower, upper, to int) {
	if l.size == 64 {
		w.op("VINSERTI64X4", 1, l.half(upper), l.full(lower), l.full(to))
	} else {
		w.op("VINSERTI128", 1, l.half(upper), l.full(lower), l.full(to))
	}
}

// addBFloat16 makes k add bfloat16s as float32s. The bits of a bfloat16 are the upper half of a float32, so
// the odd elements are added in place, and the even elements are shifted first.
//
// Resulting NaNs are quiet, and NaNs that come from bfloat16s have zeros in the lower half. So rounding does
// not carry into the upper half.
func addBFloat16(k *kernel) {
	l := k.level
	k.setup = func(w *writer) { bfloat16Constants(w, l) }
	upper := l.full(l.constant(2))
	k.compute = func(w *writer, r int) {
		a, b, even, other := l.full(r), l.full(r+b), l.full(t), l.full(t+1)
		w.op("VPSLLD", 16, a, even)
		w.op("VPSLLD", 16, b, other)
		w.op("VADDPS", other, even, even)
		w.op(l.logic("VPAND"), upper, a, a)
		w.op(l.logic("VPAND"), upper, b, b)
		w.op("VADDPS", b, a, a)
		joinBFloat16s(w, l, r)
	}
}

// bfloat16Constants sets the constants for rounding: the last bit that remains after the shift, which is 1;
// the number just below half of the last bit of the result; and the mask of the upper half of a float32.
func bfloat16Constants(w *writer, l level) {
	w.broadcast(l, 1, l.constant(0))
	w.broadcast(l, 0x7fff, l.constant(1))
	w.broadcast(l, 0xffff0000, l.constant(2))
}

// joinBFloat16s rounds the float32s in t (even elements) and r (odd elements) to bfloat16s in register r.
// None of the float32s may be a NaN with bits in its lower half.
func joinBFloat16s(w *writer, l level, r int) {
	a, even := l.full(r), l.full(t)
	roundUpper(w, l, t, t+1)
	roundUpper(w, l, r, t+1)
	w.op("VPSRLD", 16, even, even)
	if l.masks {
		w.op("VPTERNLOGD", 0xea, even, l.full(l.constant(2)), a) // a AND constant OR even
	} else {
		w.op("VPBLENDW", 0xaa, a, even, a)
	}
}

// roundUpper rounds float32s to nearest even, so that their upper halves are the bfloat16s. Afterwards the
// lower halves are undefined.
func roundUpper(w *writer, l level, r, tmp int) {
	x, bit := l.full(r), l.full(tmp)
	w.op("VPSRLD", 16, x, bit)
	w.op(l.logic("VPAND"), l.full(l.constant(0)), bit, bit)
	w.op("VPADDD", l.full(l.constant(1)), x, x)
	w.op("VPADDD", bit, x, x)
}

// firstHalf makes k compute min or max of half-precision elements. It inverts the bits of negative numbers
// and then compares the elements as signed integers. In this order the NaNs are at both ends. Adding or
// subtracting their number wraps them to the end that wins.
func firstHalf(k *kernel, e elem, op string) {
	l := k.level
	nans := uint32(0x03ff) // the number of positive NaNs, and also of negative NaNs
	if e == bfloat16 {
		nans = 0x007f
	}
	count := l.constant(0)
	k.setup = func(w *writer) { w.broadcast(l, nans<<16|nans, count) }
	collect, spread, first := "VPADDW", "VPSUBW", "VPMINSW"
	if op == "max" {
		collect, spread, first = "VPSUBW", "VPADDW", "VPMAXSW"
	}
	turnOver := func(w *writer, r int) {
		w.op("VPSRAW", 15, l.full(r), l.full(t))
		w.op("VPSRLW", 1, l.full(t), l.full(t))
		w.op(l.logic("VPXOR"), l.full(t), l.full(r), l.full(r))
	}
	k.compute = func(w *writer, r int) {
		a, b := l.full(r), l.full(r+b)
		for _, x := range []int{r, r + 4} {
			turnOver(w, x)
			w.op(collect, l.full(count), l.full(x), l.full(x))
		}
		w.op(first, b, a, a)
		w.op(spread, l.full(count), a, a)
		turnOver(w, r)
	}
}

// scaling returns the kernel that computes dst = src · factor.
func scaling(l level, e elem) *kernel {
	if l == avx512 && !e.half() {
		l = narrow
	}
	k := &kernel{
		name: "scale" + e.name + l.name, level: l, in: []int{e.size}, out: e.size, unit: l.size / e.size,
		unroll: 4, factor: true,
	}
	k.load, k.store = vectors(l, e.size)
	factor := l.constant(3)
	k.setup = func(w *writer) {
		if e == float64s {
			w.op("VBROADCASTSD", "factor+24(FP)", l.full(factor))
			return
		}
		w.op("VMOVSD", "factor+24(FP)", reg(16, t))
		w.op("VCVTSD2SS", reg(16, t), reg(16, t), reg(16, t))
		w.op("VBROADCASTSS", reg(16, t), l.full(factor))
		if e == bfloat16 {
			bfloat16Constants(w, l)
		}
	}
	k.compute = func(w *writer, r int) {
		a, factor := l.full(r), l.full(factor)
		switch e {
		case float64s:
			w.op("VMULPD", factor, a, a)
		case float32s:
			w.op("VMULPS", factor, a, a)
		case float16:
			upperHalf(w, l, r, t+1)
			w.op("VCVTPH2PS", l.half(r), l.full(t))
			w.op("VCVTPH2PS", l.half(t+1), l.full(t+1))
			w.op("VMULPS", factor, l.full(t), l.full(t))
			w.op("VMULPS", factor, l.full(t+1), l.full(t+1))
			roundFloat16s(w, l, r)
		case bfloat16:
			w.op("VPSLLD", 16, a, l.full(t))
			w.op("VMULPS", factor, l.full(t), l.full(t))
			w.op(l.logic("VPAND"), l.full(l.constant(2)), a, a)
			w.op("VMULPS", factor, a, a)
			joinBFloat16s(w, l, r)
		}
	}
	return k
}

// conversion returns a kernel that converts between a half-precision type and float32. The caller sets load,
// compute and store. A register holds the elements as float32s.
func conversion(name string, l level, to, from elem) *kernel {
	return &kernel{name: name + l.name, level: l, in: []int{from.size}, out: to.size, unit: l.size / 4,
		unroll: 4}
}

// widening returns the kernel that widens the elements of a half-precision type to float32.
func widening(l level, from elem) *kernel {
	k := conversion("widen"+from.name, l, float32s, from)
	_, k.store = vectors(l, 4)
	name := map[elem]string{float16: "VCVTPH2PS", bfloat16: "VPMOVZXWD"}[from]
	k.load = func(w *writer, r int, mem string, masked bool) {
		if masked {
			w.op(name+".Z", mem, "K1", l.full(r))
		} else {
			w.op(name, mem, l.full(r))
		}
	}
	k.compute = func(w *writer, r int) {
		if from == bfloat16 {
			w.op("VPSLLD", 16, l.full(r), l.full(r))
		}
	}
	return k
}

// narrowing returns the kernel that rounds float32s to a half-precision type.
func narrowing(l level, to elem) *kernel {
	k := conversion("narrow"+to.name, l, to, float32s)
	k.load, _ = vectors(l, 4)
	k.setup = func(w *writer) {
		if to == bfloat16 {
			bfloat16Constants(w, l)
		}
	}
	k.compute = func(w *writer, r int) {
		if to == float16 {
			return // the store rounds
		}
		x, nan := l.full(r), l.full(t+1)
		if l.masks {
			nan = "K2"
		}
		w.op("VCMPPS", unordered, x, x, nan)
		roundUpper(w, l, r, t)
		setOnes(w, 4, nan, x)
		w.op("VPSRLD", 16, x, x)
		if !l.masks {
			upperHalf(w, l, r, t)
			w.op("VPACKUSDW", l.half(t), l.half(r), l.half(r))
		}
	}
	k.store = func(w *writer, r int, mem string, masked bool) {
		name, operands := "VMOVDQU", []any{l.half(r)}
		if to == float16 {
			name, operands = "VCVTPS2PH", []any{0, l.full(r)}
		} else if l.masks {
			name, operands = "VPMOVDW", []any{l.full(r)}
		}
		if masked {
			operands = append(operands, "K1")
		}
		w.op(name, append(operands, mem)...)
	}
	return k
}
