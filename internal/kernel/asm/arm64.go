package main

import (
	"bytes"
	"fmt"
	"go/format"
	"math/bits"
	"strconv"
	"strings"
)

// arm64 returns the assembly for NEON, and the Go file with the declarations of its functions.
func arm64() (code, decls string) {
	p := newProgram()
	reductions(p)
	scales(p)
	conversions(p)
	p.table()
	text, err := format.Source(p.decls.Bytes())
	if err != nil {
		panic(fmt.Sprintf("declarations for arm64: %v", err))
	}
	return p.text.String(), string(text)
}

// program collects the contents of the two files, and the rows for each field of the type functions in
// package kernel.
type program struct {
	text, decls                      bytes.Buffer
	reduces, scales, widens, narrows strings.Builder
}

func newProgram() *program {
	p := &program{}
	p.text.WriteString(header + "#include \"textflag.h\"\n")
	p.decls.WriteString(header + "package kernel\n\nimport \"github.com/gohvd/gohvd/internal/tensor\"\n")
	return p
}

// line writes an instruction of Go's assembler.
func (p *program) line(form string, args ...any) { fmt.Fprintf(&p.text, "\t"+form+"\n", args...) }

func (p *program) label(name string) { fmt.Fprintf(&p.text, "%s:\n", name) }

// suffixed returns the name of a function with the suffix of this level.
func suffixed(name string) string { return name + "NEON" }

// function begins a function without a stack frame. size is the size of its parameters in bytes.
func (p *program) function(name, params string, size int) {
	name = suffixed(name)
	fmt.Fprintf(&p.decls, "\n//go:noescape\nfunc %s(%s)\n", name, params)
	fmt.Fprintf(&p.text, "\n// func %s(%s)\nTEXT ·%s(SB), NOSPLIT, $0-%d\n", name, params, name, size)
}

// row adds a row to a field of the type functions: the function with the given name, for elements of type e.
// The 1 in the row is the smallest number of elements that the function may be called with.
func row(field *strings.Builder, e neon, name string) {
	fmt.Fprintf(field, "tensor.%s: {%s, 1},\n", e.name, suffixed(name))
}

// table writes the variable that lists the functions.
func (p *program) table() {
	fmt.Fprintln(&p.decls, "\nvar functionsNEON = functions{")
	fmt.Fprintf(&p.decls, "reduce: [numTypes]reductions[assembly[reduceAssembly]]{\n%s},\n",
		p.reduces.String())
	fmt.Fprintf(&p.decls, "scale: [numTypes]assembly[factorAssembly]{\n%s},\n", p.scales.String())
	fmt.Fprintf(&p.decls, "widen: [numTypes]assembly[convertAssembly]{\n%s},\n", p.widens.String())
	fmt.Fprintf(&p.decls, "narrow: [numTypes]assembly[convertAssembly]{\n%s},\n}\n", p.narrows.String())
}

// turnBytes is the number of bytes that a turn of the loop handles in a reduction or a scale: four registers.
const turnBytes = 4 * 16

// counter is the register that loop counts down. The registers before it hold the other arguments.
const counter = "R3"

// arguments loads the arguments of a function: the pointers into R0, R1 and so on, and the last argument, a
// number, into counter.
func (p *program) arguments(names ...string) {
	for i, name := range names {
		register := "R" + strconv.Itoa(i)
		if i == len(names)-1 {
			register = counter
		}
		p.line("MOVD %s+%d(FP), %s", name, 8*i, register)
	}
}

// bytes converts counter from a number of elements of e to a number of bytes.
func (p *program) bytes(e neon) {
	if e.size > 1 {
		p.line("LSL $%d, %s, %s", bits.TrailingZeros(uint(e.size)), counter, counter)
	}
}

// loop writes a loop that runs body(step) while counter is at least step. step is a power of two. After the
// loop it writes body(n) for each smaller power of two n, down to the parameter least. This code runs only if
// the bit with the value n is set in the rest of counter. step and least both count bytes, or both count
// elements.
func (p *program) loop(step, least int, body func(n int)) {
	p.line("SUBS $%d, %s, %s", step, counter, counter)
	p.line("BLT rest")
	p.label("loop")
	body(step)
	p.line("SUBS $%d, %s, %s", step, counter, counter)
	p.line("BGE loop")
	// counter is now the rest minus step. The lower bits of step are 0, so counter and the rest have the same
	// lower bits.
	p.label("rest")
	for n := step / 2; n >= least; n /= 2 {
		under := "under" + strconv.Itoa(n)
		p.line("TBZ $%d, %s, %s", bits.TrailingZeros(uint(n)), counter, under)
		body(n)
		p.label(under)
	}
	p.line("RET")
}

// neon is an element type and how NEON computes with it.
type neon struct {
	elem
	lanes lanes
	half  *half // nil if the type is not a half-precision type
	exact bool  // set if results need no rounding
}

