package controller_test

import (
	"math/rand/v2"
	"slices"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
)

// refusedType is what no backend of the random programs runs.
const refusedType = tensor.Uint8

// randomSets are the global set of 1 to 5 ranks and up to two others, whose members are drawn.
func randomSets(rng *rand.Rand) []controller.Set {
	sets := []controller.Set{controller.Global(1 + rng.IntN(5))}
	all := sets[0].Ranks
	for id := range topo.ProcessSetID(rng.IntN(3)) {
		s := controller.Set{ID: id + 1}
		for _, r := range all {
			if rng.IntN(3) > 0 {
				s.Ranks = append(s.Ranks, r)
			}
		}
		if len(s.Ranks) > 0 {
			sets = append(sets, s)
		}
	}
	return sets
}

// randomPrograms says what each rank submits, in order; where a name is still in flight the rank waits. All
// members of a set submit the same names in every step, each in an order of its own, so that a job that is left
// alone answers everything. Names repeat from step to step, mostly with the same parameters; sometimes all ranks
// change them, sometimes one does.
func randomPrograms(rng *rand.Rand, sets []controller.Set, steps int) [][]request {
	type spec struct {
		q    message.Request
		rows []int64 // of an allgather, by member
	}
	specs := make(map[topo.ProcessSetID][]spec)
	pool := 1 + rng.IntN(6)
	for _, s := range sets {
		for i := range pool {
			specs[s.ID] = append(specs[s.ID], spec{q: randomRequest(rng, s, string(rune('a'+i)))})
		}
	}
	programs := make([][]request, len(sets[0].Ranks))
	for range steps {
		step := make([][]request, len(programs))
		for _, s := range sets {
			for i := range specs[s.ID] {
				if rng.IntN(3) == 0 {
					continue
				}
				p := &specs[s.ID][i]
				if rng.IntN(6) == 0 || p.rows == nil {
					p.q = randomRequest(rng, s, p.q.Name)
					p.rows = nil
					for range s.Ranks {
						p.rows = append(p.rows, rng.Int64N(4))
					}
				}
				odd := -1
				if rng.IntN(8) == 0 {
					odd = rng.IntN(len(s.Ranks))
				}
				for m, r := range s.Ranks {
					q := p.q
					if m == odd {
						q = randomRequest(rng, s, q.Name)
					}
					if q.Kind == message.Allgather && len(q.Shape) > 0 {
						q.Shape = slices.Clone(q.Shape)
						q.Shape[0] = p.rows[m]
					}
					step[r] = append(step[r], request{s.ID, q})
				}
			}
		}
		for r := range step {
			rng.Shuffle(len(step[r]), func(i, j int) { step[r][i], step[r][j] = step[r][j], step[r][i] })
			programs[r] = append(programs[r], step[r]...)
		}
	}
	return programs
}

func randomRequest(rng *rand.Rand, s controller.Set, name string) message.Request {
	q := message.Request{Name: name, DType: tensor.Float32}
	switch rng.IntN(12) {
	case 0:
		q.DType = refusedType
	case 1:
		q.DType = tensor.Int64
	}
	for range rng.IntN(3) {
		q.Shape = append(q.Shape, rng.Int64N(4))
	}
	switch rng.IntN(8) {
	default:
		q.Kind, q.Op, q.Prescale, q.Postscale = message.Allreduce, tensor.Sum, 1, 1
		if rng.IntN(4) == 0 {
			q.Op = tensor.Max
		}
		if rng.IntN(8) == 0 {
			q.Prescale = 0.5
		}
	case 0:
		q.Kind = message.Allgather
	case 1:
		q.Kind, q.Root = message.Broadcast, s.Ranks[rng.IntN(len(s.Ranks))]
		if rng.IntN(10) == 0 {
			q.Root = 99
		}
	case 2:
		q = message.Request{Kind: message.Barrier, Name: name}
	}
	return q
}

// agree is the plain twin of the coordinator's checks: whether the requests of all members make a response.
func agree(s controller.Set, qs []*message.Request) bool {
	first := qs[0]
	for _, q := range qs {
		if q.Kind != first.Kind {
			return false
		}
		if q.Kind == message.Barrier {
			continue
		}
		a, b := *q, *first
		if q.Kind == message.Allgather {
			if len(a.Shape) == 0 || len(b.Shape) == 0 {
				return false
			}
			a.Shape, b.Shape = a.Shape[1:], b.Shape[1:]
		}
		if a.DType != b.DType || !a.Shape.Equal(b.Shape) || a.Op != b.Op || a.Prescale != b.Prescale || a.Postscale != b.Postscale || a.Root != b.Root {
			return false
		}
	}
	return first.Kind != message.Broadcast || slices.Contains(s.Ranks, first.Root)
}
