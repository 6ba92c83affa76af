package kernel

// The elements of Bool are bytes here and not Go bools, because a peer may send any byte, and Go does not
// define operations on a bool that is neither 0 nor 1. Every byte other than 0 is true.

// bools returns the row of Bool: Min is true if all elements are, Max if any element is.
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

// truth returns 1 unless x is 0. Only for 0 do both x and -x lack the highest bit.
func truth(x uint8) uint8 { return (x | -x) >> 7 }
