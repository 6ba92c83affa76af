package controller_test

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// refusedType is an element type. No backend of the random jobs reduces elements of this type.
const refusedType = tensor.Uint8

// randomSets returns the global set of a job of 1 to 5 ranks and up to two other sets with random members.
func randomSets(rng *rand.Rand) []controller.Set {
	sets := []controller.Set{controller.Global(1 + rng.IntN(5))}
	all := sets[0].Ranks
	for id := range topo.ProcessSetID(rng.IntN(3)) {
		if ranks := randomRanks(rng, all); len(ranks) > 0 {
			sets = append(sets, controller.Set{ID: id + 1, Ranks: ranks})
		}
	}
	return sets
}

func randomRanks(rng *rand.Rand, all []topo.Rank) (ranks []topo.Rank) {
	for _, r := range all {
		if rng.IntN(3) > 0 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// programmer generates random programs. A program is the ordered list of the requests of one rank. A request
// and all later requests wait while the name of the request is in flight, while the rank has joined the
// request's process set, or while the rank does not have that set yet.
//
// In every step, all members of a set submit the same names, each in a random order. So in a job without
// failures, all requests are answered. If a step ends with a join, each member submits a random subset of the
// names before its join. Names repeat from step to step, usually with the same parameters. Sometimes all
// ranks change the parameters, and sometimes only one rank does.
type programmer struct {
	rng *rand.Rand
	// races is set if a process set may be removed while requests for it are in flight. Then the answers
	// depend on timing.
	races    bool
	all      []topo.Rank
	sets     []*plannedSet
	next     topo.ProcessSetID
	programs [][]request
}

// plannedSet is a process set and its tensors. The first groupSize tensors form a group.
type plannedSet struct {
	controller.Set
	byMembers bool // whether only the members add and remove the set
	specs     []spec
	groupSize int
	steps     int // number of steps that have been generated
}

type spec struct {
	q    message.Request
	rows []int64 // the first dimension at each member if it may differ between members
}

func randomPrograms(rng *rand.Rand, sets []controller.Set, steps int, races bool) [][]request {
	p := &programmer{rng: rng, races: races, all: sets[0].Ranks, next: firstPlanned,
		programs: make([][]request, len(sets[0].Ranks))}
	for _, s := range sets {
		p.plan(s)
	}
	for range steps {
		switch p.rng.IntN(12) {
		case 0:
			p.addSet()
		case 1:
			p.removeSet()
		case 2, 3:
			p.addSetsByMembers()
		default:
			p.step()
		}
	}
	return p.programs
}

// plan generates the tensors of a set.
func (p *programmer) plan(s controller.Set) *plannedSet {
	set := &plannedSet{Set: s}
	for i := range 1 + p.rng.IntN(6) {
		set.specs = append(set.specs, spec{q: message.Request{Name: string(rune('a' + i))}})
	}
	if n := min(1+p.rng.IntN(3), len(set.specs)); n > 1 && p.rng.IntN(2) == 0 {
		set.groupSize = n
	}
	p.sets = append(p.sets, set)
	return set
}

// step appends one step for all sets to the programs of all ranks.
func (p *programmer) step() {
	turns := make([][][]request, len(p.programs)) // indexed by rank, then by set
	for _, s := range p.sets {
		for m, requests := range p.stepOf(s) {
			turns[s.Ranks[m]] = append(turns[s.Ranks[m]], requests)
		}
	}
	for r := range turns {
		p.programs[r] = append(p.programs[r], p.merge(turns[r])...)
	}
}

// merge merges lists in a random order. It keeps the order within each list.
func (p *programmer) merge(lists [][]request) (all []request) {
	for {
		lists = slices.DeleteFunc(lists, func(l []request) bool { return len(l) == 0 })
		if len(lists) == 0 {
			return all
		}
		l := &lists[p.rng.IntN(len(lists))]
		all = append(all, (*l)[0])
		*l = (*l)[1:]
	}
}

// stepOf returns the requests of each member of a set in one step.
func (p *programmer) stepOf(s *plannedSet) [][]request {
	turns := make([][]request, len(s.Ranks))
	s.steps++
	joins := p.rng.IntN(6) == 0
	// In a step with a join, a tensor of a group may be left out, so that the group never becomes complete.
	lacking := joins && p.rng.IntN(4) == 0
	for i := 0; i < len(s.specs); {
		unit := 1
		if i < s.groupSize {
			unit = s.groupSize
		}
		first := i
		i += unit
		if p.rng.IntN(3) == 0 {
			continue
		}
		if lacking && unit > 1 {
			unit--
		}
		var who []bool // whether member m submits the tensors in this step
		for range s.Ranks {
			who = append(who, !joins || p.rng.IntN(3) > 0)
		}
		step := 0
		if first < s.groupSize {
			step = s.steps
		}
		for t := range unit {
			for m, q := range p.tensor(s, first+t, joins) {
				if who[m] {
					turns[m] = append(turns[m], request{set: s.ID, q: q, step: step})
				}
			}
		}
	}
	for m := range turns {
		p.rng.Shuffle(len(turns[m]), func(i, j int) { turns[m][i], turns[m][j] = turns[m][j], turns[m][i] })
		if joins {
			turns[m] = append(turns[m], request{set: s.ID, q: message.Request{
				Kind: message.Join, Name: fmt.Sprintf("join%d", p.rng.IntN(2)), Empty: p.rng.IntN(2) == 0,
			}})
		}
	}
	return turns
}

// tensor returns the requests of all members for tensor i of a set.
func (p *programmer) tensor(s *plannedSet, i int, joins bool) (qs []message.Request) {
	t := &s.specs[i]
	if p.rng.IntN(6) == 0 || t.rows == nil {
		t.q, t.rows = p.request(s, i), nil
		for range s.Ranks {
			t.rows = append(t.rows, p.rng.Int64N(4))
		}
	}
	odd := -1
	if p.rng.IntN(8) == 0 {
		odd = p.rng.IntN(len(s.Ranks))
	}
	for m := range s.Ranks {
		q := t.q
		if m == odd {
			q = p.request(s, i)
			// At least one member must name the group, because otherwise the group would never become
			// complete.
			if !joins && len(s.Ranks) > 1 && p.rng.IntN(2) == 0 {
				q.Group, q.GroupSize = "", 0
			}
		}
		if q.Device != tensor.Host {
			q.Device = tensor.CUDA(p.rng.IntN(10) / 9)
		}
		if q.Kind.Ragged() && len(q.Shape) > 0 {
			q.Shape = slices.Clone(q.Shape)
			q.Shape[0] = t.rows[m]
		}
		qs = append(qs, rootOnly(q, s.Ranks[m]))
	}
	return qs
}

// rootOnly returns the request q as rank r makes it: only the root sends the shape of a scatter.
func rootOnly(q message.Request, r topo.Rank) message.Request {
	if q.Kind == message.Scatter && q.Root != r {
		q.Shape = nil
	}
	return q
}

// request generates a request for tensor i of a set.
func (p *programmer) request(s *plannedSet, i int) message.Request {
	for {
		q := randomRequest(p.rng, s.Set, s.specs[i].q.Name)
		if i >= s.groupSize {
			return q
		}
		if q.Kind.MovesData() && len(q.Parts) == 0 {
			q.Group, q.GroupSize = "group", int32(s.groupSize)
			return q
		}
	}
}

// addSet makes all ranks add a process set. Sometimes the ranks disagree about the set, or it cannot be
// added.
func (p *programmer) addSet() {
	ranks := randomRanks(p.rng, p.all)
	if len(ranks) == 0 {
		return
	}
	possible := !slices.ContainsFunc(p.sets, func(s *plannedSet) bool {
		return !s.byMembers && slices.Equal(s.Ranks, ranks)
	})
	if p.rng.IntN(6) == 0 {
		ranks, possible = append(ranks, topo.Rank(len(p.all))), false
	}
	for _, r := range p.all {
		q := message.Request{Kind: message.AddProcessSet, Name: "sets", Ranks: ranks}
		if r > 0 && p.rng.IntN(16) == 0 && !slices.Equal(ranks, p.all[:1]) {
			q.Ranks, possible = p.all[:1], false
		}
		p.programs[r] = append(p.programs[r], request{q: q, await: true, adds: p.next})
	}
	if possible {
		p.plan(controller.Set{ID: p.next, Ranks: ranks})
	}
	p.next++
}

// addSetsByMembers makes some ranks add process sets by themselves. The sets may overlap or be equal. Each
// rank adds its sets in a random order, and continues before they are added. Sometimes the members of a set
// disagree about it.
func (p *programmer) addSetsByMembers() {
	turns := make([][]request, len(p.programs))
	for range 1 + p.rng.IntN(4) {
		ranks := randomRanks(p.rng, p.all)
		if len(ranks) == 0 {
			continue
		}
		odd := -1
		if len(ranks) > 2 && p.rng.IntN(6) == 0 {
			odd = p.rng.IntN(len(ranks))
		}
		for i, r := range ranks {
			q := message.Request{Kind: message.AddProcessSet, Name: fmt.Sprintf("set%d", p.next), Ranks: ranks,
				MembersOnly: true}
			if i == odd { // the other rank that it names asks for all ranks, so the answer waits for all
				first := min(i, len(ranks)-2)
				q.Ranks = ranks[first : first+2]
			}
			turns[r] = append(turns[r], request{q: q, adds: p.next})
		}
		if odd < 0 {
			p.plan(controller.Set{ID: p.next, Ranks: ranks}).byMembers = true
		}
		p.next++
	}
	for r := range turns {
		p.rng.Shuffle(len(turns[r]), func(i, j int) { turns[r][i], turns[r][j] = turns[r][j], turns[r][i] })
		p.programs[r] = append(p.programs[r], turns[r]...)
	}
}

// removeSet makes all ranks remove a process set, or its members if only they have added it. Sometimes the
// set does not exist.
func (p *programmer) removeSet() {
	if p.rng.IntN(4) == 0 {
		p.remove(topo.Global, p.all, 99)
		return
	}
	if len(p.sets) == 1 {
		return
	}
	i := 1 + p.rng.IntN(len(p.sets)-1)
	s := p.sets[i]
	p.sets = slices.Delete(p.sets, i, i+1)
	if s.byMembers {
		p.remove(s.ID, s.Ranks, s.ID)
	} else {
		p.remove(topo.Global, p.all, s.ID)
	}
	if p.races {
		for _, r := range s.Ranks {
			if p.rng.IntN(2) == 0 {
				p.programs[r] = append(p.programs[r], request{set: s.ID, q: rootOnly(p.request(s, 0), r)})
			}
		}
	}
}

// remove makes the given ranks request on the set in that the set with the given ID is removed.
func (p *programmer) remove(in topo.ProcessSetID, ranks []topo.Rank, id topo.ProcessSetID) {
	for _, r := range ranks {
		q := message.Request{Kind: message.RemoveProcessSet, Name: "sets", Set: id}
		p.programs[r] = append(p.programs[r], request{set: in, q: q, await: !p.races})
	}
}

func randomRequest(rng *rand.Rand, s controller.Set, name string) message.Request {
	q := message.Request{Name: name, DType: tensor.Float32}
	switch rng.IntN(12) {
	case 0:
		q.DType = refusedType
	case 1:
		q.DType = tensor.Int64
	}
	if rng.IntN(4) == 0 {
		q.Device = tensor.CUDA(0)
	}
	for range rng.IntN(3) {
		q.Shape = append(q.Shape, rng.Int64N(4))
	}
	switch rng.IntN(15) {
	default:
		q.Kind, q.Op, q.Prescale, q.Postscale = message.Allreduce, tensor.Sum, 1, 1
		if rng.IntN(4) == 0 {
			q.Op = tensor.Max
		}
		if rng.IntN(8) == 0 {
			q.Prescale = 0.5
		}
		if q.DType == tensor.Float32 && rng.IntN(8) == 0 {
			q.Wire = tensor.Float16
		}
		if q.DType != refusedType && rng.IntN(4) == 0 {
			randomParts(rng, &q)
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
	case 3:
		q.Kind = message.Alltoall
	case 4:
		q.Kind, q.Op, q.Prescale, q.Postscale = message.Reducescatter, tensor.Average, 1, 1
	case 5:
		q.Kind, q.Op, q.Prescale, q.Postscale = message.Reduce, tensor.Sum, 1, 1
		q.Root = s.Ranks[rng.IntN(len(s.Ranks))]
	case 6:
		q.Kind, q.Root = message.Gather, s.Ranks[rng.IntN(len(s.Ranks))]
	case 7:
		q.Kind, q.Root = message.Scatter, s.Ranks[rng.IntN(len(s.Ranks))]
		q.Shape = append(q.Shape, 2) // ranks refuse to scatter a scalar
	}
	return q
}

// randomParts turns the allreduce q into a request for a group.
func randomParts(rng *rand.Rand, q *message.Request) {
	var elems int64
	for range 1 + rng.IntN(3) {
		dt := q.DType
		if !q.Wire.Valid() && rng.IntN(4) == 0 {
			dt = tensor.Int64
		}
		n := rng.Int64N(3)
		q.Parts, elems = q.Parts.Append(dt, tensor.Shape{n, 2}), elems+2*n
	}
	q.DType, q.Shape = q.Parts.DType(), tensor.Shape{elems}
}

// agree is a second, independent implementation of the coordinator's checks, so that the tests can compare
// the two. It reports whether the requests in qs agree, so that the answer is not an error. The slice qs has
// an element for each member, which is nil if the member has joined or has shut down without making the
// request. The slice joined says which members have joined, and empty which of them with empty contributions.
func agree(s controller.Set, qs []*message.Request, joined, empty []bool) bool {
	var first *message.Request
	for _, q := range qs {
		if q != nil {
			first = q
			break
		}
	}
	for m, q := range qs {
		if q == nil {
			switch first.Kind {
			case message.Allreduce, message.Barrier:
			case message.Reduce:
				if first.Root == s.Ranks[m] {
					return false
				}
			case message.AddProcessSet:
				return false
			case message.RemoveProcessSet:
				if joined[m] {
					return false
				}
			default:
				if !empty[m] || first.Kind.HasRoot() && first.Root == s.Ranks[m] {
					return false
				}
			}
			continue
		}
		a, b := *q, *first
		if a.Kind != b.Kind || !slices.Equal(a.Ranks, b.Ranks) || a.Set != b.Set {
			return false
		}
		if !a.Kind.MovesData() {
			continue
		}
		if a.Kind == message.Reducescatter && len(a.Shape) == 0 {
			return false
		}
		if a.Kind == message.Scatter {
			if s.Ranks[m] == a.Root && len(a.Shape) == 0 {
				return false
			}
			a.Shape, b.Shape = nil, nil
		} else if a.Kind.Ragged() {
			if len(a.Shape) == 0 || len(b.Shape) == 0 {
				return false
			}
			a.Shape, b.Shape = a.Shape[1:], b.Shape[1:]
		}
		if (a.Device == tensor.Host) != (b.Device == tensor.Host) {
			return false
		}
		if a.DType != b.DType || !a.Shape.Equal(b.Shape) || a.Op != b.Op || a.Prescale != b.Prescale ||
			a.Postscale != b.Postscale ||
			a.Wire != b.Wire || !slices.Equal(a.Parts, b.Parts) || a.Root != b.Root || a.Group != b.Group ||
			a.GroupSize != b.GroupSize {
			return false
		}
	}
	return !first.Kind.HasRoot() || slices.Contains(s.Ranks, first.Root)
}
