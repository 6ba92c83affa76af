// Package report reads the timelines of the ranks of a job. It reports which ranks were late, how the ranks
// spent their time, and which settings could be changed. It also merges the timelines into one trace.
//
// The files of all ranks are read side by side, as streams. The package keeps the operations that some
// ranks have not ended yet, and some numbers of the others (docs/timeline.md, Reading it). It accepts any
// input. For a file that is not a timeline, the error says what is wrong and at which byte. If a file is
// damaged, the package uses the operations before the damage.
package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Options are settings of the job.
type Options struct {
	// FusionThresholdBytes is the fusion threshold of the job, or 0 if it is unknown.
	FusionThresholdBytes int64
	// CacheCapacity is the number of responses that the job's response cache can hold, or 0 if it is unknown.
	CacheCapacity int64
}

// Report is the result of an analysis of the files. Fields ending in US are in microseconds. Shares are from
// 0 to 1.
type Report struct {
	// Problems has texts for people. Each says what is missing, damaged or left out, and what the report
	// lacks as a result.
	Problems []string `json:"problems"`
	// Size is the number of ranks of the job, or 0 if it is unknown. Files has the ranks that have files, and
	// Missing the ranks that have none.
	Size    int   `json:"size"`
	Files   []int `json:"ranks_with_files"`
	Missing []int `json:"ranks_without_files"`
	// Dropped is the number of operations that are missing from the files because the ranks could not write
	// them.
	Dropped int64 `json:"dropped"`
	// ClockErrorUS is the greatest known error of a time relative to rank 0's clock. Unaligned has the ranks
	// for which no bound of this error is known.
	ClockErrorUS float64 `json:"clock_error_us"`
	Unaligned    []int   `json:"ranks_with_unknown_clock"`
	// DurationUS is the time from the first submission to the end of the last operation. StartupUS is the
	// part of this time before the first complete step. It is 0 if there are no steps.
	DurationUS float64 `json:"duration_us"`
	StartupUS  float64 `json:"startup_us"`
	// Operations, Tensors and Errors are sums over the ranks with files. So an operation counts once for each
	// of these ranks.
	Operations int64 `json:"operations"`
	Tensors    int64 `json:"tensors"`
	Errors     int64 `json:"errors"`
	// Steps is the number of steps, counted from the first complete step. It is 0 if the program has marked
	// no steps and no tensor name occurs more than once. StepUS is the median length of a step, and StepP99US
	// the 99th percentile. StepsMarked says that the program has marked its steps. StepList has the steps.
	Steps       int64   `json:"steps"`
	StepUS      float64 `json:"step_us"`
	StepP99US   float64 `json:"step_p99_us"`
	StepsMarked bool    `json:"steps_marked"`
	StepList    []Step  `json:"step_list"`

	Lateness    Lateness     `json:"lateness"`
	Outside     Outside      `json:"outside"`
	Exposed     Exposed      `json:"exposed"`
	Phases      []Phases     `json:"phases"`
	Fusion      Fusion       `json:"fusion"`
	Cache       Cache        `json:"cache"`
	Names       int64        `json:"names"`
	Job         About        `json:"job"`
	Pending     []Pending    `json:"pending"`
	Slowest     []Tensor     `json:"slowest"`
	Largest     []Tensor     `json:"largest"`
	Suggestions []Suggestion `json:"suggestions"`

	// Hosts has the hosts of the ranks with files, and TensorTable all tensors, those first in which ranks
	// waited longest.
	Hosts       []Host   `json:"hosts"`
	TensorTable []Tensor `json:"tensor_table"`

	// series has the times of the tensors by their names, and lengths those of complete steps or, if there
	// are many, of a sample, for Compare.
	series  map[string]series
	lengths []float64
}

