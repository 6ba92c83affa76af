// Package report reads the timelines of the ranks of a job, in gohvd's and Horovod's format, and reports
// which ranks were late, where the time went and which settings could be changed. It also merges the
// timelines into one trace.
//
// Files are read as streams, the files of all ranks side by side. Memory is bounded by the numbers of ranks
// and of names, each with a limit of its own, and not by the length of the files: about 60 MB at most, 4 MB
// for an ordinary job, and for each rank about 200 KB while its file is open. Input may be anything: a file
// that is not a timeline is an error with place and reason, and a damaged file is used up to the damage.
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

// Options are settings of the job that its files do not contain.
type Options struct {
	// FusionThresholdBytes is the fusion threshold of the job; 0 if it is not known.
	FusionThresholdBytes int64
	// CacheCapacity is the number of responses that the job's cache can hold; 0 if it is not known.
	CacheCapacity int64
}

// Report is what the files show. Fields ending in US are in microseconds, shares are from 0 to 1.
type Report struct {
	// Problems describe what is missing, damaged or left out, and what the report therefore lacks.
	Problems []string `json:"problems"`
	// Horovod says that the file is Horovod's.
	Horovod bool `json:"horovod"`
	// Size is the number of ranks of the job, 0 if it is not known. Files are the ranks with files, Missing
	// the ranks without.
	Size    int   `json:"size"`
	Files   []int `json:"ranks_with_files"`
	Missing []int `json:"ranks_without_files"`
	// Dropped is the number of operations that the ranks could not write.
	Dropped int64 `json:"dropped"`
	// ClockErrorUS is the greatest error of any rank's times relative to rank 0's. Unaligned are the ranks
	// for whose clock no such bound is known.
	ClockErrorUS float64 `json:"clock_error_us"`
	Unaligned    []int   `json:"ranks_with_unknown_clock"`
	// DurationUS is the time from the first submission to the last end, and StartupUS the part of it before
	// the first complete step; 0 if there are no steps.
	DurationUS float64 `json:"duration_us"`
	StartupUS  float64 `json:"startup_us"`
	// Operations, Tensors and Errors are counted once for each rank that wrote them.
	Operations int64 `json:"operations"`
	Tensors    int64 `json:"tensors"`
	Errors     int64 `json:"errors"`
	// Steps is the number of steps from the first complete one on; 0 if no name comes again. StepUS is the
	// median of their lengths.
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

// Lateness is which ranks were late. It covers the time after the start-up, except fields that say otherwise.
type Lateness struct {
	// Verdict is the conclusion in words. Startup is the conclusion on the start-up; empty if there was none.
	Verdict string `json:"verdict"`
	Startup string `json:"startup"`
	// HeldUS is for how long any single rank held up all others, added up over the ranks. AnybodyUS is the
	// wall time during which any rank waited for another.
	HeldUS    float64 `json:"held_us"`
	AnybodyUS float64 `json:"anybody_waited_us"`
	// Compared is the number of operations for which the submissions of at least two ranks are known. Alone
	// is the number of operations of the global set for which the submission of only one rank is known.
	Compared int64 `json:"operations_compared"`
	Alone    int64 `json:"operations_of_one_rank"`
	// Arrivals says that for some ranks the time when their request arrived at rank 0 is used instead of the
	// time of their submission.
	Arrivals bool `json:"from_arrivals"`
	// WaitedUS is the time for which all ranks waited, added up: for each operation and rank, from its own
	// submission to the last one.
	WaitedUS float64    `json:"waited_us"`
	Ranks    []LateRank `json:"ranks"`
}

// LateRank is how late a rank was.
type LateRank struct {
	Rank int `json:"rank"`
	// Last is the number of operations for which the rank was the last, by itself or together with ranks that
	// the clocks cannot tell from it.
	Last int64 `json:"last"`
	// CausedUS is the part of WaitedUS that the rank caused, and Share its share of WaitedUS. From one
	// submission to the next later one, all ranks that have submitted wait because of the rank that submits
	// next; the sum of these times is WaitedUS.
	CausedUS float64 `json:"caused_us"`
	Share    float64 `json:"share"`
	// HeldUS is for how long the rank held up all others, in wall time. No moment counts twice, neither for
	// one rank nor for two. HeldShare is its share of the sum over all ranks. StartupHeldUS is for how long
	// the rank held up all others in the start-up.
	HeldUS        float64 `json:"held_us"`
	HeldPerStepUS float64 `json:"held_per_step_us"`
	HeldShare     float64 `json:"held_share"`
	StartupHeldUS float64 `json:"startup_held_us"`
	// P50US, P90US, P99US and MaxUS are of the times from the first rank's submission to this rank's.
	P50US float64 `json:"lateness_p50_us"`
	P90US float64 `json:"lateness_p90_us"`
	P99US float64 `json:"lateness_p99_us"`
	MaxUS float64 `json:"lateness_max_us"`
}

// Outside is the time in which a rank had no operation in flight, for the rank that has the least of it. It
// is the time in the complete steps after the start-up, divided by their number; or in all time if there are
// none.
type Outside struct {
	Rank   int     `json:"rank"`
	US     float64 `json:"us_per_step"`
	StepUS float64 `json:"step_us"`
	Share  float64 `json:"share"`
}

// Phases is the time of a rank after the start-up in which at least one operation was in a phase. Operations
// overlap, and so do phases.
type Phases struct {
	Rank   int     `json:"rank"`
	Steps  int64   `json:"steps"`
	StepUS float64 `json:"step_us"`
	// US has the phases: waiting (for others' submissions), negotiation (from the last submission to the
	// grant), queue, copies, exchange, reduce and other. It also has outside, the time without any operation
	// in flight.
	US map[string]float64 `json:"us"`
}

// Fusion is how many tensors and bytes ran as one response. Horovod's files do not contain it.
type Fusion struct {
	Responses   int64   `json:"responses"`
	MeanTensors float64 `json:"mean_tensors"`
	P50Tensors  int64   `json:"p50_tensors"`
	MaxTensors  int64   `json:"max_tensors"`
	MeanBytes   float64 `json:"mean_bytes"`
	P50Bytes    int64   `json:"p50_bytes"`
	MaxBytes    int64   `json:"max_bytes"`
	// ThresholdBytes is the threshold of the options, 0 if it is not known, and Fill the mean share of it
	// that responses had.
	ThresholdBytes int64   `json:"threshold_bytes"`
	Fill           float64 `json:"fill"`
}

// Cache is how many requests were cached. The steady counts exclude the first request of each name.
type Cache struct {
	Hits         int64 `json:"hits"`
	Misses       int64 `json:"misses"`
	SteadyHits   int64 `json:"steady_hits"`
	SteadyMisses int64 `json:"steady_misses"`
}

// Tensor is a tensor name, with sums over all ranks. Its times are from submission to end.
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

// Suggestion is something to do, and the reason.
type Suggestion struct {
	// Setting is the name of the setting to change, if the suggestion is about one.
	Setting string `json:"setting,omitempty"`
	Do      string `json:"do"`
	Because string `json:"because"`
}

// top is the number of tensors in Slowest and Largest.
const top = 10

// micros converts nanoseconds to microseconds.
func micros[T int64 | float64 | time.Duration](ns T) float64 { return float64(ns) / nanosPerMicro }

// Report reads the files to their ends and returns the report. The error is that of reading a file; a damaged
// file is not an error.
func (j *Job) Report(o Options) (*Report, error) {
	c, err := j.collect()
	if err != nil {
		return nil, err
	}
	r := &Report{
		Problems: append([]string{}, j.problems...), Horovod: j.horovod, Size: j.size,
		Operations: c.operations, ClockErrorUS: micros(c.clockErr),
		Files: []int{}, Missing: []int{}, Unaligned: []int{}, Names: int64(len(c.names.names) - 1),
	}
	late := c.late.Findings()
	r.fillRanks(j, c, late.Ranks)
	r.fillLateness(late)
	r.fillTensors(c)
	r.Fusion = Fusion{
		Responses: int64(c.responses.N), MeanTensors: c.responses.Mean(),
		P50Tensors: c.responses.Quantile(.5), MaxTensors: c.responses.Max,
		MeanBytes: c.responseBytes.Mean(), P50Bytes: c.responseBytes.Quantile(.5),
		MaxBytes:       c.responseBytes.Max,
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
		p := Phases{Rank: f.rank, Steps: k.steps.steps(), StepUS: micros(k.steps.lengths.Quantile(.5)),
			US: make(map[string]float64)}
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
		// Horovod's file does not contain the size: it has at least the ranks whose requests were seen.
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

// outside returns the time without an operation in flight in the complete steps, or in all time if there are
// none. The last step does not count: its end is not known.
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
			Rank: s.Rank, Last: s.Last, CausedUS: micros(s.Caused), Share: f.Share(s), HeldUS: micros(s.Held),
			StartupHeldUS: micros(s.StartupHeld),
			P50US:         micros(s.Lateness.Quantile(.5)), P90US: micros(s.Lateness.Quantile(.9)),
			P99US: micros(s.Lateness.Quantile(.99)),
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
			Name: c.names.names[id], Kind: n.kind, Count: n.total.N, TotalUS: micros(n.total.Sum),
			MeanUS: micros(n.total.Mean()),
			P99US:  micros(n.total.Quantile(.99)), MaxUS: micros(n.total.Max), Bytes: n.bytes, DType: n.dtype,
			Shape: n.shape, Errors: n.errors,
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
		add("Horovod writes only rank 0's file: requests of other ranks are known by their arrival at rank 0, and not at all if they were cached")
	default:
		add("no file of %s: for operations of process set 0, arrivals at rank 0 replace their submissions, if rank 0's file has them", topo.FormatRanks(r.Missing))
	}
	if r.Dropped > 0 {
		add("%d operations were dropped, because a rank could not write its timeline fast enough or at all; the report is without them", r.Dropped)
	}
	if len(r.Unaligned) > 0 {
		add("%s: the files align the clock only by the time of day, so lateness is not measured",
			topo.FormatRanks(r.Unaligned))
	}
	if c.malformed > 0 {
		add("%d events could not be read and are left out", c.malformed)
	}
	if c.unfinished > 0 {
		add("%d operations have no end and are left out", c.unfinished)
	}
	if c.tooMany > 0 {
		add("more than %d operations are in flight at once: %d events are left out", maxOpen, c.tooMany)
	}
	if c.names.full() {
		add("there are more than %d tensor names: the operations of all further names are counted together",
			maxNames)
	}
	if r.Operations == 0 {
		add("the files have no operations")
	}
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