var (
	neonUint8    = neon{elem: uint8s, lanes: b16}
	neonInt32    = neon{elem: int32s, lanes: s4}
	neonInt64    = neon{elem: int64s, lanes: d2}
	neonFloat32  = neon{elem: float32s, lanes: s4}
	neonFloat64  = neon{elem: float64s, lanes: d2}
	neonFloat16  = neon{elem: float16, lanes: h8, half: &halfFloat16}
	neonBFloat16 = neon{elem: bfloat16, lanes: h8, half: &halfBFloat16}
)

// half has functions that write the code for a half-precision type.
type half struct {
	// widen converts one half of the vector n to float32 and stores the result in d. It converts the lower
	// half if the parameter up is 0, and the upper half if up is 1.
	widen func(p *program, d, n vec, up uint32)
	// pack converts the float32s in v and v+1 to the half-precision type and stores them in d. If the field
	// round is not nil, the type must be able to represent them.
	pack func(p *program, d, v vec)
	// round rounds the float32s in v to values that pack accepts. The float32s must be results of arithmetic
	// on values of this type. round overwrites the register t. The field is nil if pack itself rounds.
	round func(p *program, v, t vec)
	// convert is like round, but v may hold any float32s.
	convert func(p *program, v, t vec)
}

var halfFloat16 = half{widen: (*program).widenFloat16, pack: (*program).packFloat16}

func (p *program) widenFloat16(d, n vec, up uint32) {
	p.word(0x0e217800|up<<30|uint32(n)<<5|uint32(d), "fcvtl%s v%d.4s, v%d.%s", suffix[up], d, n, half16[up])
}

func (p *program) packFloat16(d, v vec) {
	for up := range uint32(2) { // the lower half comes first, because storing to it clears the upper half
		n := uint32(v) + up
		p.word(0x0e216800|up<<30|n<<5|uint32(d), "fcvtn%s v%d.%s, v%d.4s", suffix[up], d, half16[up], n)
	}
}

// suffix is the suffix of an instruction for the lower or upper half of a register, in Arm's notation. half16
// is the name of the lanes of that half.
var (
	suffix = [2]string{"", "2"}
	half16 = [2]string{"4h", "8h"}
)

// halfBFloat16 has the functions for bfloat16, which is the upper half of a float32.
var halfBFloat16 = half{
	widen:   (*program).widenBFloat16,
	pack:    (*program).packBFloat16,
	round:   (*program).roundBFloat16,
	convert: (*program).convertBFloat16,
}

func (p *program) widenBFloat16(d, n vec, up uint32) {
	p.asm([...]string{"VZIP1", "VZIP2"}[up], h8, d, zero, n)
}

func (p *program) packBFloat16(d, v vec) { p.asm("VUZP2", h8, d, v, v+1) }

// roundBFloat16 rounds as package half does: the addition carries into the exponent, up to infinity. In a NaN
// it does not carry: if the NaN was a bfloat16, or is the result of arithmetic with bfloat16s, its lower half
// is zero.
func (p *program) roundBFloat16(v, t vec) {
	p.line("VUSHR $16, V%d.S4, V%d.S4", v, t)
	p.asm("VAND", b16, t, t, ones)
	p.asm("VADD", s4, v, v, bias)
	p.asm("VADD", s4, v, v, t)
}

// convertBFloat16 rounds any float32s, including NaNs with any bits. It makes NaNs quiet and then clears
// their lower half. Without the quiet bit, a NaN whose upper half has no payload would become an infinity.
func (p *program) convertBFloat16(v, t vec) {
	p.three("fmax", s4, v, v, v)
	p.three("fcmeq", s4, t, v, v)
	p.asm("VORR", b16, t, t, upper)
	p.asm("VAND", b16, v, v, t)
	p.roundBFloat16(v, t)
}

// constants writes the code that loads the constants for elements of type e into their registers.
func (p *program) constants(e neon) {
	if e.half == nil || e.half.round == nil {
		return
	}
	p.asm("VEOR", b16, zero, zero, zero)
	if !e.exact {
		p.fill(s4, ones, 1)
		p.fill(s4, bias, 1<<15-1)
	}
}

// reductions writes the reductions of all types.
func reductions(p *program) {
	add := func(l lanes, x, y vec) { p.asm("VADD", l, x, x, y) }
	p.reduction(neonUint8, add, p.instruction("umin"), p.instruction("umax"))
	p.reduction(neonInt32, add, p.instruction("smin"), p.instruction("smax"))
	p.reduction(neonInt64, add, func(l lanes, x, y vec) {
		p.three("cmgt", l, temp, x, y)
		p.asm("VBIT", b16, x, y, temp)
	}, func(l lanes, x, y vec) {
		p.three("cmgt", l, temp, y, x)
		p.asm("VBIT", b16, x, y, temp)
	})
	// FMIN and FMAX return a NaN if either operand is a NaN, and order -0 before +0.
	for _, e := range []neon{neonFloat16, neonBFloat16, neonFloat32, neonFloat64} {
		p.reduction(e, p.instruction("fadd"), p.instruction("fmin"), p.instruction("fmax"))
	}
}

// step writes the code that computes x = x op y.
type step func(l lanes, x, y vec)

