package conformance

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops/tcp"
)

// These are the values of the parameters of a trial, other than its operation. With -full, all values are
// combined, except that a hash of the trial's number chooses its joining and whether its inputs are wild.
var (
	rankCounts    = []int{1, 2, 3, 4, 5, 6, 8}
	elementCounts = []int{0, 1, 7, 64, 1000, 65537}
	modes         = []mode{plain, fused, cached, grouped, subset}
	joinings      = []joining{nobody, withoutData, withNothing}
	links         = []link{
		{testcluster.Mem, oneHost, false, 0}, {testcluster.Mem, oneHost, true, 0},
		{testcluster.TCP, oneHost, false, 0}, {testcluster.TCP, oneHost, true, 0},
		{testcluster.SHM, oneHost, false, 0}, {testcluster.SHM, oneHost, true, 0},
		{testcluster.Mem, pairsOfRanks, false, 0}, {testcluster.TCP, lastApart, false, 0},
		{testcluster.Mem, firstApart, true, 0}, {testcluster.TCP, alternating, false, 0},
	}
	// byAlgorithm are further links for TestConformance, which together have each algorithm of ops/tcp. On
	// the last two, the algorithms run between hosts.
	byAlgorithm = []link{
		{testcluster.Mem, oneHost, false, 1}, {testcluster.Mem, oneHost, false, 2},
		{testcluster.Mem, oneHost, false, 3}, {testcluster.Mem, oneHost, false, 4},
		{testcluster.Mem, oneHost, false, 5},
		{testcluster.Mem, pairsOfRanks, false, 1}, {testcluster.Mem, pairsOfRanks, false, 2},
	}
)

// mode is the way in which the tensors of a trial are submitted.
type mode uint8

const (
	plain   mode = iota // one tensor
	fused               // several tensors at the same time, which are fused
	cached              // one tensor three times, with different data
	grouped             // several tensors as a group
	subset              // one tensor, in a process set that does not have all ranks
)

func (m mode) String() string { return [...]string{"plain", "fused", "cached", "grouped", "subset"}[m] }

// joining says whether some ranks join before the other ranks submit, and what the joined ranks contribute.
type joining uint8

const (
	nobody joining = iota
	withoutData
	withNothing // the joined ranks submit empty contributions (Request.Empty)
)

// apart says which member has its tensor in host memory while those of the other members are on devices.
type apart uint8

const (
	noneApart apart = iota
	firstOnHost
	lastOnHost
)

// layout is the way in which the ranks are placed on hosts.
type layout uint8

const (
	oneHost      layout = iota
	pairsOfRanks        // 2+2, 2+2+2 and so on; the last host may have one rank
	lastApart           // the last rank is on a host of its own, as in 3+1
	firstApart          // the first rank is on a host of its own, as in 1+3
	alternating         // even and odd ranks are on two hosts
)

func (l layout) String() string {
	return [...]string{"", "/pairs", "/last-apart", "/first-apart", "/alternating"}[l]
}

// hosts returns the hosts of the ranks, or nil if the transport decides whether the ranks share memory.
func (l layout) hosts(ranks int) (hosts []string) {
	for r := range ranks {
		host := map[layout]int{pairsOfRanks: r / 2, lastApart: (r + 1) / ranks, firstApart: min(r, 1),
			alternating: r % 2}[l]
		if l != oneHost {
			hosts = append(hosts, fmt.Sprint("host", host))
		}
	}
	return hosts
}

// link is a transport with a layout, a kind of negotiation, in lock-step or not, and a choice of algorithms.
type link struct {
	transport testcluster.Transport
	layout    layout
	lockstep  bool
	// algorithm is 0 for the default table of ops/tcp. 1 stands for the first algorithm of each kind of
	// operations, 2 for the second, and so on. Operations that this algorithm cannot serve, such as sums of
	// 16-bit floats in a ring, use the default one.
	algorithm int
}

func (l link) String() string {
	text := l.transport.String() + l.layout.String()
	if l.algorithm > 0 {
		text += fmt.Sprint("/algorithm-", l.algorithm)
	}
	if l.lockstep {
		return text + "/lockstep"
	}
	return text + "/event"
}

// forced returns the rules that choose the algorithms of a link whose field algorithm is not 0.
func (l link) forced() (t tcp.Table) {
	for k := message.Kind(0); int(k) < message.NumKinds; k++ {
		if all := tcp.Algorithms(k); l.algorithm > 0 && l.algorithm <= len(all) {
			t = append(t, tcp.Rule{Kind: k, Algorithm: all[l.algorithm-1]})
		}
	}
	return t
}

