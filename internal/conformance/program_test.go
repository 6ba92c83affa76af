package conformance

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// program is a random sequence of operations for all ranks. In each round, a rank submits its operations in a
// random order of its own, and then waits for all of them. Ranks do not wait for each other between rounds.
type program struct {
	ranks  int
	sets   [][]topo.Rank // the members of sets 0, 1, 2 and so on
	rounds [][]*unit
	jobs   int
}

// unit is what a rank submits by one call: one tensor, a group of tensors, or a join. The field group is
// empty unless the unit is a group.
type unit struct {
	set   topo.ProcessSetID
	jobs  []*job
	first int // the number of the unit's first job
	group string
	join  *joint
}

// joint is a join of a process set. Bit i of the field joined is set if member i joins and does not take part
// in the operations of the round.
type joint struct {
	joined uint
	empty  bool
	last   agreement
}

// author generates a random program and holds the state of the program so far.
type author struct {
	*rand.Rand
	p *program
	// kinds has the operations of the program. There are few of them, so that many tensors can be fused. Some
	// operations differ from others in only one parameter and must not be fused with them.
	kinds []kin
	// fresh is set if each tensor gets a new name.
	fresh bool
	// names maps each name to its last operation. Most operations repeat the last operation of their name, so
	// that requests are in the cache.
	names map[string]habit
}

// habit is the last operation that was submitted under a certain name.
type habit struct {
	kin
	elements int
	inPlace  bool
}

// kin is an operation and its sibling, which differs from it in one parameter. If no valid operation differs
// from it in one parameter, sibling is the operation itself.
type kin struct {
	what
	sibling what
}

// kinship returns the number of parameters in which two operations differ.
func kinship(a, b what) int {
	return boolInt(a.kind != b.kind) + boolInt(a.uneven != b.uneven) + boolInt(a.dt != b.dt) + boolInt(
		a.op != b.op) +
		boolInt(a.wire != b.wire) + boolInt(a.pre != b.pre || a.post != b.post)
}

const programRanks = 5

// write returns a program with at least the given number of operations. It draws some operations from
// choices, as many as the argument kinds says, and uses each of them and its sibling. The same seed produces
// the same program.
func write(seed uint64, operations, kinds int, choices []what, fresh bool) *program {
	p := &program{ranks: programRanks}
	p.sets = append([][]topo.Rank{topo.UpTo(p.ranks)}, sets(p.ranks)...)
	a := &author{Rand: rand.New(rand.NewPCG(seed, 1)), p: p, fresh: fresh, names: make(map[string]habit)}
	for range kinds {
		w := choices[a.IntN(len(choices))]
		siblings := slices.DeleteFunc(slices.Clone(choices), func(s what) bool { return kinship(w, s) != 1 })
		k := kin{w, w}
		if len(siblings) > 0 {
			k.sibling = siblings[a.IntN(len(siblings))]
		}
		a.kinds = append(a.kinds, k)
	}
	for p.jobs < operations {
		p.rounds = append(p.rounds, a.round())
	}
	return p
}

// round returns up to 30 units, including joins. Each name occurs at most once in a process set.
func (a *author) round() []*unit {
	var units []*unit
	joints := make([]*joint, len(a.p.sets))
	for set := range joints {
		if !a.fresh && a.IntN(6) == 0 {
			joints[set] = &joint{joined: joiners(len(a.p.sets[set]), a.Uint64()), empty: a.IntN(2) == 0}
		}
	}
	used := make(map[string]bool)
	for range 1 + a.IntN(30) {
		set := a.IntN(len(a.p.sets))
		if u := a.unit(topo.ProcessSetID(set), used, joints[set]); u != nil {
			u.first = a.p.jobs
			a.p.jobs += len(u.jobs)
			units = append(units, u)
		}
	}
	for set, j := range joints {
		if j != nil {
			units = append(units, &unit{set: topo.ProcessSetID(set), join: j})
		}
	}
	return units
}

// unit returns a unit with a single tensor or a group. It returns nil if the name that it has drawn is in
// use.
func (a *author) unit(set topo.ProcessSetID, used map[string]bool, join *joint) *unit {
	u, count := &unit{set: set}, 1
	name := fmt.Sprintf("t%d", a.IntN(20))
	if a.IntN(6) == 0 {
		name, count = fmt.Sprintf("g%d", a.IntN(4)), 2+a.IntN(3)
	}
	if a.fresh {
		name = fmt.Sprintf("n%d", a.p.jobs)
	}
	key := fmt.Sprintf("%d/%s", set, name)
	if used[key] {
		return nil
	}
	used[key] = true
	h, known := a.names[key]
	switch change := a.IntN(8); {
	case !known || change == 0:
		sizes := []int{0, 1, 7, 64, 300, 1000}
		h = habit{a.kinds[a.IntN(len(a.kinds))], sizes[a.IntN(len(sizes))], a.IntN(2) == 0}
	case change == 1:
		h.what, h.sibling = h.sibling, h.what
	case change == 2:
		h.elements++
	}
	if a.fresh && a.IntN(2) == 0 {
		h.what = h.sibling
	}
	a.names[key] = h
	if count > 1 && h.kind.MovesData() {
		u.group = name
	} else {
		count = 1
	}
	for i := range count {
		j := &job{
			what: h.what, name: fmt.Sprintf("%s.%d", name, i), set: set, members: a.p.sets[set],
			elements: h.elements + i,
			seed:     a.Uint64(), lead: hash(uint64(len(name))), wild: a.IntN(3) == 0, inPlace: h.inPlace,
		}
		if join != nil {
			j.joined, j.empty = join.joined, join.empty
		}
		u.jobs = append(u.jobs, j)
	}
	return u
}

