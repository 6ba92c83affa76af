package kernel

// The elements of type Bool are handled as bytes and not as Go bools. A peer may send any byte, and Go does
// not define operations on a bool that is neither 0 nor 1. Every byte other than 0 is true.

// bools returns the row of Bool. Min is true if all elements are true, and Max is true if any element is.
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

// truth returns 0 if x is 0, and otherwise 1. It works because x or -x has the highest bit unless x is 0.
func truth(x uint8) uint8 { return (x | -x) >> 7 }
