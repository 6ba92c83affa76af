package report

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// maxCells limits the number of cells of a table of ranks and steps. If there are more, a row stands for
	// several steps until the report has grouped them.
	maxCells = 1 << 22
	// maxList limits the number of entries of Details.Periods, Details.Pending and Details.Spans.
	maxList = 1 << 22
	// MaxMatrix is the largest number of ranks for which Details.WaitsFor is made.
	MaxMatrix = 256
)

// Host has the ranks of one host, and how late they were. The times are sums over the ranks (see LateRank).
type Host struct {
	Host     string  `json:"host"`
	Ranks    []int   `json:"ranks"`
	HeldUS   float64 `json:"held_us"`
	CausedUS float64 `json:"caused_us"`
	Share    float64 `json:"share"`
}

// Details has what a Report sums up, for a program that draws it. All times are on rank 0's clock. Periods,
// Pending, Spans and WaitsFor are only filled by Examine with a function.
type Details struct {
	// Begin is the first submission, and End the end of the last operation.
	Begin, End time.Duration
	// Ranks has all ranks of the job, in ascending order.
	Ranks []RankInfo
	// Steps has the times at which steps began, from the first complete step to the last step.
	Steps []time.Duration
	// HeldBy, CausedBy and WaitedBy have a row of numbers in ns for each step, indexed by rank. HeldBy is the
	// time for which the rank held up all others, CausedBy the waiting that it caused, and WaitedBy the time
	// that it waited in all operations. A row is nil if its numbers are 0.
	HeldBy, CausedBy, WaitedBy [][]float32
	// Periods are the periods in which one rank held up all others.
	Periods []Period
	// Pending has, for each operation, how long a rank waited for the submissions of other ranks.
	Pending []Wait
	// Spans has what the programs of the ranks did, if they have recorded it.
	Spans []RankSpan
	// LeftOut is the number of periods, waits and spans for which the lists have no room.
	LeftOut int64
	// WaitsFor[l][w] is how long rank w waited for rank l in all operations, in ns. It is nil if there are
	// more than MaxMatrix ranks.
	WaitsFor [][]float64
}

// RankSpan is a span of the program of a rank.
type RankSpan struct {
	Rank int
	trace.Span
}

// RankInfo describes a rank. HasFile is false if the rank has no file; then Host is empty. Aligned is false
// if the error of the rank's clock is not known.
type RankInfo struct {
	Rank             int
	Host             string
	HasFile, Aligned bool
}

// Period is a time during which a rank held up all others. Steady is false in the start-up.
type Period struct {
	Rank     int
	From, To time.Duration
	Steady   bool
}

// Wait says that a rank submitted an operation at the time From, waited for other ranks until To, and learned
// of the grant at the time Granted.
type Wait struct {
	Rank              int
	From, To, Granted time.Duration
}

// detailer collects the details of a job.
type detailer struct {
	Details
	all             bool // whether Periods, Pending and WaitsFor are filled
	names           map[string]*nameStats
	per             int // the number of steps of a row of the tables
	maxRows, maxAll int // the limits of the tables, and of Periods and Pending
}

// tables returns the tables of steps and ranks.
func (d *detailer) tables() []*[][]float32 {
	return []*[][]float32{&d.HeldBy, &d.CausedBy, &d.WaitedBy}
}

// add adds a number to the cells of a step and some ranks in a table of steps and ranks.
func (d *detailer) add(t *[][]float32, step int, ns float64, ranks ...int) {
	for step/d.per >= d.maxRows {
		d.halve()
	}
	d.put(t, step/d.per, float32(ns), ranks...)
}

func (d *detailer) put(t *[][]float32, at int, ns float32, ranks ...int) {
	for len(*t) <= at {
		*t = append(*t, nil)
	}
	row := (*t)[at]
	for _, rank := range ranks {
		if rank >= len(row) {
			row = append(row, make([]float32, max(len(d.Ranks), rank+1)-len(row))...)
		}
		row[rank] += ns
	}
	(*t)[at] = row
}

// halve joins every two successive rows of the tables.
func (d *detailer) halve() {
	d.per *= 2
	for _, t := range d.tables() {
		rows := *t
		*t = nil
		for i, row := range rows {
			if i%2 == 0 {
				*t = append(*t, row)
				continue
			}
			for rank, ns := range row {
				d.put(t, i/2, ns, rank)
			}
		}
	}
}

func newDetailer(j *Job, names map[string]*nameStats, all bool) *detailer {
	d := &detailer{all: all, names: names, per: 1, maxAll: maxList}
	of := make(map[int]*rankFiles)
	most := j.size
	for _, f := range j.ranks {
		of[f.rank] = f
		most = max(most, f.rank+1)
	}
	for rank := range most {
		i := RankInfo{Rank: rank}
		if f := of[rank]; f != nil {
			i.HasFile, i.Host, i.Aligned = true, f.host(), f.clock.known
		}
		d.Ranks = append(d.Ranks, i)
	}
	d.maxRows = max(maxCells/max(most, 1), 1)
	if all && most <= MaxMatrix {
		for range most {
			d.WaitsFor = append(d.WaitsFor, make([]float64, most))
		}
	}
	return d
}