// Lateness says which ranks were late, and how late. Unless a field says otherwise, it is about the time
// after the start-up.
type Lateness struct {
	// Verdict is the conclusion in words. Startup is the conclusion about the start-up, and is empty if there
	// was no start-up.
	Verdict string `json:"verdict"`
	Startup string `json:"startup"`
	// Gain says, in words, how much shorter a step would be without the ranks that Verdict names or, if it
	// names none, if no rank were late. GainUS is this time per step, or in total if there are no steps.
	// Where says with which tensor the late rank is late first or, if that is not known or no rank stands
	// out, in which tensor ranks waited longest. It is empty if they did not wait.
	Gain   string  `json:"gain"`
	GainUS float64 `json:"gain_us"`
	Where  string  `json:"where"`
	// HeldUS is the sum of LateRank.HeldUS over all ranks. AnybodyUS is the wall time during which at least
	// one rank waited for another.
	HeldUS    float64 `json:"held_us"`
	AnybodyUS float64 `json:"anybody_waited_us"`
	// Compared is the number of operations for which submission times of at least two ranks are known. Alone
	// is the number of operations of process set 0 for which the submission time of only one rank is known.
	Compared int64 `json:"operations_compared"`
	Alone    int64 `json:"operations_of_one_rank"`
	// Arrivals is set if the submission times of some ranks are unknown, so that the times at which their
	// requests arrived at rank 0 are used instead.
	Arrivals bool `json:"from_arrivals"`
	// WaitedUS is the total waiting time. For each operation, each rank contributes the time from its own
	// submission to the last rank's submission.
	WaitedUS float64    `json:"waited_us"`
	Ranks    []LateRank `json:"ranks"`
}

// LateRank says how late one rank was.
type LateRank struct {
	Rank int `json:"rank"`
	// Last is the number of operations that this rank submitted last. If the clocks are not exact enough to
	// tell which of several ranks was last, the operation counts for each of them.
	Last int64 `json:"last"`
	// CausedUS is the part of WaitedUS that the rank caused, and Share is CausedUS as a share of WaitedUS.
	// Between two successive submissions of an operation, the ranks that have submitted wait for the rank
	// that submits next. Their waiting is charged to that rank.
	CausedUS float64 `json:"caused_us"`
	Share    float64 `json:"share"`
	// HeldUS is the wall time during which the rank held up all others. Each moment counts at most once, and
	// for at most one rank. HeldShare is HeldUS as a share of the sum over all ranks. StartupHeldUS is the
	// same as HeldUS, for the start-up.
	HeldUS        float64 `json:"held_us"`
	HeldPerStepUS float64 `json:"held_per_step_us"`
	HeldShare     float64 `json:"held_share"`
	StartupHeldUS float64 `json:"startup_held_us"`
	// Doing says in which ranges the program was in the time HeldUS, the longest first. It is empty if the
	// program has no ranges.
	Doing []Doing `json:"doing"`
	// P50US, P90US, P99US and MaxUS are percentiles and the maximum of the rank's lateness. Its lateness in
	// an operation is the time from the first rank's submission to its own.
	P50US float64 `json:"lateness_p50_us"`
	P90US float64 `json:"lateness_p90_us"`
	P99US float64 `json:"lateness_p99_us"`
	MaxUS float64 `json:"lateness_max_us"`
}

// Step is one training step or, if there are too many, some successive ones. All times are on rank 0's clock.
type Step struct {
	// Number is the number that the program has given to the step or, if it has marked none, the number of
	// the step after the start-up, from 0. Steps is the number of steps for which this entry stands.
	Number uint64 `json:"number"`
	Steps  int64  `json:"steps"`
	// BeginUS is the beginning, since the start of rank 0, and LengthUS is how long the steps took together.
	// The last step ends with the last operation.
	BeginUS  float64 `json:"begin_us"`
	LengthUS float64 `json:"length_us"`
	// HeldUS has, by rank, how long the rank held up all others, as LateRank.HeldUS does for all steps.
	// ExposedUS has for how long its program waited for results. Ranks at the end of the lists whose times
	// are 0 are left out.
	HeldUS    []float64 `json:"held_us"`
	ExposedUS []float64 `json:"exposed_us"`
	// AnyHeldUS is the sum of HeldUS, and WaitedUS the part of Lateness.WaitedUS in the step.
	AnyHeldUS float64 `json:"any_held_us"`
	WaitedUS  float64 `json:"waited_us"`
}

