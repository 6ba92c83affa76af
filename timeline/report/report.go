// Package report reads the timelines of the ranks of a job, ours and Horovod's, and says who was late, where time went and what could
// be set otherwise; and it merges them to one trace.
//
// Files are read as streams, those of all ranks side by side. What is kept is bounded by the numbers of ranks and of names, each with a
// limit of its own, and not by the length of the files: some 60 MB at most, 4 for an honest job, and for each rank some 200 KB while its
// file is open. Input may be anything: what is no timeline is an error that says where and why, and what is damaged is used up to there.
package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/topo"
)

// Options are settings of the job that its files do not tell.
type Options struct {
	// FusionThresholdBytes is what a fused response could hold; 0 if that is not known.
	FusionThresholdBytes int64
	// CacheCapacity is how many responses could be remembered; 0 if that is not known.
	CacheCapacity int64
}

// Report is what the files say. Times ending in us are in microseconds, shares are from 0 to 1.
type Report struct {
	// Problems say what is missing, damaged or left out, and what the rest therefore cannot say.
	Problems []string `json:"problems"`
	// Horovod says that the file is Horovod's.
	Horovod bool `json:"horovod"`
	// Size is the number of ranks of the job, 0 if it is not known; Files those that have files, Missing those that have none.
	Size    int   `json:"size"`
	Files   []int `json:"ranks_with_files"`
	Missing []int `json:"ranks_without_files"`
	// Dropped are operations that the ranks could not write down.
	Dropped int64 `json:"dropped"`
	// ClockErrorUS is how far the times of any rank may be off from rank 0's; Unaligned are ranks of whose clock nothing is known.
	ClockErrorUS float64 `json:"clock_error_us"`
	Unaligned    []int   `json:"ranks_with_unknown_clock"`
	// DurationUS is from the first submission to the last end, and StartupUS what of it was before the first complete step; 0 if there are
	// no steps.
	DurationUS float64 `json:"duration_us"`
	StartupUS  float64 `json:"startup_us"`
	// Operations are counted once for each rank that wrote them, and Tensors likewise.
	Operations int64 `json:"operations"`
	Tensors    int64 `json:"tensors"`
	Errors     int64 `json:"errors"`
	// Steps are those from the first complete one on; 0 if no name comes again. StepUS is the median.
	Steps  int64   `json:"steps"`
	StepUS float64 `json:"step_us"`

	Lateness    Lateness     `json:"lateness"`
	Outside     Outside      `json:"outside"`
	Phases      []Phases     `json:"phases"`
	Fusion      Fusion       `json:"fusion"`
	Cache       Cache        `json:"cache"`
	Names       int64        `json:"names"`
	Slowest     []Tensor     `json:"slowest"`
	Largest     []Tensor     `json:"largest"`
	Suggestions []Suggestion `json:"suggestions"`
}

// Lateness says who was late, after the start-up but for what says otherwise.
type Lateness struct {
	// Verdict is the answer in words, and Startup that for the start-up; empty if there was none.
	Verdict string `json:"verdict"`
	Startup string `json:"startup"`
	// HeldUS is for how long a single rank held up all others, whichever it was, and AnybodyUS for how long any rank waited for another.
	HeldUS    float64 `json:"held_us"`
	AnybodyUS float64 `json:"anybody_waited_us"`
	// Compared are operations of which at least two ranks' submissions are known, Alone those of the global set of which one is.
	Compared int64 `json:"operations_compared"`
	Alone    int64 `json:"operations_of_one_rank"`
	// Arrivals says that for some ranks the time when rank 0 had their request stands for that of their submission.
	Arrivals bool `json:"from_arrivals"`
	// WaitedUS is what all ranks have waited together: for each operation and rank, from its own submission to the last one.
	WaitedUS float64    `json:"waited_us"`
	Ranks    []LateRank `json:"ranks"`
}

