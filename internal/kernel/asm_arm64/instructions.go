package main

import (
	"fmt"
	"strings"
)

// vec is the number of a vector register.
type vec int

// Who uses which registers. V8 to V15 are left alone: not by Go's rules, but enough are left.
const (
	first  vec = 0  // and 3 more: the elements of a, and the result
	second vec = 4  // and 3 more: the elements of b
	temp   vec = 16 // up to 26: values between
	factor vec = 27 // of a scale
	ones   vec = 28 // 1 in each lane, of 8 or 32 bits
	upper  vec = 29 // the upper half of a float32
	bias   vec = 30 // just less than half of a bfloat16's last bit
	zero   vec = 31
)

// lanes says how an instruction divides a register: Arm's name, Go's name, and the field size of the instruction.
type lanes struct {
	arm, asm string
	size     uint32
}

var (
	b8  = lanes{"8b", "B8", 0}
	b16 = lanes{"16b", "B16", 0}
	h4  = lanes{"4h", "H4", 1}
	h8  = lanes{"8h", "H8", 1}
	s2  = lanes{"2s", "S2", 2}
	s4  = lanes{"4s", "S4", 2}
	d2  = lanes{"2d", "D2", 3}
)

// Go's assembler has few vector instructions of arithmetic. The others are put together from their encodings in the
// Arm Architecture Reference Manual (DDI 0487), section C4.1, "Data Processing -- Scalar Floating-Point and Advanced
// SIMD". All are of the first ARMv8-A.

// word writes an instruction as its bits, beside Arm's name of it.
func (p *program) word(bits uint32, form string, args ...any) {
	p.line("WORD $0x%08x // %s", bits, fmt.Sprintf(form, args...))
}

// three are the instructions of the group "three same". The size of a floating-point one is that of its lanes less 2,
// of which high sets the upper bit.
var three = map[string]struct{ u, opcode, float, high uint32 }{
	"mul":   {0, 0b10011, 0, 0},
	"smax":  {0, 0b01100, 0, 0},
	"umax":  {1, 0b01100, 0, 0},
	"smin":  {0, 0b01101, 0, 0},
	"umin":  {1, 0b01101, 0, 0},
	"cmgt":  {0, 0b00110, 0, 0},
	"fadd":  {0, 0b11010, 1, 0},
	"fmul":  {1, 0b11011, 1, 0},
	"fmax":  {0, 0b11110, 1, 0},
	"fmin":  {0, 0b11110, 1, 1},
	"fcmeq": {0, 0b11100, 1, 0},
}

// three writes d = n op m.
func (p *program) three(op string, l lanes, d, n, m vec) {
	e, ok := three[op]
	if !ok {
		panic("asm_arm64: no instruction " + op)
	}
	size := l.size - 2*e.float + 2*e.high
	p.word(0x4e200400|e.u<<29|size<<22|uint32(m)<<16|e.opcode<<11|uint32(n)<<5|uint32(d),
		"%s v%d.%s, v%d.%s, v%d.%s", op, d, l.arm, n, l.arm, m, l.arm)
}

// two are the instructions of the group "two-register miscellaneous".
var two = map[string]struct{ u, opcode uint32 }{
	"fcvtl":  {0, 0b10111},
	"fcvtn":  {0, 0b10110},
	"fcvtxn": {1, 0b10110},
	"scvtf":  {0, 0b11101},
	"fcvtzs": {0, 0b11011},
	"sqxtn":  {0, 0b10100},
	"sqxtun": {1, 0b10010},
}

// two writes d = op n. With q it is for all of a register, or for the upper half where one side is a half.
func (p *program) two(op string, size uint32, d vec, dl lanes, n vec, nl lanes, q uint32) {
	e, ok := two[op]
	if !ok {
		panic("asm_arm64: no instruction " + op)
	}
	if dl.size != nl.size {
		op += suffix(q)
	}
	p.word(0x0e200800|q<<30|e.u<<29|size<<22|e.opcode<<12|uint32(n)<<5|uint32(d),
		"%s v%d.%s, v%d.%s", op, d, dl.arm, n, nl.arm)
}

// suffix is what the names of instructions for an upper half end in.
func suffix(q uint32) string { return [...]string{"", "2"}[q] }

// halves are the lanes of a lower half, of a register with that as its upper half, and of one of elements twice as wide.
var halves = map[lanes][3]lanes{b8: {b8, b16, h8}, h4: {h4, h8, s4}, s2: {s2, s4, d2}}

// widenFloats sets d to the lower or upper half of n, of lanes l, twice as wide.
func (p *program) widenFloats(l lanes, d, n vec, up uint32) {
	h := halves[l]
	p.two("fcvtl", l.size-1, d, h[2], n, h[up], up)
}

// narrow sets the lower or upper half of d, of lanes l, to n, of lanes twice as wide. The lower half clears the upper.
func (p *program) narrow(op string, l lanes, d, n vec, up uint32) {
	h, size := halves[l], l.size
	if strings.HasPrefix(op, "f") {
		size--
	}
	p.two(op, size, d, h[up], n, h[2], up)
}

// widenInts is widenFloats for integers, signed or not: a shift left by nothing that widens.
func (p *program) widenInts(signed bool, l lanes, d, n vec, up uint32) {
	h := halves[l]
	op, u := "ushll", uint32(1)
	if signed {
		op, u = "sshll", 0
	}
	p.word(0x0f00a400|up<<30|u<<29|8<<l.size<<16|uint32(n)<<5|uint32(d),
		"%s%s v%d.%s, v%d.%s, #0", op, suffix(up), d, h[2].arm, n, h[up].arm)
}

// asm writes an instruction that Go's assembler has, d = n op m; n and m change places there.
func (p *program) asm(op string, l lanes, d, n, m vec) {
	p.line("%s V%d.%s, V%d.%s, V%d.%s", op, m, l.asm, n, l.asm, d, l.asm)
}

// fill sets each lane of d to value, by way of R4.
func (p *program) fill(l lanes, d vec, value uint32) {
	p.line("MOVD $0x%x, R4", value)
	p.line("VDUP R4, V%d.%s", d, l.asm)
}

// load reads size bytes, a power of two up to 64, into v and the registers after it, and moves the pointer on. The
// bytes need not be aligned. Of less than 8 bytes, others of the register may be of any value.
func (p *program) load(pointer string, v vec, size int) { p.move("VLD1.P", pointer, v, size, true) }

// store is the reverse of load.
func (p *program) store(pointer string, v vec, size int) { p.move("VST1.P", pointer, v, size, false) }

func (p *program) move(op, pointer string, v vec, size int, load bool) {
	memory, register := fmt.Sprintf("%d(%s)", size, pointer), ""
	switch size {
	case 1:
		register = fmt.Sprintf("V%d.B[0]", v)
	case 2:
		register = fmt.Sprintf("V%d.H[0]", v)
	case 4:
		op, register = "FMOVS.P", fmt.Sprintf("F%d", v)
	case 8:
		op, register = "FMOVD.P", fmt.Sprintf("F%d", v)
	case 16:
		op, register = "FMOVQ.P", fmt.Sprintf("F%d", v)
	case 32:
		register = fmt.Sprintf("[V%d.B16, V%d.B16]", v, v+1)
	case 64:
		register = fmt.Sprintf("[V%d.B16, V%d.B16, V%d.B16, V%d.B16]", v, v+1, v+2, v+3)
	default:
		panic(fmt.Sprintf("asm_arm64: cannot move %d bytes", size))
	}
	if load {
		p.line("%s %s, %s", op, memory, register)
	} else {
		p.line("%s %s, %s", op, register, memory)
	}
}