// answers has the results of a program, indexed by job number and rank. An element is nil if there is no
// result.
type answers [][][]byte

func (p *program) newAnswers() answers {
	all := make(answers, p.jobs)
	for i := range all {
		all[i] = make([][]byte, p.ranks)
	}
	return all
}

// run runs the part of the program that belongs to rank r. It checks each result against the reference and
// stores the result in got. The argument order is a seed for the order in which the rank submits. At random
// times between submissions, run calls the function pause.
func (p *program) run(r *testcluster.Rank, order uint64, got answers, pause func(random *rand.Rand)) {
	random := rand.New(rand.NewPCG(order, uint64(r.Rank)))
	for _, units := range p.rounds {
		var mine []*unit
		for _, u := range units {
			if slices.Contains(p.sets[u.set], r.Rank) {
				mine = append(mine, u)
			}
		}
		// A rank submits the join of a set last, because after the join it cannot submit anything else to the
		// set in this round.
		random.Shuffle(len(mine), func(i, k int) { mine[i], mine[k] = mine[k], mine[i] })
		slices.SortStableFunc(mine, func(a, b *unit) int {
			return boolInt(a.join != nil) - boolInt(b.join != nil)
		})
		p.runRound(r, mine, random, got, pause)
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (p *program) runRound(r *testcluster.Rank, units []*unit, random *rand.Rand, got answers,
	pause func(random *rand.Rand)) {
	submitted := make([][]*testcluster.Op, len(units))
	for i, u := range units {
		submitted[i] = u.ops(r)
		if len(submitted[i]) > 0 {
			r.Must(r.Submit(submitted[i]...))
		}
		if random.IntN(3) == 0 {
			pause(random)
		}
	}
	for i, u := range units {
		if u.join != nil {
			r.Must(r.Wait(submitted[i]...))
			r.Must(u.join.last.check([]byte{byte(submitted[i][0].Last())}))
			continue
		}
		for k, op := range submitted[i] {
			_ = r.Wait(op) // the error is ignored here, because check decides whether an error is right
			r.Must(u.jobs[k].check(r, op))
			if op.Err == nil {
				got[u.first+k][r.Rank] = op.Output
			}
		}
	}
}

// ops returns the operations that rank r submits for the unit. It leaves out operations for which r has
// already joined.
func (u *unit) ops(r *testcluster.Rank) []*testcluster.Op {
	if u.join != nil {
		op := testcluster.Over(u.set, testcluster.Join("join"))
		op.Request.Empty = u.join.empty
		return []*testcluster.Op{op}
	}
	var ops []*testcluster.Op
	for _, j := range u.jobs {
		if !j.absent(slices.Index(j.members, r.Rank)) {
			ops = append(ops, j.submission(r))
		}
	}
	if u.group != "" && len(ops) > 0 {
		testcluster.Group(u.group, ops...)
	}
	return ops
}

// yield is a pause that lets other goroutines run.
func yield(*rand.Rand) { runtime.Gosched() }

// sleep is a pause of up to 3 ms in the fake time of synctest, which takes no real time.
func sleep(random *rand.Rand) { time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond) }

// sameBits fails the test if a and b have different results for a job. It compares only jobs for which the
// function compare returns true, and ignores the bits of NaNs.
func (p *program) sameBits(t *testing.T, a, b answers, compare func(j *job) bool) {
	for _, units := range p.rounds {
		for _, u := range units {
			for i, j := range u.jobs {
				if !compare(j) {
					continue
				}
				for r := range p.ranks {
					x, y := a[u.first+i][r], b[u.first+i][r]
					if !bytes.Equal(x, y) && !sameButNaNs(j.dt, x, y) {
						t.Errorf("rank %d: %v: two runs differ: %x and %x", r, j, clip(x), clip(y))
						return
					}
				}
			}
		}
	}
}

func clip(b []byte) []byte { return b[:min(len(b), 64)] }

// sameButNaNs reports whether a and b are equal, apart from the bits of NaNs.
func sameButNaNs(dt tensor.DType, a, b []byte) bool {
	if !dt.IsFloat() || len(a) != len(b) {
		return false
	}
	x, y := decodeFloats(dt, a), decodeFloats(dt, b)
	for i := range x {
		if math.Float64bits(x[i]) != math.Float64bits(y[i]) && !(math.IsNaN(x[i]) && math.IsNaN(y[i])) {
			return false
		}
	}
	return true
}

// choices returns the operations for which the function fit returns true, except join.
func choices(fit func(w what) bool) []what {
	return slices.DeleteFunc(operations(), func(w what) bool { return w.kind == message.Join || !fit(w) })
}

// pickSeed returns the value of the flag -seed, or a new seed if the flag is not set. It logs the seed.
func pickSeed(t *testing.T) uint64 {
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	t.Logf("seed %d; repeat with -args -seed %d", s, s)
	return s
}
