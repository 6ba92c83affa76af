package main

import (
	"fmt"
	"math"
	"slices"
)

// vectors is the access to whole vectors of elements of size bytes.
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

// logic is a bitwise instruction, of which AVX-512 has one for each size of element.
func (l level) logic(name string) string {
	if l.masks {
		return name + "D"
	}
	return name
}

// reduction is dst = a op b, nil if there is no such operation.
func reduction(l level, e elem, op string) *kernel {
	if l == avx512 && !e.half() && !(op == "product" && e.size == 1) {
		l = narrow
	}
	k := &kernel{name: op + e.name + l.name, level: l, in: []int{e.size, e.size}, out: e.size, unit: l.size / e.size, unroll: 4}
	k.load, k.store = vectors(l, e.size)
	switch {
	case e == bools:
		reduceBools(k, op)
		if k.compute == nil {
			return nil
		}
	case e.half() && (op == "min" || op == "max"):
		firstHalf(k, e, op)
	case e == float16:
		throughFloat32(k, op)
	case e == bfloat16:
		roundedBFloat16(k, op)
	case e == float32s || e == float64s:
		reduceFloats(k, e, op)
	case op == "product" && e.size == 1:
		multiplyBytes(k)
	case op == "product" && e == int64s && !l.masks:
		multiplyInt64s(k)
	case op != "sum" && op != "product" && e == int64s && !l.masks:
		firstInt64(k, op)
	default:
		single(k, integerInstruction(e, op))
	}
	return k
}

// single is a = a op b where there is an instruction for it.
func single(k *kernel, instruction string) {
	k.fused = instruction
	k.compute = func(w *writer, r int) {
		a, b := k.level.full(r), k.level.full(r+b)
		w.op(instruction, b, a, a)
	}
}

func integerInstruction(e elem, op string) string {
	letter := map[int]string{1: "B", 2: "W", 4: "D", 8: "Q"}[e.size]
	switch op {
	case "sum":
		return "VPADD" + letter
	case "product":
		return "VPMULL" + letter
	}
	sign := "U"
	if e.signed() {
		sign = "S"
	}
	return map[string]string{"min": "VPMIN", "max": "VPMAX"}[op] + sign + letter
}

// reduceBools: with 1 every byte but 0 becomes 1.
func reduceBools(k *kernel, op string) {
	one := k.level.constant(0)
	k.setup = func(w *writer) { w.broadcast(k.level, 0x01010101, one) }
	first := map[string]string{"min": "VPMINUB", "max": "VPMAXUB"}[op]
	if first == "" {
		return
	}
	k.compute = func(w *writer, r int) {
		a, b := k.level.full(r), k.level.full(r+b)
		w.op(first, b, a, a)
		w.op("VPMINUB", k.level.full(one), a, a)
	}
}

// multiplyBytes multiplies words, even bytes in place and odd ones shifted.
func multiplyBytes(k *kernel) {
	l := k.level
	and, andNot, or := l.logic("VPAND"), l.logic("VPANDN"), l.logic("VPOR")
	low := l.constant(0)
	k.setup = func(w *writer) { w.broadcast(l, 0x00ff00ff, low) }
	k.compute = func(w *writer, r int) {
		a, b, low, even := l.full(r), l.full(r+b), l.full(low), l.full(t)
		w.op("VPMULLW", b, a, even)
		w.op(and, low, even, even)
		w.op("VPSRLW", 8, a, a)
		w.op(andNot, b, low, b)
		w.op("VPMULLW", b, a, a)
		w.op(or, even, a, a)
	}
}