// sensible reports whether the operation is a valid one. Bools support minimum and maximum, but no
// arithmetic. Adasum is an allreduce of floats. Only an allreduce of float32 or float64 can be compressed, to
// a 16-bit float. A scale must not be NaN.
func sensible(w what) bool {
	isFloat := w.dt >= tensor.Float16 && w.dt <= tensor.Float64
	isHalf := func(dt tensor.DType) bool { return dt == tensor.Float16 || dt == tensor.BFloat16 }
	switch {
	case w.dt < tensor.Uint8 || w.dt > tensor.Bool || w.op < tensor.Average || w.op > tensor.AverageActive:
		return false
	case w.dt == tensor.Bool && (w.op != tensor.Min && w.op != tensor.Max || w.pre != 1 || w.post != 1):
		return false
	case w.op == tensor.Adasum && (!isFloat || w.kind != message.Allreduce):
		return false
	case math.IsNaN(w.pre) || math.IsNaN(w.post):
		return false
	case w.wire != tensor.Invalid && (w.kind != message.Allreduce || !isFloat || isHalf(w.dt) ||
		!isHalf(w.wire)):
		return false
	}
	return true
}

// factors has pairs of a prescale and a postscale factor.
var factors = [][2]float64{{1, 1}, {1.5, 1}, {1, 0.3}, {-0.7, 2.5}}