// LateRank is how late a rank was.
type LateRank struct {
	Rank int `json:"rank"`
	// Last is how often it was the last, alone or together with ranks that the clocks cannot tell from it.
	Last int64 `json:"last"`
	// CausedUS is its part of WaitedUS, and Share the same as a share. From one submission to the next later one, all who have submitted
	// wait because of who is next; in sum that is WaitedUS.
	CausedUS float64 `json:"caused_us"`
	Share    float64 `json:"share"`
	// HeldUS is for how long it held up all others, in wall time, of which no moment counts twice or for two ranks. HeldShare is its share
	// of what all ranks did so. StartupHeldUS is that of the start-up.
	HeldUS        float64 `json:"held_us"`
	HeldPerStepUS float64 `json:"held_per_step_us"`
	HeldShare     float64 `json:"held_share"`
	StartupHeldUS float64 `json:"startup_held_us"`
	// Lateness is that of its submissions after the first rank's.
	P50US float64 `json:"lateness_p50_us"`
	P90US float64 `json:"lateness_p90_us"`
	P99US float64 `json:"lateness_p99_us"`
	MaxUS float64 `json:"lateness_max_us"`
}

// Outside is the time in which a rank had no operation in flight, for the rank for which that is the least. It is of the complete
// steps after the start-up, divided by their number; of all time if there are none.
type Outside struct {
	Rank   int     `json:"rank"`
	US     float64 `json:"us_per_step"`
	StepUS float64 `json:"step_us"`
	Share  float64 `json:"share"`
}

// Phases are the time of a rank after the start-up in which at least one operation was in a phase. Operations overlap, and so do phases.
type Phases struct {
	Rank   int     `json:"rank"`
	Steps  int64   `json:"steps"`
	StepUS float64 `json:"step_us"`
	// US has waiting (for others' submissions), negotiation (from the last one to the grant), queue, copies, exchange, reduce and other; and
	// outside, the time without any operation in flight.
	US map[string]float64 `json:"us"`
}

// Fusion says what ran together. It is of our files only.
type Fusion struct {
	Responses   int64   `json:"responses"`
	MeanTensors float64 `json:"mean_tensors"`
	P50Tensors  int64   `json:"p50_tensors"`
	MaxTensors  int64   `json:"max_tensors"`
	MeanBytes   float64 `json:"mean_bytes"`
	P50Bytes    int64   `json:"p50_bytes"`
	MaxBytes    int64   `json:"max_bytes"`
	// ThresholdBytes is that of the options, 0 if it is not known, and Fill the mean share of it.
	ThresholdBytes int64   `json:"threshold_bytes"`
	Fill           float64 `json:"fill"`
}

// Cache says how requests travelled. The steady ones are without the first of each name.
type Cache struct {
	Hits         int64 `json:"hits"`
	Misses       int64 `json:"misses"`
	SteadyHits   int64 `json:"steady_hits"`
	SteadyMisses int64 `json:"steady_misses"`
}

// Tensor is one by its name, over all ranks. Its time is from submission to end.
type Tensor struct {
	Name    string  `json:"name"`
	Kind    string  `json:"kind"`
	Count   uint64  `json:"count"`
	TotalUS float64 `json:"total_us"`
	MeanUS  float64 `json:"mean_us"`
	P99US   float64 `json:"p99_us"`
	MaxUS   float64 `json:"max_us"`
	Bytes   int64   `json:"bytes"`
	DType   string  `json:"dtype"`
	Shape   string  `json:"shape"`
	Errors  int64   `json:"errors"`
}

// Suggestion is what could be done, and why.
type Suggestion struct {
	// Setting is its name, if it is one.
	Setting string `json:"setting,omitempty"`
	Do      string `json:"do"`
	Because string `json:"because"`
}

const top = 10

func micros[T int64 | float64 | time.Duration](ns T) float64 { return float64(ns) / nanosPerMicro }