// Exposed is the time per step for which the program of a rank waited for the results of operations, on
// average over the ranks with files. It is 0 over the whole time if there are no steps.
type Exposed struct {
	// Known is false if no rank has recorded waits.
	Known bool    `json:"known"`
	US    float64 `json:"us_per_step"`
	// InFlightUS is the time per step in which at least one operation was in flight. Share is the part of it
	// for which the program waited. In the rest, communication and computation overlap.
	InFlightUS float64 `json:"in_flight_us"`
	Share      float64 `json:"share"`
}

// Doing is how long a rank held up all others while its program was in a range. Range is empty for the time
// in which it was in none.
type Doing struct {
	Range string  `json:"range"`
	US    float64 `json:"us"`
	Share float64 `json:"share"`
}

// Outside is the time per step during which a rank has no operation in flight. Rank is the rank for which
// this time is shortest. It is the mean over the complete steps after the start-up. If there are no complete
// steps, it is the total over the whole time.
type Outside struct {
	Rank   int     `json:"rank"`
	US     float64 `json:"us_per_step"`
	StepUS float64 `json:"step_us"`
	Share  float64 `json:"share"`
}

// Phases has the times that one rank spent in each phase after the start-up. A moment counts for a phase if
// at least one operation is in the phase. Operations overlap, so phases overlap too.
type Phases struct {
	Rank   int     `json:"rank"`
	Steps  int64   `json:"steps"`
	StepUS float64 `json:"step_us"`
	// US maps the name of a phase to its time. The phases are waiting (for the submissions of other ranks),
	// negotiation (from the last submission to the grant), queue, copies, exchange, reduce and other. A
	// further key, outside, has the time without an operation in flight.
	US map[string]float64 `json:"us"`
	// InFlightUS is the time with at least one operation in flight, and ExposedUS the time for which the
	// program waited for results.
	InFlightUS float64 `json:"in_flight_us"`
	ExposedUS  float64 `json:"exposed_us"`
}

// Fusion says how many tensors and bytes were fused in one response.
type Fusion struct {
	Responses   int64   `json:"responses"`
	MeanTensors float64 `json:"mean_tensors"`
	P50Tensors  int64   `json:"p50_tensors"`
	MaxTensors  int64   `json:"max_tensors"`
	MeanBytes   float64 `json:"mean_bytes"`
	P50Bytes    int64   `json:"p50_bytes"`
	MaxBytes    int64   `json:"max_bytes"`
	// ThresholdBytes is the fusion threshold from the options, or 0 if it is unknown. Fill is the mean size
	// of a response as a share of the threshold.
	ThresholdBytes int64   `json:"threshold_bytes"`
	Fill           float64 `json:"fill"`
}

// Cache says how many requests were cached. The steady counts leave out the first request of each name.
type Cache struct {
	Hits         int64 `json:"hits"`
	Misses       int64 `json:"misses"`
	SteadyHits   int64 `json:"steady_hits"`
	SteadyMisses int64 `json:"steady_misses"`
}

// Tensor has the statistics of one tensor name over all ranks. Its times are measured from the submission to
// the end of the operation.
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
	// WaitedUS is the part of Lateness.WaitedUS in operations of this tensor. If several tensors are fused,
	// all the time belongs to one of them.
	WaitedUS float64 `json:"waited_us"`
}

// Suggestion is a proposed change and the reason for it.
type Suggestion struct {
	// Setting is the name of the setting to change. It is empty if the suggestion is not to change a setting.
	Setting string `json:"setting,omitempty"`
	Do      string `json:"do"`
	Because string `json:"because"`
}

// top is the maximum number of tensors in Slowest and in Largest.
const top = 10

// micros converts nanoseconds to microseconds.
func micros[T ~int64 | float64](ns T) float64 { return float64(ns) / nanosPerMicro }

// Report reads all files and returns the report. It returns an error if a file cannot be read. If a file is
// damaged, it uses the part before the damage.
func (j *Job) Report(o Options) (*Report, error) {
	r, _, err := j.Examine(o, nil)
	return r, err
}