// multiplyInt64s adds to the product of the low halves those of low and high ones, whose upper bits drop out.
func multiplyInt64s(k *kernel) {
	l := k.level
	k.compute = func(w *writer, r int) {
		a, b, cross, other := l.full(r), l.full(r+b), l.full(t), l.full(t+1)
		w.op("VPSHUFD", 0xb1, b, cross)
		w.op("VPMULLD", cross, a, cross)
		w.op("VPSRLQ", 32, cross, other)
		w.op("VPADDD", other, cross, cross)
		w.op("VPSLLQ", 32, cross, cross)
		w.op("VPMULUDQ", b, a, a)
		w.op("VPADDQ", cross, a, a)
	}
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

// reduceFloats: of a NaN, or of zeros, VMIN and VMAX give the second operand. So min is done both ways round, and what
// has come out joined: a NaN and any bits are a NaN, -0 and +0 are -0. For max the zeros want AND, and then the NaNs are
// put in.
func reduceFloats(k *kernel, e elem, op string) {
	l := k.level
	suffix := "PS"
	if e.size == 8 {
		suffix = "PD"
	}
	switch op {
	case "sum":
		single(k, "VADD"+suffix)
	case "product":
		single(k, "VMUL"+suffix)
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

// Predicates of VCMP.
const (
	unordered        = 0x03
	notEqual         = 0x04 // or unordered
	greaterThanQuiet = 0x1e
	notLessQuiet     = 0x1d // greater or equal
)

// setOnes sets to ones the elements, of size bytes, that mask has: a NaN. The mask is a vector or a mask register.
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

// throughFloat32 widens float16s, both halves of a vector, and rounds the results.
//
// To add it multiplies with 1 and adds, which rounds once, to the same bits: AMD's Zen adds where it converts, and
// multiplies elsewhere.
func throughFloat32(k *kernel, op string) {
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
			a, b := l.full(x[0]), l.full(x[1])
			if op == "sum" {
				w.op("VFMADD213PS", b, l.full(one), a)
			} else {
				w.op("VMULPS", b, a, a)
			}
		}
		roundFloat16s(w, l, r)
	}
}

// roundFloat16s rounds the float32s in t and t+1 to the vector r.
func roundFloat16s(w *writer, l level, r int) {
	w.op("VCVTPS2PH", 0, l.full(t), l.half(t))
	w.op("VCVTPS2PH", 0, l.full(t+1), l.half(t+1))
	joinHalves(w, l, t, t+1, r)
}

// upperHalf copies the upper half of a vector to the lower one of another.
func upperHalf(w *writer, l level, from, to int) {
	if l.size == 64 {
		w.op("VEXTRACTI64X4", 1, l.full(from), l.half(to))
	} else {
		w.op("VEXTRACTI128", 1, l.full(from), l.half(to))
	}
}

// joinHalves makes a vector of the lower halves of two.
func joinHalves(w *writer, l level, lower, upper, to int) {
	if l.size == 64 {
		w.op("VINSERTI64X4", 1, l.half(upper), l.full(lower), l.full(to))
	} else {
		w.op("VINSERTI128", 1, l.half(upper), l.full(lower), l.full(to))
	}
}

// roundedBFloat16 computes with the odd elements where they are, for their bits are the upper half of a float32, and
// with the even ones shifted.
//
// NaNs come out of an operation with a quiet bit, and of bfloat16s with nothing in the lower half, that could carry.
func roundedBFloat16(k *kernel, op string) {
	l := k.level
	instruction := map[string]string{"sum": "VADDPS", "product": "VMULPS"}[op]
	k.setup = func(w *writer) { bfloat16Constants(w, l) }
	upper := l.full(l.constant(2))
	k.compute = func(w *writer, r int) {
		a, b, even, other := l.full(r), l.full(r+b), l.full(t), l.full(t+1)
		w.op("VPSLLD", 16, a, even)
		w.op("VPSLLD", 16, b, other)
		w.op(instruction, other, even, even)
		w.op(l.logic("VPAND"), upper, a, a)
		w.op(l.logic("VPAND"), upper, b, b)
		w.op(instruction, b, a, a)
		joinBFloat16s(w, l, r)
	}
}

// bfloat16Constants sets what rounding needs: the last bit that stays, when it is shifted; just below half of that; the
// upper half of a float32.
func bfloat16Constants(w *writer, l level) {
	w.broadcast(l, 1, l.constant(0))
	w.broadcast(l, 0x7fff, l.constant(1))
	w.broadcast(l, 0xffff0000, l.constant(2))
}

// joinBFloat16s rounds the float32s in t, the even elements, and r, the odd ones, to the vector r. None is a NaN with
// bits in the lower half.
func joinBFloat16s(w *writer, l level, r int) {
	a, even := l.full(r), l.full(t)
	roundUpper(w, l, l.size, t, t+1)
	roundUpper(w, l, l.size, r, t+1)
	w.op("VPSRLD", 16, even, even)
	if l.masks {
		w.op("VPTERNLOGD", 0xea, even, l.full(l.constant(2)), a) // a AND constant OR even
	} else {
		w.op("VPBLENDW", 0xaa, a, even, a)
	}
}

// roundUpper rounds float32s, to nearest even, to what their upper halves can have. It leaves something in the lower.
// The vector, and tmp, has size bytes.
func roundUpper(w *writer, l level, size, r, tmp int) {
	x, bit := reg(size, r), reg(size, tmp)
	w.op("VPSRLD", 16, x, bit)
	w.op(l.logic("VPAND"), reg(size, l.constant(0)), bit, bit)
	w.op("VPADDD", reg(size, l.constant(1)), x, x)
	w.op("VPADDD", bit, x, x)
}

// firstHalf orders halves as signed integers, for which those of negative numbers are turned over. That puts the NaNs
// at both ends; added to, or subtracted from, they are all at the one that wins.
func firstHalf(k *kernel, e elem, op string) {
	l := k.level
	nans := uint32(0x03ff) // as many positive ones as negative
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

// scaling is dst = src · factor, nil if there is none. The factor, and the product with an element of an integer type,
// is not a NaN.
func scaling(l level, e elem) *kernel {
	if !slices.Contains(floats, e) {
		if e != int64s {
			return throughFloat64(l, e, false)
		}
		if l.masks {
			return scaleInt64s()
		}
		return nil // no conversion between int64 and float64
	}
	if l == avx512 && !e.half() {
		l = narrow
	}
	k := &kernel{
		name: "scale" + e.name + l.name, level: l, in: []int{e.size}, out: e.size, unit: l.size / e.size, unroll: 4, factor: true,
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

// throughFloat64 is dst = src · factor, within the type's bounds, or src / factor, truncated, for an integer type of at
// most 32 bits. A quotient is then further from the whole number above it than a float64 rounds, and it has no bounds:
// factor is at least 1.
func throughFloat64(l level, e elem, divide bool) *kernel {
	name := "scale"
	if divide {
		name = "divide"
	}
	k := &kernel{
		name: name + e.name + l.name, level: l, in: []int{e.size}, out: e.size, unit: l.size / 4, unroll: 2, factor: true,
	}
	factor, lowest, highest := l.constant(0), l.constant(1), l.constant(2)
	k.setup = func(w *writer) {
		w.op("VBROADCASTSD", "factor+24(FP)", l.full(factor))
		if !divide {
			w.broadcast64(l, math.Float64bits(e.lowest), lowest)
			w.broadcast64(l, math.Float64bits(e.highest), highest)
		}
	}
	k.load, k.store = int32s(l, e)
	k.compute = func(w *writer, r int) {
		upperHalf(w, l, r, t+1)
		w.op("VCVTDQ2PD", l.half(r), l.full(t))
		w.op("VCVTDQ2PD", l.half(t+1), l.full(t+1))
		for _, x := range []int{t, t + 1} {
			x := l.full(x)
			if divide {
				w.op("VDIVPD", l.full(factor), x, x)
				continue
			}
			w.op("VMULPD", l.full(factor), x, x)
			w.op("VMAXPD", l.full(lowest), x, x)
			w.op("VMINPD", l.full(highest), x, x)
		}
		truncate := "VCVTTPD2DQ"
		if !l.masks {
			truncate = "VCVTTPD2DQY"
		}
		w.op(truncate, l.full(t), l.half(t))
		w.op(truncate, l.full(t+1), l.half(t+1))
		joinHalves(w, l, t, t+1, r)
		if !l.masks && e.size < 4 {
			packInt32s(w, e, r)
		}
	}
	return k
}

// int32s is the access to elements of a type of at most 32 bits as int32s.
func int32s(l level, e elem) (load, store access) {
	load, store = vectors(l, 4)
	if e.size == 4 {
		return load, store
	}
	extend := "VPMOVZX"
	if e.signed() {
		extend = "VPMOVSX"
	}
	letter := map[int]string{1: "B", 2: "W"}[e.size]
	load = func(w *writer, r int, mem string, masked bool) {
		if masked {
			w.op(extend+letter+"D.Z", mem, "K1", l.full(r))
		} else {
			w.op(extend+letter+"D", mem, l.full(r))
		}
	}
	store = func(w *writer, r int, mem string, masked bool) {
		switch {
		case masked:
			w.op("VPMOVD"+letter, l.full(r), "K1", mem)
		case l.masks:
			w.op("VPMOVD"+letter, l.full(r), mem)
		case e.size == 2:
			w.op("VMOVDQU", reg(16, r), mem)
		default:
			w.op("VMOVQ", reg(16, r), mem)
		}
	}
	return load, store
}

// packInt32s narrows the int32s of a vector, which are within the type's bounds, to its lowest bytes.
func packInt32s(w *writer, e elem, r int) {
	x, upper := reg(16, r), reg(16, t)
	upperHalf(w, avx2, r, t)
	if e.size == 2 && !e.signed() {
		w.op("VPACKUSDW", upper, x, x)
		return
	}
	w.op("VPACKSSDW", upper, x, x)
	if e.size == 1 && e.signed() {
		w.op("VPACKSSWB", x, x, x)
	} else if e.size == 1 {
		w.op("VPACKUSWB", x, x, x)
	}
}

// scaleInt64s: below the least int64 the conversion gives that, and so it does above the highest.
func scaleInt64s() *kernel {
	l := avx512
	k := &kernel{name: "scaleInt64" + l.name, level: l, in: []int{8}, out: 8, unit: 8, unroll: 4, factor: true}
	k.load, k.store = vectors(l, 8)
	factor, beyond, highest := l.full(l.constant(0)), l.full(l.constant(1)), l.full(l.constant(2))
	k.setup = func(w *writer) {
		w.op("VBROADCASTSD", "factor+24(FP)", factor)
		w.broadcast64(l, math.Float64bits(0x1p63), l.constant(1))
		w.broadcast64(l, math.MaxInt64, l.constant(2))
	}
	k.compute = func(w *writer, r int) {
		x := l.full(r)
		w.op("VCVTQQ2PD", x, x)
		w.op("VMULPD", factor, x, x)
		w.op("VCMPPD", notLessQuiet, beyond, x, "K2")
		w.op("VCVTTPD2QQ", x, x)
		w.op("VMOVDQA64", highest, "K2", x)
	}
	return k
}

// conversion is dst = src in another floating-point type. In registers there are float32s, in vectors of half the size
// if one of the types is float64.
func conversion(l level, to, from elem) *kernel {
	size := l.size
	if to == float64s || from == float64s {
		size /= 2
	}
	k := &kernel{
		name: "convert" + from.name + "To" + to.name + l.name, level: l, in: []int{from.size}, out: to.size, unit: size / 4, unroll: 4,
	}
	k.setup = func(w *writer) {
		if to == bfloat16 {
			bfloat16Constants(w, l)
		}
		if from == float64s && to.half() && !l.masks {
			w.broadcast64(l, 1<<63-1, l.constant(3))
		}
		if from == float64s && to.half() && l.masks {
			w.broadcast(l, 1, l.constant(3))
		}
	}
	k.load = func(w *writer, r int, mem string, masked bool) {
		name, to := "VMOVUPS", reg(size, r)
		switch from {
		case float16:
			name = "VCVTPH2PS"
		case bfloat16:
			name = "VPMOVZXWD"
		case float64s:
			name, to = "VMOVUPD", l.full(r)
		}
		if masked {
			w.op(name+".Z", mem, "K1", to)
		} else {
			w.op(name, mem, to)
		}
	}
	k.compute = func(w *writer, r int) {
		x := reg(size, r)
		switch {
		case from == bfloat16:
			w.op("VPSLLD", 16, x, x)
		case from == float64s && to == float32s:
			roundFloat64s(w, l, "", r, r)
		case from == float64s && l.masks:
			truncateToOdd(w, r)
		case from == float64s:
			roundToOdd(w, r)
		}
		switch to {
		case float64s:
			w.op("VCVTPS2PD", x, l.full(r))
		case bfloat16:
			nan := reg(size, t+1)
			if l.masks {
				nan = "K2"
			}
			w.op("VCMPPS", unordered, x, x, nan)
			roundUpper(w, l, size, r, t)
			setOnes(w, 4, nan, x)
			w.op("VPSRLD", 16, x, x)
			if !l.masks && size == 32 {
				upperHalf(w, l, r, t)
				w.op("VPACKUSDW", reg(16, t), reg(16, r), reg(16, r))
			} else if !l.masks {
				w.op("VPACKUSDW", x, x, x)
			}
		}
	}
	k.store = func(w *writer, r int, mem string, masked bool) {
		x := reg(size, r)
		operands := []any{x}
		name := "VMOVUPS"
		switch {
		case to == float16:
			name, operands = "VCVTPS2PH", []any{0, x}
		case to == bfloat16 && l.masks:
			name = "VPMOVDW"
		case to == bfloat16 && size == 32:
			operands = []any{reg(16, r)}
		case to == bfloat16:
			name = "VMOVQ"
		case to == float64s:
			name, operands = "VMOVUPD", []any{l.full(r)}
		}
		if masked {
			operands = append(operands, "K1")
		}
		w.op(name, append(operands, mem)...)
	}
	return k
}

// roundFloat64s rounds a vector of float64s to one of half the size of float32s, to nearest even or as mode says.
func roundFloat64s(w *writer, l level, mode string, from, to int) {
	name := "VCVTPD2PS"
	if !l.masks {
		name = "VCVTPD2PSY"
	}
	w.op(name+mode, l.full(from), l.half(to))
}

// truncateToOdd rounds float64s to odd float32s: toward zero, and if that is not exact the last bit is set. It is
// roundToOdd of the package.
func truncateToOdd(w *writer, r int) {
	l := avx512
	roundFloat64s(w, l, ".RZ_SAE", r, t)
	w.op("VCVTPS2PD", l.half(t), l.full(t+1))
	w.op("VCMPPD", notEqual, l.full(r), l.full(t+1), "K2")
	w.op("VPORD", l.half(l.constant(3)), l.half(t), "K2", l.half(t))
	w.op("VMOVDQA64", l.full(t), l.full(r))
}

// roundToOdd is truncateToOdd where there is no rounding toward zero: what was rounded away from it goes down by one.
func roundToOdd(w *writer, r int) {
	l := avx2
	x, abs := l.full(r), l.full(l.constant(3))
	near, wide, inexact := l.half(t), l.full(t+1), l.full(r+b)
	roundFloat64s(w, l, "", r, t)
	w.op("VCVTPS2PD", near, wide)
	w.op("VCMPPD", notEqual, x, wide, inexact)
	w.op("VANDPD", abs, x, x)
	w.op("VANDPD", abs, wide, wide)
	w.op("VCMPPD", greaterThanQuiet, x, wide, wide)
	for _, mask := range []int{t + 1, r + b} {
		upperHalf(w, l, mask, r)
		w.op("VSHUFPS", 0x88, l.half(r), l.half(mask), l.half(mask))
	}
	w.op("VPADDD", l.half(t+1), near, near)
	w.op("VPSRLD", 31, l.half(r+b), l.half(r+b))
	w.op("VPOR", l.half(r+b), near, l.half(r))
}