var _ analysis.Watcher = (*detailer)(nil)

func (d *detailer) Waited(tensor string, waiters, late []int, at, wait time.Duration) {
	ns, step := float64(wait), d.stepAt(at)
	if n := d.names[tensor]; n != nil {
		n.waitedFor += ns * float64(len(waiters)*len(late))
	}
	d.add(&d.CausedBy, step, ns*float64(len(waiters)), late...)
	d.add(&d.WaitedBy, step, ns*float64(len(late)), waiters...)
	for _, rank := range late {
		if rank < len(d.WaitsFor) {
			row := d.WaitsFor[rank]
			for _, rank := range waiters {
				if rank < len(row) {
					row[rank] += ns
				}
			}
		}
	}
}

func (d *detailer) HeldUp(rank int, from, to time.Duration, steady bool) {
	if d.all {
		keep(d, &d.Periods, Period{rank, from, to, steady})
	}
	if !steady {
		return
	}
	// The late rank submits at the end of the period. If this is the rank whose steps are used, its step
	// begins then.
	step := d.stepAt(to)
	d.add(&d.HeldBy, step, float64(to-from), rank)
}

// stepAt returns the index of the step to which a time belongs.
func (d *detailer) stepAt(at time.Duration) int {
	i, found := slices.BinarySearch(d.Steps, at)
	if !found {
		i--
	}
	return max(i, 0)
}

// steady says that the first complete step began at the given time. It drops what belongs to the start-up.
func (d *detailer) steady(at time.Duration) {
	d.Steps = append(d.Steps[:0], at)
	d.HeldBy, d.CausedBy, d.WaitedBy, d.per = nil, nil, nil, 1
	for _, row := range d.WaitsFor {
		clear(row)
	}
}

// step says that a further step began at the given time.
func (d *detailer) step(at time.Duration) { d.Steps = append(d.Steps, at) }

// wait adds the time for which a rank waited for the submissions of others.
func (d *detailer) wait(rank int, from, to, granted time.Duration) {
	if d.all && to > from {
		keep(d, &d.Pending, Wait{rank, from, to, granted})
	}
}

// span adds what the program of a rank did.
func (d *detailer) span(rank int, s trace.Span) {
	if d.all && s.End > s.Begun {
		keep(d, &d.Spans, RankSpan{rank, s})
	}
}

// keep adds an element to a list, unless it has no room.
func keep[T any](d *detailer, list *[]T, x T) {
	if len(*list) >= d.maxAll {
		d.LeftOut++
		return
	}
	*list = append(*list, x)
}

// group adds up the rows of the tables for each entry of the list of steps, and fills in the sums of the
// list.
func (d *detailer) group(list []Step) {
	was := d.Steps
	d.Steps = nil
	for i := range list {
		d.Steps = append(d.Steps, time.Duration(math.Round(list[i].BeginUS*nanosPerMicro)))
	}
	if len(list) == 0 {
		return
	}
	for _, t := range d.tables() {
		rows := *t
		*t = nil
		for i, row := range rows {
			step := d.stepAt(was[min(i*d.per, len(was)-1)])
			for rank, ns := range row {
				if ns > 0 {
					d.put(t, step, ns, rank)
				}
			}
		}
	}
	sum := func(all [][]float32, i int) (us float64) {
		if i < len(all) {
			for _, ns := range all[i] {
				us += micros(float64(ns))
			}
		}
		return us
	}
	for i := range list {
		list[i].WaitedUS = sum(d.WaitedBy, i)
		for _, us := range list[i].HeldUS {
			list[i].AnyHeldUS += us
		}
	}
}

// fillHosts fills in the table of hosts, those first whose ranks caused most of the waiting.
func (r *Report) fillHosts(ranks []RankInfo) {
	r.Hosts = []Host{}
	at := make(map[string]int)
	for _, i := range ranks {
		if !i.HasFile {
			continue
		}
		k, known := at[i.Host]
		if !known {
			k = len(r.Hosts)
			at[i.Host], r.Hosts = k, append(r.Hosts, Host{Host: i.Host})
		}
		h := &r.Hosts[k]
		h.Ranks = append(h.Ranks, i.Rank)
		for _, l := range r.Lateness.Ranks {
			if l.Rank == i.Rank {
				h.HeldUS, h.CausedUS, h.Share = h.HeldUS+l.HeldUS, h.CausedUS+l.CausedUS, h.Share+l.Share
			}
		}
	}
	slices.SortStableFunc(r.Hosts, func(a, b Host) int { return cmp.Compare(b.CausedUS, a.CausedUS) })
}
