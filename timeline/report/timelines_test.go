package report

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// training simulates a data-parallel training job: in each step, ranks compute, submit gradients and wait for
// them. Times are in us.
type training struct {
	ranks, steps, gradients int
	// compute returns the time from the beginning of a step to its first gradient.
	compute func(rank, step int) int
	// backward is the time between the submissions of two gradients. A rank waits for all gradients at the
	// end of the step. If oneByOne is set, it waits for each gradient before it submits the next one.
	backward int
	oneByOne bool
	// exchange is the time that the exchange of a gradient takes. skew[r] is how much later rank r gets the
	// result than the first rank that gets it. trip is the travel time of a message between rank 0 and a rank
	// on another host.
	exchange int
	skew     []int
	trip     int
	// starts is the rank that begins to broadcast its parameters later than the other ranks. lateBy is how
	// much later it begins.
	starts, lateBy int
	// hosts is the number of hosts. Each host has its own clock. Rank r is on host r mod hosts. If firstHost
	// is set, only the ranks on host 0 write files.
	hosts     int
	firstHost bool
}

// trainingRun is the state of a training while its timelines are written.
type trainingRun struct {
	training
	rng     *rand.Rand
	files   []*file
	started []int // indexed by rank: the time on rank 0's clock at which the rank's ts is 0
	now     []int // indexed by rank: the current time
	lane    []int // indexed by rank: the end of the operation granted last
	number  int
	seen    map[string]bool
}

