package autotune

import "slices"

// grid has all points that the tuner may try. A place has an index into values for each axis.
type grid struct {
	space Space
	axes  []axis
	free  []int // the axes with more than one value
}

// axis has the values of a parameter and their coordinates.
type axis struct {
	values, coordinates []float64
	unordered           bool
}

// place is an index into the values of each axis of a grid.
type place []int

func newGrid(s Space) *grid {
	g := &grid{space: s}
	for i := range s {
		a := axis{values: s[i].values(), unordered: s[i].Kind == Choice || s[i].Kind == Switch}
		for _, v := range a.values {
			a.coordinates = append(a.coordinates, s[i].coordinate(v))
		}
		if len(a.values) > 1 {
			g.free = append(g.free, i)
		}
		g.axes = append(g.axes, a)
	}
	return g
}

// size returns the number of places, at most limit.
func (g *grid) size(limit int) int {
	n := 1
	for _, i := range g.free {
		if n *= len(g.axes[i].values); n >= limit {
			return limit
		}
	}
	return n
}

func (g *grid) start() place {
	at := make(place, len(g.axes))
	for i := range g.axes {
		at[i] = slices.Index(g.axes[i].values, g.space[i].Default)
	}
	return at
}

func (g *grid) point(at place) Point {
	p := Point{space: g.space, values: make([]float64, len(at))}
	for i, v := range at {
		p.values[i] = g.axes[i].values[v]
	}
	return p
}

// coordinates returns the coordinates of a place on the free axes.
func (g *grid) coordinates(at place) []float64 {
	x := make([]float64, len(g.free))
	for i, a := range g.free {
		x[i] = g.axes[a].coordinates[at[a]]
	}
	return x
}

// unordered reports for each free axis whether it has no order.
func (g *grid) unordered() []bool {
	u := make([]bool, len(g.free))
	for i, a := range g.free {
		u[i] = g.axes[a].unordered
	}
	return u
}

// at returns the place whose share of each free axis is given by a number from 0 to 1.
func (g *grid) at(shares []float64) place {
	at := g.start()
	for i, a := range g.free {
		n := len(g.axes[a].values)
		at[a] = min(int(shares[i]*float64(n)), n-1)
	}
	return at
}

// all returns all places in lexical order.
func (g *grid) all() []place {
	places := []place{g.start()}
	for _, a := range g.free {
		var next []place
		for _, p := range places {
			for v := range g.axes[a].values {
				q := slices.Clone(p)
				q[a] = v
				next = append(next, q)
			}
		}
		places = next
	}
	return places
}

// neighbours calls visit with each place that differs from at in one axis, by one step or to another word.
// visit must copy the place if it keeps it.
func (g *grid) neighbours(at place, visit func(place)) {
	q := slices.Clone(at)
	for _, a := range g.free {
		for v := range g.axes[a].values {
			if v != at[a] && (g.axes[a].unordered || v == at[a]-1 || v == at[a]+1) {
				q[a] = v
				visit(q)
			}
		}
		q[a] = at[a]
	}
}
