package message

import "math/bits"

// Bits is a bit vector. All bits beyond its length are 0. If such a bit is set, the vector grows.
type Bits []uint64

// Set sets bit b to 1.
func (v *Bits) Set(b uint32) {
	w := int(b / 64)
	for len(*v) <= w {
		*v = append(*v, 0)
	}
	(*v)[w] |= 1 << (b % 64)
}

// Clear sets bit b to 0.
func (v Bits) Clear(b uint32) {
	if w := int(b / 64); w < len(v) {
		v[w] &^= 1 << (b % 64)
	}
}

// Has reports whether bit b is 1.
func (v Bits) Has(b uint32) bool {
	w := int(b / 64)
	return w < len(v) && v[w]&(1<<(b%64)) != 0
}

// Any reports whether at least one bit is 1.
func (v Bits) Any() bool {
	for _, w := range v {
		if w != 0 {
			return true
		}
	}
	return false
}

// Next returns the lowest bit that is 1 and is at least b. ok is false if there is no such bit.
func (v Bits) Next(b uint32) (next uint32, ok bool) {
	w := int(b / 64)
	if w >= len(v) {
		return 0, false
	}
	word := v[w] &^ (1<<(b%64) - 1)
	for word == 0 {
		if w++; w == len(v) {
			return 0, false
		}
		word = v[w]
	}
	return uint32(w*64 + bits.TrailingZeros64(word)), true
}

// Or sets v to the bitwise OR of v and o.
func (v *Bits) Or(o Bits) {
	for len(*v) < len(o) {
		*v = append(*v, 0)
	}
	for i, w := range o {
		(*v)[i] |= w
	}
}

// And sets v to the bitwise AND of v and o.
func (v Bits) And(o Bits) {
	for i := range v {
		if i < len(o) {
			v[i] &= o[i]
		} else {
			v[i] = 0
		}
	}
}

// Intersects reports whether v and o have a bit that is 1 in both.
func (v Bits) Intersects(o Bits) bool {
	for i := range min(len(v), len(o)) {
		if v[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// Reset makes v empty. It keeps the memory of v.
func (v *Bits) Reset() { *v = (*v)[:0] }