// write simulates the training and writes the timelines to a folder.
func (t training) write(tb testing.TB, dir string, rng *rand.Rand) {
	r := &trainingRun{training: t, rng: rng, seen: make(map[string]bool), lane: make([]int, t.ranks)}
	begin := 5000 * ms
	for rank := range t.ranks {
		host, at := rank%t.hosts, rng.IntN(3000*ms)
		if rank == 0 {
			at = 0
		}
		id := rankID{rank: rank, size: t.ranks, host: fmt.Sprint("h", host), domain: fmt.Sprint("d", host),
			epoch: 1, monotonic: at + host*77_000*ms}
		f := newFile(id)
		if host > 0 {
			f.clock(0, at+rng.IntN(101)-50, 100)
		}
		r.files, r.started, r.now = append(r.files, f), append(r.started, at),
			append(r.now, begin+rng.IntN(ms))
	}
	r.now[t.starts] += t.lateBy
	// First, the parameters are broadcast together. Then objects are broadcast one after the other, and each
	// of their names occurs twice.
	r.submit("BROADCAST", 12, 0, false)
	for range 2 {
		r.submit("OBJECT", 2, 10*us, true)
	}
	for step := range t.steps {
		for rank := range r.now {
			r.now[rank] += t.compute(rank, step)
		}
		r.submit("ALLREDUCE", t.gradients, t.backward, t.oneByOne)
	}
	for rank, f := range r.files {
		name := "t.json"
		if rank > 0 {
			name = fmt.Sprintf("t.rank%d.json", rank)
		}
		put(tb, dir, name, f.end(r.now[rank]-r.started[rank], 0))
		if t.firstHost && rank%t.hosts > 0 {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

// submit makes all ranks submit the given number of operations and wait for them. gap is the time between two
// submissions.
func (r *trainingRun) submit(kind string, count, gap int, oneByOne bool) {
	for i := range count {
		name := fmt.Sprint(strings.ToLower(kind), ".", i)
		if i > 0 {
			for rank := range r.now {
				r.now[rank] += gap
			}
		}
		ended := r.run(strings.Replace(kind, "OBJECT", "BROADCAST", 1), name)
		if oneByOne || i == count-1 {
			for rank := range r.now {
				r.now[rank] = max(r.now[rank], ended[rank]) + 100*us
			}
		}
	}
}

// run simulates one operation, which each rank submits at its current time. It returns the end of the
// operation, indexed by rank.
func (r *trainingRun) run(kind, name string) []int {
	r.number++
	ready, arrivals := 0, make([]int, r.ranks)
	for rank, at := range r.now {
		arrivals[rank] = at + 20*us
		if rank%r.hosts > 0 {
			arrivals[rank] += r.trip
		}
		ready = max(ready, arrivals[rank])
	}
	granted, begun, ended, start := make([]int, r.ranks), make([]int, r.ranks), make([]int, r.ranks), 0
	for rank := range r.ranks {
		granted[rank] = ready + 30*us
		if rank%r.hosts > 0 {
			granted[rank] += r.trip
		}
		begun[rank] = max(granted[rank], r.lane[rank]) + 10*us
		start = max(start, begun[rank])
	}
	for rank, f := range r.files {
		ended[rank] = start + r.exchange + r.rng.IntN(1+r.exchange/50)
		if r.skew != nil {
			ended[rank] += r.skew[rank]
		}
		r.lane[rank] = ended[rank]
		off := r.started[rank]
		o := testOp{
			kind: kind, number: r.number, granted: granted[rank] - off, begun: begun[rank] - off,
			ended: ended[rank] - off, backend: "shm",
			activities: []testActivity{{"SHM_" + kind, ended[rank] - begun[rank]}},
			tensors: []testTensor{{name: name, submitted: r.now[rank] - off, bytes: 1 << 20,
				miss: !r.seen[name]}},
		}
		if r.hosts > 1 {
			o.backend, o.activities[0].name = "tcp", "TCP_"+kind
		}
		if rank == 0 {
			o.tensors[0].arrivals = arrivals
		}
		f.op(o)
	}
	r.seen[name] = true
	return ended
}

// Each job has a known problem and is simulated in 20 random variations. The verdict and the first suggestion
// name the problem and do not blame any other rank.
func TestKnownTimelines(t *testing.T) {
	variations := uint64(20)
	if raceEnabled { // more variations take long and find no further races
		variations = 2
	}
	// normal returns a normally distributed duration. Its mean is the parameter us, and its standard
	// deviation is 3 % of the mean.
	normal := func(rng *rand.Rand, us int) int {
		return int(float64(us) * max(1+0.03*rng.NormFloat64(), 0.8))
	}
	slow := func(rng *rand.Rand, job *training, usual, rank int) {
		factor := 1.3 + 2*rng.Float64()
		job.compute = func(r, _ int) int {
			if r == rank {
				return int(factor * float64(normal(rng, usual)))
			}
			return normal(rng, usual)
		}
	}
	for name, c := range map[string]struct {
		// make changes the given job. Before the change, each rank computes for about the time in usual. If
		// the change makes one rank the culprit, it is the given rank.
		make func(rng *rand.Rand, job *training, usual, rank int)
		// guilty is set if the given rank is the culprit. Otherwise the verdict must begin with the text in
		// the field verdict, and the first suggestion with the text in the field suggestion.
		guilty              bool
		verdict, suggestion string
	}{
		"a slow rank": {make: slow, guilty: true},
		"a slow rank, another starts late": {make: func(rng *rand.Rand, job *training, usual, rank int) {
			slow(rng, job, usual, rank)
			job.starts, job.lateBy = (rank+1+rng.IntN(job.ranks-1))%job.ranks, 1000*ms+rng.IntN(20_000*ms)
		}, guilty: true},
		"slow data on all ranks": {make: func(rng *rand.Rand, job *training, usual, _ int) {
			job.compute = func(int, int) int {
				return normal(rng, usual) + int(float64(usual)*(1.4+1.2*rng.Float64()))
			}
		}, verdict: "no rank ", suggestion: "look at the program"},
		"slow data on one rank": {make: func(rng *rand.Rand, job *training, usual, rank int) {
			every := 1 + rng.IntN(3) // either every batch, every second or every third batch is slow
			job.compute = func(r, step int) int {
				if r == rank && step%every == 0 {
					return normal(rng, usual) + every*int(float64(usual)*(0.4+1.2*rng.Float64()))
				}
				return normal(rng, usual)
			}
		}, guilty: true},
		"a slow network": {make: func(rng *rand.Rand, job *training, usual, _ int) {
			job.hosts, job.trip = 2, 100*us+rng.IntN(5*ms)
			job.exchange = int(float64(usual)*(1+3*rng.Float64())) / job.gradients
			for range job.ranks { // as in a ring, some ranks get the results later than others do
				job.skew = append(job.skew, rng.IntN(1+job.exchange/3))
			}
		}, verdict: "no rank ", suggestion: "look at the network"},
		// The rank begins each step a little later than the others, and then submits as fast as the others.
		"a rank a little behind": {make: func(rng *rand.Rand, job *training, usual, rank int) {
			job.oneByOne, job.gradients, job.backward = false, 5+rng.IntN(5), usual/10
			job.compute = func(r, _ int) int {
				if r == rank {
					return usual + usual/100 + rng.IntN(usual/100)
				}
				return usual
			}
		}, verdict: "no rank held up all others for long", suggestion: "look at the program"},
		"two slow ranks": {make: func(rng *rand.Rand, job *training, usual, _ int) {
			job.ranks = max(job.ranks, 4)
			job.compute = func(r, _ int) int {
				if r == 1 || r == 3 {
					return normal(rng, usual) + usual/2
				}
				return normal(rng, usual)
			}
		}, verdict: "ranks 1 and 3 are late together", suggestion: "look at what each of ranks 1 and 3 does"},
		"a slow rank under mpirun": {make: func(rng *rand.Rand, job *training, usual, rank int) {
			slow(rng, job, usual, rank)
			job.hosts, job.trip, job.firstHost = 2, 20*us+rng.IntN(200*us), rng.IntN(2) == 0
		}, guilty: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range variations {
				rng := rand.New(rand.NewPCG(seed, 17))
				usual := 5*ms + rng.IntN(50*ms)
				job := training{
					ranks: []int{2, 3, 4, 8}[rng.IntN(4)], steps: 50, gradients: 1 + rng.IntN(6),
					backward: 1 + rng.IntN(usual/10), hosts: 1,
					oneByOne: rng.IntN(3) == 0, compute: func(int, int) int { return normal(rng, usual) },
				}
				job.exchange = usual / (20 + rng.IntN(80)) / job.gradients
				rank := rng.IntN(job.ranks)
				c.make(rng, &job, usual, rank)
				// As in real jobs, the first step is slower, because caches are cold and the ranks do not
				// begin together.
				compute, warm := job.compute, rng.Perm(job.ranks)
				job.compute = func(rank, step int) int {
					if step == 0 {
						return compute(rank, step) + warm[rank]*usual
					}
					return compute(rank, step)
				}
				lost := job.lost(rank)
				dir := t.TempDir()
				job.write(t, dir, rng)
				r := reportOf(t, dir)

				wrong := func(what string) {
					var text bytes.Buffer
					if err := r.WriteText(&text); err != nil {
						t.Error(err)
					}
					t.Errorf("variation %d, %d ranks, %d gradients: %s\n%s", seed, job.ranks, job.gradients,
						what, text.String())
				}
				suggestion := ""
				if len(r.Suggestions) > 0 {
					suggestion = r.Suggestions[0].Do
				}
				switch {
				case c.guilty && !strings.HasPrefix(r.Lateness.Verdict,
					fmt.Sprintf("rank %d held up all others for ", rank)):
					wrong(fmt.Sprintf("want rank %d blamed", rank))
				case c.guilty && !strings.HasPrefix(suggestion, fmt.Sprintf("look at what rank %d does",
					rank)):
					wrong(fmt.Sprintf("want the suggestion to look at rank %d", rank))
				case !strings.HasPrefix(r.Lateness.Verdict, c.verdict):
					wrong(fmt.Sprintf("want the verdict that %s", c.verdict))
				case !strings.HasPrefix(suggestion, c.suggestion):
					wrong(fmt.Sprintf("want the suggestion to %s", c.suggestion))
				}
				if got := r.Lateness.Ranks[rank].HeldPerStepUS; c.guilty && math.Abs(got-lost) > 0.15*lost {
					wrong(fmt.Sprintf("want %s lost per step by rank %d, got %s", duration(lost), rank,
						duration(got)))
				}
				if job.lateBy > 0 &&
					!strings.Contains(r.Lateness.Startup, fmt.Sprintf("; rank %d held up all others for ",
						job.starts)) {
					wrong(fmt.Sprintf("want rank %d to have held up the start", job.starts))
				}
				sum := 0.0
				for _, l := range r.Lateness.Ranks {
					sum += l.HeldUS + l.StartupHeldUS
				}
				if sum > r.DurationUS {
					wrong(fmt.Sprintf("the ranks held up all others for %s in sum, of %s", duration(sum),
						duration(r.DurationUS)))
				}
			}
		})
	}
}

// If all ranks of a host are late together, the verdict names the host. The suggestion names all hosts, or
// none if one of them is unknown.
func TestLateHosts(t *testing.T) {
	odd, upper := func(rank int) int { return rank % 2 }, func(rank int) int { return rank / 2 }
	for _, c := range []struct {
		hosts     int
		firstHost bool
		late      func(rank int) int
		want      [2]string
	}{
		{2, false, odd, [2]string{"ranks 1 and 3, all ranks of host h1, are late together", "other load on host h1"}},
		{4, false, odd, [2]string{"ranks 1 and 3 are late together", "other load on hosts h1, h3"}},
		{2, true, upper, [2]string{"ranks 2 and 3 are late together", "other load on their hosts"}},
	} {
		want := c.want
		job := training{ranks: 4, steps: 20, gradients: 2, backward: ms, exchange: ms, hosts: c.hosts,
			firstHost: c.firstHost, trip: 50 * us,
			compute: func(rank, _ int) int { return 10*ms + c.late(rank)*5*ms }}
		dir := t.TempDir()
		job.write(t, dir, rand.New(rand.NewPCG(1, 2)))
		r := reportOf(t, dir)
		if len(r.Suggestions) == 0 || !strings.HasPrefix(r.Lateness.Verdict, want[0]) ||
			!strings.HasSuffix(r.Suggestions[0].Do, want[1]) {
			t.Errorf("%d hosts: got %q and %+v, want %q", c.hosts, r.Lateness.Verdict, r.Suggestions, want)
		}
	}
}

// lost returns how much longer the rank computes per step than all other ranks. It replaces t.compute by a
// function that returns the same random times when it is called again.
func (t *training) lost(rank int) float64 {
	table, sum := make([][]int, t.steps), 0
	for step := range table {
		others := 0
		for r := range t.ranks {
			us := t.compute(r, step)
			table[step] = append(table[step], us)
			if r != rank {
				others = max(others, us)
			}
		}
		sum += max(table[step][rank]-others, 0)
	}
	t.compute = func(r, step int) int { return table[step][r] }
	return float64(sum) / float64(t.steps)
}