// Examine returns the same report as Report. If see is not nil, Examine passes each operation of each rank to
// it, in the order in which the operations of a rank ended, and also returns the details. The operation must
// not be used after see has returned, except for its strings and shapes. Its times are on rank 0's clock.
func (j *Job) Examine(o Options, see func(rank int, op *trace.Operation)) (*Report, *Details, error) {
	c, err := j.collect(see)
	if err != nil {
		return nil, nil, err
	}
	r := &Report{
		Problems: append([]string{}, j.problems...), Size: j.size,
		Operations: c.operations, ClockErrorUS: micros(c.clockErr),
		Job:   j.about(),
		Files: []int{}, Missing: []int{}, Unaligned: []int{}, Names: int64(len(c.names)),
	}
	late := c.late.Findings()
	r.fillRanks(c, late)
	r.fillSteps(c, late)
	r.lengths = stepLengths(c.details.Steps)
	c.details.group(r.StepList)
	r.fillLateness(late)
	r.fillTensors(c)
	r.Fusion = Fusion{
		Responses: int64(c.responses.Len()), MeanTensors: c.responses.Mean(),
		P50Tensors: c.responses.Quantile(.5), MaxTensors: c.responses.Quantile(1),
		MeanBytes: c.responseBytes.Mean(), P50Bytes: c.responseBytes.Quantile(.5),
		MaxBytes:       c.responseBytes.Quantile(1),
		ThresholdBytes: o.FusionThresholdBytes,
	}
	if o.FusionThresholdBytes > 0 {
		r.Fusion.Fill = r.Fusion.MeanBytes / float64(o.FusionThresholdBytes)
	}
	r.Pending = r.pending(c)
	r.fillProblems(j, c)
	r.fillHosts(c.details.Ranks)
	r.Lateness.Verdict, r.Lateness.Startup = r.verdict(late), r.startup(late)
	r.Lateness.Gain, r.Lateness.GainUS = r.gain(late)
	r.Lateness.Where = r.where(late)
	r.Suggestions = r.suggest(c, late, o)
	return r, &c.details.Details, nil
}

func (r *Report) fillRanks(c *collection, late *analysis.Lateness) {
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
			US: make(map[string]float64), InFlightUS: micros(k.inside.sum()),
			ExposedUS: micros(late.Exposed[f.rank])}
		for phase, name := range phaseNames {
			p.US[name] = micros(k.phases[phase].sum())
		}
		o := k.outside()
		o.Rank = f.rank
		p.US[idle] = o.US * float64(max(p.Steps, 1))
		if r.Outside.StepUS == 0 || o.StepUS > 0 && o.Share < r.Outside.Share {
			r.Outside = o
		}
		r.Phases = append(r.Phases, p)
		if r.Steps == 0 {
			r.Steps, r.StepUS = p.Steps, p.StepUS
			r.StepP99US = micros(k.steps.lengths.Quantile(.99))
		}
	}
	for rank := range r.Size {
		if !has[rank] {
			r.Missing = append(r.Missing, rank)
		}
	}
	if begin < end {
		c.details.Begin, c.details.End = begin, end
		r.DurationUS = micros(end - begin)
		if c.steadyFrom != never {
			r.StartupUS = micros(max(c.steadyFrom-begin, 0))
		}
	}
}

// fillSteps fills in the steps and what the programs waited in them.
func (r *Report) fillSteps(c *collection, late *analysis.Lateness) {
	first := &c.streams[0].steps
	r.StepsMarked = first.marked && r.Steps > 0
	all := late.Steps
	if n := len(all); n > 0 && first.empty {
		if all[n-1].Count--; all[n-1].Count == 0 {
			all = all[:n-1]
		}
	}
	perRank := func(all []time.Duration) []float64 {
		us := make([]float64, len(all))
		for rank, d := range all {
			us[rank] = micros(d)
		}
		return us
	}
	r.StepList = []Step{}
	for i := range all {
		s := &all[i]
		r.StepList = append(r.StepList, Step{Number: s.Number, Steps: s.Count, BeginUS: micros(s.Begin),
			LengthUS: micros(s.Length), HeldUS: perRank(s.Held), ExposedUS: perRank(s.Exposed)})
	}
	e := &r.Exposed
	e.Known = late.Exposed != nil
	if !e.Known {
		return
	}
	n := float64(len(r.Phases)) * float64(max(r.Steps, 1))
	for _, p := range r.Phases {
		e.US += p.ExposedUS / n
		e.InFlightUS += p.InFlightUS / n
	}
	if e.InFlightUS > 0 {
		e.Share = min(e.US/e.InFlightUS, 1)
	}
}

