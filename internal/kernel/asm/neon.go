package main

import "fmt"

// vec is the number of a vector register.
type vec int

// These constants say what each vector register is used for. V8 to V15 are not used: Go would allow it, but
// there are enough other registers.
const (
	first  vec = 0  // this register and the next 3 hold the elements of a, and the result
	second vec = 4  // this register and the next 3 hold the elements of b
	temp   vec = 16 // the registers from this one to V26 hold temporary values
	factor vec = 27 // holds the factor of a scale
	ones   vec = 28 // holds 1 in each lane of 8 or 32 bits
	upper  vec = 29 // holds a mask of the upper half of a float32
	bias   vec = 30 // holds the number just below half of the last bit of a bfloat16
	zero   vec = 31
)

// lanes describes how an instruction divides a register into lanes: their name in Arm's notation and in Go's,
// and the size field of the instruction.
type lanes struct {
	arm, asm string
	size     uint32
}

var (
	b16 = lanes{"16b", "B16", 0}
	h8  = lanes{"8h", "H8", 1}
	s4  = lanes{"4s", "S4", 2}
	d2  = lanes{"2d", "D2", 3}
)

// Go's assembler has few arithmetic vector instructions. The others are encoded here, according to the Arm
// Architecture Reference Manual (DDI 0487), section C4.1, "Data Processing -- Scalar Floating-Point and
// Advanced SIMD". All versions of ARMv8-A have them.

// word writes an instruction as a number, with Arm's notation as a comment.
func (p *program) word(bits uint32, form string, args ...any) {
	p.line("WORD $0x%08x // %s", bits, fmt.Sprintf(form, args...))
}

// three has the instructions of the group "three same". The size field of a floating-point instruction is the
// size field of its lanes minus 2, plus 2 if high is 1.
var three = map[string]struct{ u, opcode, float, high uint32 }{
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

// three writes d = n op m. op is an instruction in the map three.
func (p *program) three(op string, l lanes, d, n, m vec) {
	e, ok := three[op]
	if !ok {
		panic("asm: no instruction " + op)
	}
	size := l.size - 2*e.float + 2*e.high
	p.word(0x4e200400|e.u<<29|size<<22|uint32(m)<<16|e.opcode<<11|uint32(n)<<5|uint32(d),
		"%s v%d.%s, v%d.%s, v%d.%s", op, d, l.arm, n, l.arm, m, l.arm)
}

// asm writes d = n op m. op is an instruction that Go's assembler has. The assembler expects the operands in
// the order m, n, d.
func (p *program) asm(op string, l lanes, d, n, m vec) {
	p.line("%s V%d.%s, V%d.%s, V%d.%s", op, m, l.asm, n, l.asm, d, l.asm)
}

// fill sets each lane of d to value. It changes R4.
func (p *program) fill(l lanes, d vec, value uint32) {
	p.line("MOVD $0x%x, R4", value)
	p.line("VDUP R4, V%d.%s", d, l.asm)
}

// load reads size bytes, a power of two up to 64, into v and the registers after it, and adds size to the
// pointer. The bytes need not be aligned. If size is less than 8, the other bytes of the register are
// undefined.
func (p *program) load(pointer string, v vec, size int) { p.move("VLD1.P", pointer, v, size, true) }

// store writes size bytes from v and the registers after it, and adds size to the pointer.
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
		panic(fmt.Sprintf("asm: cannot move %d bytes", size))
	}
	if load {
		p.line("%s %s, %s", op, memory, register)
	} else {
		p.line("%s %s, %s", op, register, memory)
	}
}