// Report reads the files to their ends.
func (j *Job) Report(o Options) (*Report, error) {
	c, err := j.collect()
	if err != nil {
		return nil, err
	}
	r := &Report{
		Problems: append([]string{}, j.problems...), Horovod: j.horovod, Size: j.size, Operations: c.operations, ClockErrorUS: micros(c.clockErr),
		Files: []int{}, Missing: []int{}, Unaligned: []int{}, Names: int64(len(c.names.names) - 1),
	}
	late := c.late.Findings()
	r.fillRanks(j, c, late.Ranks)
	r.fillLateness(late)
	r.fillTensors(c)
	r.Fusion = Fusion{
		Responses: int64(c.responses.N), MeanTensors: c.responses.Mean(), P50Tensors: c.responses.Quantile(.5), MaxTensors: c.responses.Max,
		MeanBytes: c.responseBytes.Mean(), P50Bytes: c.responseBytes.Quantile(.5), MaxBytes: c.responseBytes.Max,
		ThresholdBytes: o.FusionThresholdBytes,
	}
	if o.FusionThresholdBytes > 0 {
		r.Fusion.Fill = r.Fusion.MeanBytes / float64(o.FusionThresholdBytes)
	}
	r.fillProblems(c)
	r.Lateness.Verdict, r.Lateness.Startup = r.verdict(late), r.startup(late)
	r.Suggestions = r.suggest(c, late, o)
	return r, nil
}

func (r *Report) fillRanks(j *Job, c *collection, late []*analysis.RankLateness) {
	begin, end := time.Duration(math.MaxInt64), time.Duration(never)
	has := make(map[int]bool)
	for _, s := range c.streams {
		f, k := s.files, s.rankStats
		has[f.rank] = true
		r.Files = append(r.Files, f.rank)
		r.Dropped += f.dropped()
		r.Tensors += k.tensors
		r.Errors += k.errors
		r.Cache.Hits += k.hits
		r.Cache.Misses += k.misses
		r.Cache.SteadyHits += k.steadyHits
		r.Cache.SteadyMisses += k.steadyMisses
		if !f.clock.known {
			r.Unaligned = append(r.Unaligned, f.rank)
		}
		if k.any {
			begin, end = min(begin, k.begin), max(end, k.end)
		}
		p := Phases{Rank: f.rank, Steps: k.steps.steps(), StepUS: micros(k.steps.lengths.Quantile(.5)), US: make(map[string]float64)}
		for phase, name := range phaseNames {
			p.US[name] = micros(k.phases[phase].sum())
		}
		o := k.outside()
		o.Rank = f.rank
		p.US[outside] = o.US * float64(max(p.Steps, 1))
		if r.Outside.StepUS == 0 || o.StepUS > 0 && o.Share < r.Outside.Share {
			r.Outside = o
		}
		r.Phases = append(r.Phases, p)
		if r.Steps == 0 {
			r.Steps, r.StepUS = p.Steps, p.StepUS
		}
	}
	if j.horovod {
		// The ranks that have sent requests are those that there are.
		for _, s := range late {
			r.Size = max(r.Size, s.Rank+1)
		}
	}
	for rank := range r.Size {
		if !has[rank] {
			r.Missing = append(r.Missing, rank)
		}
	}
	if begin < end {
		r.DurationUS = micros(end - begin)
		if c.steadyFrom != never {
			r.StartupUS = micros(max(c.steadyFrom-begin, 0))
		}
	}
}

// outside returns the time without an operation in flight, in the complete steps if there are any: when the last one ended is not known.
func (k *rankStats) outside() (o Outside) {
	all, inside, steps := k.end-max(k.begin, k.steadyFrom), k.inside.sum(), int64(1)
	if complete := k.steps.steps() - 1; complete > 0 {
		all, inside, steps = k.steps.begin-k.steadyFrom, k.stepsInside, complete
	}
	if all > 0 {
		o.StepUS = micros(all) / float64(steps)
		o.US = max(micros(all-inside), 0) / float64(steps)
		o.Share = o.US / o.StepUS
	}
	return o
}

