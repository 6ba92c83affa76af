package main

import (
	"math/bits"
	"math/rand/v2"
	"slices"
)

// maxExact is the largest number of files in a cycle for which all orders are considered. The memory
// doubles with each file: 2 bytes for each set of files.
const maxExact = 23

// An ordering is an order of nodes in which few arrows run back, from a node to one before it.
type ordering struct {
	order  []int
	back   int  // arrows that run back
	cyclic int  // arrows between nodes of one cycle
	exact  bool // no order has fewer back arrows
}

// fewestBack orders n nodes.
//
// An arrow between two strongly connected components never has to run back. So each component is ordered
// for itself: if it is small, by the best order of each subset of its nodes, otherwise by moving nodes from
// random orders with a fixed seed.
func fewestBack(n int, arrow func(from, to int) bool) ordering {
	o := ordering{exact: true}
	for _, nodes := range components(n, arrow) {
		k := len(nodes)
		within := make([][]bool, k)
		for i := range nodes {
			within[i] = make([]bool, k)
			for j := range nodes {
				within[i][j] = i != j && arrow(nodes[i], nodes[j])
				if within[i][j] {
					o.cyclic++
				}
			}
		}
		best := exhaust
		if k > maxExact {
			best, o.exact = descend, false
		}
		order := best(within)
		for _, i := range order {
			o.order = append(o.order, nodes[i])
		}
		o.back += backArrows(within, order)
	}
	return o
}

// backArrows counts the arrows that run back in the order.
func backArrows(arrow [][]bool, order []int) (n int) {
	for at, from := range order {
		for _, to := range order[:at] {
			if arrow[from][to] {
				n++
			}
		}
	}
	return n
}

// exhaust returns the best order. The cost of a set of nodes is the smallest number of back arrows if they
// come first; the last of them adds its arrows to the others.
func exhaust(arrow [][]bool) []int {
	n := len(arrow)
	to := make([]uint32, n) // the nodes that a node uses
	for i := range arrow {
		for j, used := range arrow[i] {
			if used {
				to[i] |= 1 << j
			}
		}
	}
	cost := make([]uint16, 1<<n)
	last := func(set uint32) (node int, best uint16) {
		best = ^uint16(0)
		for rest := set; rest != 0; rest &= rest - 1 {
			i := bits.TrailingZeros32(rest)
			before := set &^ (1 << i)
			if c := cost[before] + uint16(bits.OnesCount32(to[i]&before)); c < best {
				node, best = i, c
			}
		}
		return node, best
	}
	for set := uint32(1); set < 1<<n; set++ {
		_, cost[set] = last(set)
	}
	order := make([]int, n)
	for set := uint32(1)<<n - 1; set != 0; {
		i, _ := last(set)
		order[bits.OnesCount32(set)-1] = i
		set &^= 1 << i
	}
	return order
}

// descend returns a good order. It moves a few nodes of the best order that it knows at random, many times.
func descend(arrow [][]bool) []int {
	random := rand.New(rand.NewPCG(1, 2))
	best := random.Perm(len(arrow))
	fewest := backArrows(arrow, best)
	for range 20000 {
		order := slices.Clone(best)
		for range 1 + random.IntN(3) {
			move(order, random.IntN(len(order)), random.IntN(len(order)))
		}
		if n := backArrows(arrow, order); n <= fewest {
			best, fewest = order, n
		}
	}
	return best
}

// move moves the node at one place to another.
func move(order []int, from, to int) {
	node := order[from]
	copy(order[from:], order[from+1:])
	copy(order[to+1:], order[to:len(order)-1])
	order[to] = node
}

// components returns the strongly connected components, those that use others before the others (Tarjan,
// 1972).
func components(n int, arrow func(from, to int) bool) (all [][]int) {
	number, low := make([]int, n), make([]int, n)
	onStack := make([]bool, n)
	var stack []int
	next := 1
	var visit func(v int)
	visit = func(v int) {
		number[v], low[v] = next, next
		next++
		stack, onStack[v] = append(stack, v), true
		for w := range n {
			switch {
			case !arrow(v, w):
			case number[w] == 0:
				visit(w)
				low[v] = min(low[v], low[w])
			case onStack[w]:
				low[v] = min(low[v], number[w])
			}
		}
		if low[v] == number[v] {
			at := slices.Index(stack, v)
			c := slices.Clone(stack[at:])
			for _, w := range c {
				onStack[w] = false
			}
			stack = stack[:at]
			slices.Sort(c)
			all = append(all, c)
		}
	}
	for v := range n {
		if number[v] == 0 {
			visit(v)
		}
	}
	slices.Reverse(all)
	return all
}
