package kernel

// A bool is a byte here, not a bool: bytes from a peer may be anything, and a bool that is neither 0 nor 1 is not
// something that Go can compute with. Every byte other than 0 is true.

// bools returns the row of Bool: Min is true where all are, Max where any is.
func bools() row {
	return row{
		reductions: reductions[IntoFunc]{min: pairs(allOf), max: pairs(anyOf)},
		neutral:    neutrals{lowest: []byte{0}, highest: []byte{1}},
	}
}

func allOf(d, a, b []uint8) {
	a, b = a[:len(d)], b[:len(d)]
	for i, x := range a {
		d[i] = truth(x) & truth(b[i])
	}
}

func anyOf(d, a, b []uint8) {
	a, b = a[:len(d)], b[:len(d)]
	for i, x := range a {
		d[i] = truth(x | b[i])
	}
}

// truth returns 1 unless x is 0: then x and -x both lack the highest bit.
func truth(x uint8) uint8 { return (x | -x) >> 7 }