func (r *Report) fillLateness(f *analysis.Lateness) {
	l := &r.Lateness
	l.Compared, l.Alone, l.Arrivals = f.Compared, f.Alone, f.Arrivals
	l.WaitedUS, l.AnybodyUS, l.HeldUS = micros(f.Waited), micros(f.Anybody), micros(f.Held())
	l.Ranks = []LateRank{}
	for _, s := range f.Ranks {
		late := LateRank{
			Rank: s.Rank, Last: s.Last, CausedUS: micros(s.Caused), Share: f.Share(s), HeldUS: micros(s.Held), StartupHeldUS: micros(s.StartupHeld),
			P50US: micros(s.Lateness.Quantile(.5)), P90US: micros(s.Lateness.Quantile(.9)), P99US: micros(s.Lateness.Quantile(.99)),
			MaxUS: micros(s.Lateness.Max),
		}
		if l.HeldUS > 0 {
			late.HeldShare = late.HeldUS / l.HeldUS
		}
		if r.Steps > 0 {
			late.HeldPerStepUS = late.HeldUS / float64(r.Steps)
		}
		l.Ranks = append(l.Ranks, late)
	}
}

func (r *Report) fillTensors(c *collection) {
	all := make([]Tensor, 0, len(c.tensors))
	for id, n := range c.tensors {
		if id == int(noName) || n.total.N == 0 {
			continue
		}
		all = append(all, Tensor{
			Name: c.names.names[id], Kind: n.kind, Count: n.total.N, TotalUS: micros(n.total.Sum), MeanUS: micros(n.total.Mean()),
			P99US: micros(n.total.Quantile(.99)), MaxUS: micros(n.total.Max), Bytes: n.bytes, DType: n.dtype, Shape: n.shape, Errors: n.errors,
		})
	}
	pick := func(by func(a, b Tensor) int) []Tensor {
		slices.SortFunc(all, func(a, b Tensor) int { return cmp.Or(by(a, b), cmp.Compare(a.Name, b.Name)) })
		return slices.Clone(all[:min(len(all), top)])
	}
	r.Slowest = pick(func(a, b Tensor) int { return cmp.Compare(b.TotalUS, a.TotalUS) })
	r.Largest = pick(func(a, b Tensor) int { return cmp.Compare(b.Bytes, a.Bytes) })
	r.Largest = slices.DeleteFunc(r.Largest, func(t Tensor) bool { return t.Bytes == 0 })
}

func (r *Report) fillProblems(c *collection) {
	add := func(format string, args ...any) { r.Problems = append(r.Problems, fmt.Sprintf(format, args...)) }
	switch {
	case len(r.Missing) == 0:
	case r.Horovod:
		add("Horovod writes rank 0's file alone: other ranks' requests are known by their arrival at rank 0, those that were cached not at all")
	default:
		add("no file of %s: of operations on the global set, arrivals at rank 0 stand for their submissions, if rank 0's file has them", topo.FormatRanks(r.Missing))
	}
	if r.Dropped > 0 {
		add("%d operations were dropped, because a rank could not write as fast or at all: what follows is without them", r.Dropped)
	}
	if len(r.Unaligned) > 0 {
		add("%s: nothing is known of the clock but the time of day, so lateness is not judged", topo.FormatRanks(r.Unaligned))
	}
	if c.malformed > 0 {
		add("%d events could not be read and are left out", c.malformed)
	}
	if c.unfinished > 0 {
		add("%d operations have a beginning and no end, and are left out", c.unfinished)
	}
	if c.tooMany > 0 {
		add("more than %d operations are open at a time: %d events are left out", maxOpen, c.tooMany)
	}
	if c.names.full() {
		add("there are more than %d names of tensors: the rest are counted, but not by name", maxNames)
	}
	if r.Operations == 0 {
		add("there is no operation in the files")
	}
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