// reduction writes the functions for sum, min and max of type e.
func (p *program) reduction(e neon, sum, min, max step) {
	fmt.Fprintf(&p.reduces, "tensor.%s: {\n", e.name)
	for _, of := range []struct {
		op   string
		step step
	}{{"sum", sum}, {"min", min}, {"max", max}} {
		e.exact = of.op != "sum"
		p.reduce(of.op, e, of.step)
		fmt.Fprintf(&p.reduces, "%s: assembly[reduceAssembly]{%s, 1},\n", of.op, suffixed(of.op+e.name))
	}
	fmt.Fprintln(&p.reduces, "},")
}

// instruction returns the step that consists of the instruction op.
func (p *program) instruction(op string) step {
	return func(l lanes, x, y vec) { p.three(op, l, x, x, y) }
}

// reduce writes the function that reduces elements of type e with step. Half-precision elements are widened
// to float32 first.
func (p *program) reduce(op string, e neon, step step) {
	p.function(op+e.name, "dst, a, b *byte, n int", 32)
	p.arguments("dst", "a", "b", "n")
	p.bytes(e)
	p.constants(e)
	p.loop(turnBytes, e.size, func(n int) {
		p.load("R1", first, n)
		p.load("R2", second, n)
		for i := range registers(n) {
			x, y := first+i, second+i
			if e.half == nil {
				step(e.lanes, x, y)
				continue
			}
			for up := range vec(2) {
				e.half.widen(p, temp+up, x, uint32(up))
				e.half.widen(p, temp+2+up, y, uint32(up))
				step(s4, temp+up, temp+2+up)
			}
			p.pack(e, x)
		}
		p.store("R0", first, n)
	})
}

// pack packs the float32s in temp and temp+1 into d. Unless they are exact, it rounds them first. It changes
// temp+2 and temp+3.
func (p *program) pack(e neon, d vec) {
	if e.half.round != nil && !e.exact {
		e.half.round(p, temp, temp+2)
		e.half.round(p, temp+1, temp+3)
	}
	e.half.pack(p, d, temp)
}

// registers returns the number of registers that hold n bytes.
func registers(n int) vec { return vec(max(1, n/16)) }

// scales writes the scale functions of the floating-point types.
func scales(p *program) {
	for _, e := range []neon{neonFloat32, neonFloat64} {
		p.scaling(e, e.lanes, func(v vec) { p.three("fmul", e.lanes, v, v, factor) })
	}
	for _, e := range []neon{neonFloat16, neonBFloat16} {
		p.scaling(e, s4, func(v vec) {
			for up := range vec(2) {
				e.half.widen(p, temp+up, v, uint32(up))
				p.three("fmul", s4, temp+up, temp+up, factor)
			}
			p.pack(e, v)
		})
	}
}

// scaling writes the function that applies step to each register of elements of type e. In each of its lanes
// l, the register factor holds the scale factor as a float32 or float64.
func (p *program) scaling(e neon, l lanes, step func(v vec)) {
	row(&p.scales, e, "scale"+e.name)
	p.function("scale"+e.name, "dst, src *byte, n int, factor float64", 32)
	p.arguments("dst", "src", "n")
	p.bytes(e)
	p.line("FMOVD factor+24(FP), F%d", factor)
	if l == s4 {
		p.line("FCVTDS F%d, F%d", factor, factor)
	}
	p.line("VDUP V%d.%s[0], V%d.%s", factor, l.asm[:1], factor, l.asm)
	p.constants(e)
	p.loop(turnBytes, e.size, func(n int) {
		p.load("R1", first, n)
		for i := range registers(n) {
			step(first + i)
		}
		p.store("R0", first, n)
	})
}

// turnElems is the number of elements that a turn of the loop handles in a conversion: one register of
// half-precision elements.
const turnElems = 8

// conversions writes the conversions between half-precision types and float32.
func conversions(p *program) {
	for _, e := range []neon{neonFloat16, neonBFloat16} {
		row(&p.widens, e, "widen"+e.name)
		p.conversion("widen", e, func(n int) {
			p.load("R1", first, n*e.size)
			e.half.widen(p, temp, first, 0)
			e.half.widen(p, temp+1, first, 1)
			p.store("R0", temp, n*neonFloat32.size)
		})
		row(&p.narrows, e, "narrow"+e.name)
		p.conversion("narrow", e, func(n int) {
			p.load("R1", temp, n*neonFloat32.size)
			if e.half.convert != nil {
				e.half.convert(p, temp, temp+2)
				e.half.convert(p, temp+1, temp+3)
			}
			e.half.pack(p, first, temp)
			p.store("R0", first, n*e.size)
		})
	}
}

// conversion writes a function in which turn(n) converts n elements.
func (p *program) conversion(kind string, e neon, turn func(n int)) {
	p.function(kind+e.name, "dst, src *byte, n int", 24)
	p.arguments("dst", "src", "n")
	p.constants(e)
	if e.half.convert != nil {
		p.fill(s4, upper, 0xffff0000)
	}
	p.loop(turnElems, 1, turn)
}