// reductions returns all combinations of the parameters of a reduction. Some of these operations are not
// valid.
func reductions(factors [][2]float64) iter.Seq[what] {
	return func(yield func(what) bool) {
		for _, kind := range []message.Kind{message.Allreduce, message.Reduce, message.Reducescatter} {
			for dt := tensor.Invalid; dt <= tensor.Bool+1; dt++ {
				for op := tensor.NoReduce; op <= tensor.AverageActive+1; op++ {
					for wire := tensor.Invalid; wire <= tensor.Bool; wire++ {
						for _, f := range factors {
							w := what{kind: kind}
							w.dt, w.op, w.pre, w.post, w.wire = dt, op, f[0], f[1], wire
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

// operations returns all valid operations.
func operations() []what {
	var all []what
	for w := range reductions(factors) {
		if sensible(w) {
			all = append(all, w)
		}
	}
	for _, dt := range tensor.DTypes() {
		moved := reduction{dt: dt, pre: 1, post: 1}
		all = append(all, what{message.Allgather, false, moved}, what{message.Broadcast, false, moved},
			what{message.Alltoall, false, moved}, what{message.Alltoall, true, moved},
			what{message.Gather, false, moved}, what{message.Scatter, true, moved})
	}
	return append(all, what{kind: message.Barrier}, what{kind: message.Join})
}

// trial is one case of the test: an operation, and a value for each parameter.
type trial struct {
	what
	number   int
	ranks    int
	elements int
	mode     mode
	joining  joining
	inPlace  bool
	wild     bool
	// apart says whether a member has its tensor in host memory while those of the others are on devices.
	apart apart
}

func (c *trial) String() string {
	return fmt.Sprintf("case %d: %v, %d ranks, %d elements, %v, joining %d, in place %v, wild %v, apart %d",
		c.number, c.what, c.ranks, c.elements, c.mode, c.joining, c.inPlace, c.wild, c.apart)
}

// script is a trial together with the jobs that the ranks run for it.
type script struct {
	trial
	set     topo.ProcessSetID
	members []topo.Rank
	// rounds has the jobs of each round. The jobs of a round are submitted at the same time. The rounds run
	// one after the other.
	rounds [][]*job
	// joined has the members that join before the round with the number in the field join. Bit i stands for
	// member i.
	joined uint
	join   int
	last   agreement
	memory memory // see job
}

// sets returns the additional process sets of a job. One has all ranks but the first, and the other has every
// second rank. In a job with one rank, both sets have this rank.
func sets(ranks int) [][]topo.Rank {
	all := topo.UpTo(ranks)
	if ranks == 1 {
		return [][]topo.Rank{all, all}
	}
	var even []topo.Rank
	for r := 0; r < ranks; r += 2 {
		even = append(even, topo.Rank(r))
	}
	return [][]topo.Rank{all[1:], even}
}

// script returns the script of the trial. If m is not nil, it has the tensors of this process.
func (c trial) script(m memory) *script {
	s := &script{trial: c, members: topo.UpTo(c.ranks), memory: m}
	if c.mode == subset {
		which := c.number % 2
		s.set, s.members = topo.ProcessSetID(1+which), sets(c.ranks)[which]
	}
	if c.joining != nobody && c.kind != message.Join {
		s.joined = joiners(len(s.members), uint64(c.elements))
	}
	rounds, together := 1, 1
	switch {
	case c.mode == cached:
		rounds, s.join = 3, 1 // when ranks join before round 1, the request is already in the cache
	case (c.mode == fused || c.mode == grouped) && c.kind != message.Join:
		together = 3
	}
	for k := range rounds {
		s.rounds = append(s.rounds, s.jobs(k, together))
	}
	return s
}

// jobs returns the jobs of a round. The second job has a different number of elements from all other jobs.
func (s *script) jobs(round, together int) (jobs []*job) {
	for i := range together {
		j := &job{
			what: s.what, name: fmt.Sprintf("%d.%d", s.number, i), set: s.set, members: s.members,
			elements: s.elements,
			seed:     uint64(round + i), lead: uint64(s.number), wild: s.wild, inPlace: s.inPlace,
			memory: s.memory, apart: -1,
		}
		if s.apart != noneApart && (s.mode != cached || round == 1) {
			j.apart = (len(s.members) - 1) * int(s.apart-firstOnHost)
		}
		if i == 1 {
			j.elements = s.elements/3 + 1
		}
		if round >= s.join {
			j.joined, j.empty = s.joined, s.joining == withNothing
		}
		jobs = append(jobs, j)
	}
	return jobs
}

// run runs the part of the script that belongs to rank r. If r is not a member of the process set, run does
// nothing.
//
// If heard is nil, run does not check frames.
func (s *script) run(r *testcluster.Rank, heard *frames) {
	m := slices.Index(s.members, r.Rank)
	if m < 0 {
		return
	}
	joins := s.joined>>m&1 == 1
	for k, jobs := range s.rounds {
		if joins && k == s.join {
			s.runJoin(r)
			break
		}
		s.runRound(r, k, jobs)
	}
	if s.joined != 0 && !joins {
		s.runJoin(r)
	}
	if heard == nil {
		return
	}
	for _, j := range s.rounds[0] {
		s.checkFrames(r, j, heard)
	}
}

func (s *script) runRound(r *testcluster.Rank, k int, jobs []*job) {
	ops := make([]*testcluster.Op, len(jobs))
	for i, j := range jobs {
		ops[i] = j.submission(r)
	}
	if s.mode == grouped && s.kind.MovesData() {
		testcluster.Group(fmt.Sprintf("%d.group", s.number), ops...)
	}
	if err := r.Submit(ops...); err != nil {
		r.Fatalf("%v: round %d: %v", &s.trial, k, err)
	}
	for i, j := range jobs {
		_ = r.Wait(ops[i]) // the error is ignored here, because check decides whether an error is right
		if err := j.check(r, ops[i]); err != nil {
			r.Fatalf("%v: round %d: %v", &s.trial, k, err)
		}
	}
}

func (s *script) runJoin(r *testcluster.Rank) {
	op := testcluster.Over(s.set, testcluster.Join("join"))
	op.Request.Empty = s.joining == withNothing
	if s.memory != nil {
		s.memory.join(op)
	}
	r.Do(op)
	if last := op.Last(); !slices.Contains(s.members, last) {
		r.Errorf("%v: rank %d joined last", &s.trial, last)
	}
	if err := s.last.check([]byte{byte(op.Last())}); err != nil {
		r.Errorf("%v: who joined last: %v", &s.trial, err)
	}
}

// checkFrames checks that the cache was hit in mode cached, and that tensors were fused in the modes fused
// and grouped. The frames show this for all ranks except rank 0.
func (s *script) checkFrames(r *testcluster.Rank, j *job, heard *frames) {
	requests, granted := heard.take(r.Rank, j.name)
	if r.Rank == 0 {
		return
	}
	if s.mode == cached && s.joined == 0 && s.kind.MovesData() && requests != 1 {
		r.Errorf("%v: the request was sent in full %d times for 3 tensors of one name", &s.trial, requests)
	}
	s.checkFused(r, j, granted)
}

// checkFused checks the number of tensors that were granted together with that of j.
func (s *script) checkFused(r *testcluster.Rank, j *job, granted int) {
	fusible := s.kind.MovesData() && !s.kind.SendsRows()
	if s.device { // NCCL runs the other kinds without a buffer for several tensors
		fusible = s.kind == message.Allreduce || s.kind == message.Reduce
	}
	if together := s.mode == fused || s.mode == grouped; together && fusible && j.refusal(0) == "" &&
		granted != len(s.rounds[0]) {
		r.Errorf("%v: %d tensors were granted together, want %d", &s.trial, granted, len(s.rounds[0]))
	}
}

// unscaled returns the operations that have no factors.
func unscaled(operations []what) []what {
	return slices.DeleteFunc(operations, func(w what) bool {
		return w.kind.Reduces() && [2]float64{w.pre, w.post} != factors[0]
	})
}

// scaled returns the operation with the given factors, or w if that would not be a valid operation.
func (w what) scaled(f [2]float64) what {
	s := w
	s.pre, s.post = f[0], f[1]
	if w.kind.Reduces() && sensible(s) {
		return s
	}
	return w
}

// pairwise returns the trials for each link. Together they cover each pair of values of any two parameters.
// The factors are a parameter of their own, because each operation with each of them on each link would take
// four times as many trials. The links come second, because the numbers of ranks of what pairs adds for a
// longer column would be 1.
func pairwise() map[link][]trial {
	what, links := unscaled(operations()), slices.Concat(links, byAlgorithm)
	all := make(map[link][]trial)
	rankCounts, elementCounts := rankCounts, elementCounts
	if testing.Short() {
		rankCounts, elementCounts = rankCounts[:5], elementCounts[:5] // the largest take most of the time
	}
	sizes := []int{len(what), len(links), len(rankCounts), len(elementCounts), len(modes), len(joinings), 2,
		2, len(factors)}
	for i, row := range pairs(sizes) {
		l := links[row[1]]
		all[l] = append(all[l], trial{
			what: what[row[0]].scaled(factors[row[8]]), number: i, ranks: rankCounts[row[2]],
			elements: elementCounts[row[3]], mode: modes[row[4]],
			joining: joinings[row[5]], inPlace: row[6] == 1, wild: row[7] == 1,
		})
	}
	return all
}

// everything returns all trials of the operations with the given number of ranks. Trials with the same
// reference result are adjacent, so that this result is computed only once for them.
func everything(operations []what, ranks int) []trial {
	var all []trial
	for _, w := range operations {
		for _, elements := range elementCounts {
			for _, m := range modes {
				for _, inPlace := range []bool{false, true} {
					n := uint64(len(all))
					all = append(all, trial{
						what: w, number: len(all), ranks: ranks, elements: elements, mode: m,
						inPlace: inPlace,
						wild:    hash(n)%2 == 0, joining: joinings[hash(n, 1)%uint64(len(joinings))],
					})
				}
			}
		}
	}
	return all
}

// clusterTime limits the time of all trials on one cluster. Trials that take longer are assumed to hang.
const clusterTime = 20 * time.Minute

// runTrials runs trials on one cluster. The trials must have the same number of ranks. It adds the algorithms
// that were granted to used.
func runTrials(t *testing.T, l link, trials []trial, used map[tcp.Rule]bool) {
	if len(trials) == 0 {
		return
	}
	var scripts []*script
	for _, c := range trials {
		scripts = append(scripts, c.script(nil))
	}
	heard := newFrames()
	heard.used = used
	testcluster.Run(t, testcluster.Options{
		Ranks: trials[0].ranks, Transport: l.transport, Hosts: l.layout.hosts(trials[0].ranks),
		Sets: sets(trials[0].ranks), OnFrame: heard.hear,
		Table:    append(l.forced(), tcp.DefaultTable...),
		Deadline: clusterTime,
		Config: func(cfg *engine.Config) {
			cfg.Lockstep = l.lockstep
			if l.lockstep {
				cfg.CycleTime = 20 * time.Microsecond // the default is too slow for thousands of trials
			}
		},
	}, func(r *testcluster.Rank) {
		for _, s := range scripts {
			s.run(r, heard)
		}
	})
}

// checkForced checks that the operations of a link have used the link's algorithms, except for sums of 16-bit
// floats and Adasum, which may have others.
func checkForced(t *testing.T, l link, used map[tcp.Rule]bool) {
	if l.layout != oneHost {
		return // grants do not name the algorithms between hosts
	}
	for _, r := range l.forced() {
		if !used[r] {
			t.Errorf("%v was not granted by %v", r.Kind, r.Algorithm)
		}
		for u := range used {
			if u.Kind == r.Kind && !slices.Contains([]message.Algorithm{r.Algorithm, message.Direct,
				message.Exchange, message.HalvingDoubling}, u.Algorithm) {
				t.Errorf("%v was granted by %v, want %v", u.Kind, u.Algorithm, r.Algorithm)
			}
		}
	}
}

// Every operation gives the result of the reference, in every mode and on every link.
func TestConformance(t *testing.T) {
	if *full {
		testEverything(t)
		return
	}
	var count atomic.Int64
	t.Run("pairs", func(t *testing.T) {
		for l, trials := range pairwise() {
			t.Run(l.String(), func(t *testing.T) {
				t.Parallel()
				used := make(map[tcp.Rule]bool)
				slices.SortStableFunc(trials, func(a, b trial) int { return cmp.Compare(a.ranks, b.ranks) })
				for some := range chunks(trials, func(a, b trial) bool { return a.ranks == b.ranks }) {
					runTrials(t, l, some, used)
					count.Add(int64(len(some)))
				}
				checkForced(t, l, used)
			})
		}
	})
	t.Logf("%d cases", count.Load())
}

// chunks cuts s into parts. It cuts between two neighbouring elements if the function alike returns false for
// them.
func chunks[T any](s []T, alike func(a, b T) bool) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		for len(s) > 0 {
			n := 1
			for n < len(s) && alike(s[n-1], s[n]) {
				n++
			}
			if !yield(s[:n]) {
				return
			}
			s = s[n:]
		}
	}
}

// testEverything runs all combinations, in groups of 500 trials. A group runs on all links in parallel.
func testEverything(t *testing.T) {
	const atOnce = 500
	links := slices.Concat(links, byAlgorithm)
	began, count := time.Now(), 0
	for _, ranks := range rankCounts {
		all := everything(operations(), ranks)
		done := 0
		for some := range slices.Chunk(all, atOnce) {
			t.Run(fmt.Sprintf("ranks=%d/%d", ranks, done), func(t *testing.T) {
				for _, l := range links {
					t.Run(l.String(), func(t *testing.T) {
						t.Parallel()
						runTrials(t, l, some, make(map[tcp.Rule]bool))
					})
				}
			})
			done += len(some)
			count += len(some) * len(links)
			t.Logf("%d ranks: %d of %d cases on each of %d links; %d in all, after %v",
				ranks, done, len(all), len(links), count, time.Since(began).Round(time.Second))
			if t.Failed() {
				return
			}
		}
	}
	t.Logf("%d cases", count)
}

// A rank submits an operation that is not valid. The rank itself must refuse it, without negotiation.
func TestRefusals(t *testing.T) {
	refused := 0
	testcluster.Run(t, testcluster.Options{Ranks: 1}, func(r *testcluster.Rank) {
		try := func(text any, op *testcluster.Op) {
			refused++
			if err := r.Submit(op); err == nil {
				r.Fatalf("%v was not refused", text)
			}
		}
		for w := range reductions(append(slices.Clone(factors), [2]float64{math.NaN(), 1},
			[2]float64{1, math.NaN()})) {
			if sensible(w) {
				continue
			}
			op := testcluster.Allreduce("x", w.dt, tensor.Shape{1}, w.op, make([]byte, 8))
			op.Request.Kind = w.kind
			op.Request.Prescale, op.Request.Postscale, op.Request.Wire = w.pre, w.post, w.wire
			op.Output = op.Input
			try(w, op)
		}
		for _, dt := range []tensor.DType{tensor.Invalid, tensor.Bool + 1} {
			for _, op := range []*testcluster.Op{
				testcluster.Allgather("x", dt, tensor.Shape{1}, nil),
				testcluster.Broadcast("x", dt, tensor.Shape{1}, 0, nil),
				testcluster.Alltoall("x", dt, tensor.Shape{1}, nil, nil),
			} {
				try(fmt.Sprintf("%v of %v", op.Request.Kind, dt), op)
			}
		}
		for _, op := range []*testcluster.Op{testcluster.Barrier("x"), testcluster.Join("x")} {
			testcluster.Group("g", op)
			try(fmt.Sprintf("a group of %v", op.Request.Kind), op)
		}
		try("a negative dimension", testcluster.Allgather("x", tensor.Int8, tensor.Shape{-1}, nil))
		try("a root below 0", testcluster.Broadcast("x", tensor.Int8, tensor.Shape{1}, -1, []byte{1}))
		try("a tensor without a name", testcluster.Allgather("", tensor.Int8, tensor.Shape{1}, []byte{1}))
	})
	t.Logf("%d combinations were refused", refused)
}