// outside returns the time per complete step without an operation in flight. If there are no complete steps,
// it returns the total over the whole time. The last step does not count as complete, because its end is
// unknown.
func (k *rankStats) outside() (o Outside) {
	all, inside, steps := k.end-max(k.begin, k.steadyFrom), k.inside.sum(), int64(1)
	if complete := k.steps.complete(); k.steps.firstStep > 0 && complete > 0 {
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
			MaxUS: micros(s.Lateness.Quantile(1)),
			Doing: []Doing{},
		}
		for _, d := range s.Doing {
			late.Doing = append(late.Doing, Doing{d.Range, micros(d.Time), float64(d.Time) / float64(s.Held)})
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
	all := make([]Tensor, 0, len(c.names))
	r.series = make(map[string]series, len(c.names))
	for name, n := range c.names {
		r.series[name] = n.series
		kind, t := strings.ToLower(n.last.Kind.String()), &n.last
		dtype, shape := "", ""
		if t.DType.Valid() {
			dtype, shape = t.DType.String(), strings.ReplaceAll(fmt.Sprint(t.Shape), " ", ", ")
		}
		all = append(all, Tensor{
			Name: name, Kind: kind, Count: uint64(n.total.Len()), TotalUS: micros(n.total.Sum()),
			MeanUS: micros(n.total.Mean()), P99US: micros(n.total.Quantile(.99)),
			MaxUS: micros(n.total.Quantile(1)), Bytes: n.bytes, DType: dtype, Shape: shape, Errors: n.errors,
			WaitedUS: micros(n.waitedFor),
		})
	}
	pick := func(by func(a, b Tensor) int) []Tensor {
		slices.SortFunc(all, func(a, b Tensor) int { return cmp.Or(by(a, b), cmp.Compare(a.Name, b.Name)) })
		return slices.Clone(all[:min(len(all), top)])
	}
	total := func(a, b Tensor) int { return cmp.Compare(b.TotalUS, a.TotalUS) }
	pick(func(a, b Tensor) int { return cmp.Or(cmp.Compare(b.WaitedUS, a.WaitedUS), total(a, b)) })
	r.TensorTable = slices.Clone(all)
	r.Slowest = pick(total)
	r.Largest = pick(func(a, b Tensor) int { return cmp.Compare(b.Bytes, a.Bytes) })
	r.Largest = slices.DeleteFunc(r.Largest, func(t Tensor) bool { return t.Bytes == 0 })
}

func (r *Report) fillProblems(j *Job, c *collection) {
	add := func(format string, args ...any) { r.Problems = append(r.Problems, fmt.Sprintf(format, args...)) }
	r.Problems = append(r.Problems, j.damages()...)
	if j.running {
		if len(r.Missing) > 0 && r.Operations > 0 {
			add("the operations of %s are not read while the job runs: the times at which their requests arrived at rank 0 are used instead",
				topo.FormatRanks(r.Missing))
		}
		return
	}
	if len(r.Missing) > 0 {
		add("there is no file of %s: for operations of process set 0, the times at which their requests arrived at rank 0 are used instead, if rank 0's file has these times", topo.FormatRanks(r.Missing))
	}
	if r.Dropped > 0 {
		add("%d operations are missing in the files and in this report: a rank could not write its timeline fast enough, or not at all", r.Dropped)
	}
	if len(r.Unaligned) > 0 {
		add("the clock of %s is aligned only by the time of day, so lateness is not measured",
			topo.FormatRanks(r.Unaligned))
	}
	if len(c.names) == maxNames {
		add("there are more than %d tensor names: the operations of all further names are counted together",
			maxNames)
	}
	if r.Operations == 0 {
		add("the files have no operations")
	}
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error { return writeJSON(w, r) }

// writeJSON writes a value as JSON for people and programs.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
