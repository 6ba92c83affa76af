package autotune

// random is the generator SplitMix64 (Steele, Lea and Flood, 2014). The package has its own generator so that
// proposals do not change with the version of Go.
type random struct{ state uint64 }

func (r *random) next() uint64 {
	r.state += 0x9e3779b97f4a7c15
	z := r.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// float returns a number from 0 to 1, without 1.
func (r *random) float() float64 { return float64(r.next()>>11) / (1 << 53) }

func (r *random) vector(n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = r.float()
	}
	return v
}

// shuffle returns the numbers from 0 to n-1 in random order.
func (r *random) shuffle(n int) []int {
	order := make([]int, n)
	for i := range order {
		j := int(r.next() % uint64(i+1))
		order[i], order[j] = order[j], i
	}
	return order
}

// hypercube returns n points of a Latin hypercube sample (McKay, Beckman and Conover, 1979). It divides the
// range from 0 to 1 of each dimension into n equal parts. Each part contains the coordinate of exactly one
// point.
func (r *random) hypercube(n, dims int) [][]float64 {
	all := make([][]float64, n)
	for i := range all {
		all[i] = make([]float64, dims)
	}
	for d := range dims {
		for i, part := range r.shuffle(n) {
			all[i][d] = (float64(part) + r.float()) / float64(n)
		}
	}
	return all
}
