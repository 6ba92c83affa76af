package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/gonum/mathext"

	"github.com/gohvd/gohvd/internal/logs"
)

const (
	// mostLonger is how many times as many steps as the other a run may have if means are compared. The mean
	// of a much shorter run is usually too small, because it lacks the rare steps that take very long.
	mostLonger = 4
	// numBatches is the number of batches into which the times of a run are divided, and leastTimes the
	// minimum number of times.
	numBatches, leastTimes = 20, 100
	// familyAlpha is the probability that a difference is claimed for at least one time of the steps although
	// the runs are equal. It is the same for the tensors, so that all intervals hold together with 95 %.
	familyAlpha = 0.025
	// mostCompared is the maximum number of rows in the text.
	mostCompared = 32
)

// Comparison says in which times two runs differ. Only differences that the variation within the runs does
// not explain are claimed.
type Comparison struct {
	A CompareRun `json:"a"`
	B CompareRun `json:"b"`
	// Verdict is the conclusion in words. Problems has the problems of both reports, such as
	// that a file was read only in part, and texts about what is not compared.
	Verdict  string   `json:"verdict"`
	Problems []string `json:"problems"`
	// Rows has the times of the steps, and then those of the tensors that both runs have, the clearest
	// differences first.
	Rows []Difference `json:"rows"`
}

// CompareRun is one of the runs of a Comparison. Steps is the number of complete steps after the start-up.
type CompareRun struct {
	Title string `json:"title"`
	Ranks int    `json:"ranks"`
	Steps int64  `json:"steps"`
}

// Difference is the difference between a time in run B and the same time in run A.
type Difference struct {
	// What is "step, median", "step, mean", "held up all others" (per step, by any rank) or "tensor": the
	// median time of an operation on Tensor, from the submission to the end, on average over the ranks.
	What   string `json:"what"`
	Tensor string `json:"tensor,omitempty"`
	// AUS and BUS are the times. The true difference is from LowUS to HighUS, for all rows together with a
	// confidence of 95 %.
	AUS    float64 `json:"a_us"`
	BUS    float64 `json:"b_us"`
	DiffUS float64 `json:"difference_us"`
	// Share is DiffUS divided by AUS, or 0 if AUS is 0.
	Share  float64 `json:"share"`
	LowUS  float64 `json:"low_us"`
	HighUS float64 `json:"high_us"`
	// Differs is false if no difference was found, because the interval contains 0.
	Differs bool `json:"differs"`

	variance, freedom, p float64
}

// series has the times of the operations of a tensor after the start-up in their order, on average over the
// ranks. If there are more than maxTimes, an entry has one of several successive ones. It is not their
// average, because medians of averages and of single times cannot be compared.
type series struct {
	per   int // the number of operations of a rank for which an entry stands, or 0 if there is none
	times []meanTime
}

// maxTimes limits the entries of a series, and maxLengths those of Report.lengths.
const maxTimes, maxLengths = 512, 1 << 12

type meanTime struct {
	sum float32
	n   uint32
}

// add adds the time of operation number at of a rank.
func (s *series) add(at int, ns float64) {
	s.per = max(s.per, 1)
	for at/s.per >= maxTimes {
		s.per *= 2
		n := (len(s.times) + 1) / 2
		s.times = append(s.times, meanTime{})
		for i := range n {
			s.times[i] = s.times[2*i+half(i, s.per)]
		}
		s.times = s.times[:n]
	}
	if !chosen(at, s.per) {
		return
	}
	for len(s.times) <= at/s.per {
		s.times = append(s.times, meanTime{})
	}
	t := &s.times[at/s.per]
	t.sum, t.n = t.sum+float32(ns), t.n+1
}

// half returns which half of block number i of n times has the time that is kept, 0 or 1. The choice is
// random, so that what happens at regular intervals is kept neither each time nor never.
func half(i, n int) int { return int(rand.NewPCG(uint64(i), uint64(n)).Uint64() >> 63) }

// chosen reports whether time number at is the one that is kept of the block of n times that it is in. n is a
// power of 2.
func chosen(at, n int) bool {
	for ; n > 1; n /= 2 {
		if half(at/n, n) != at/(n/2)%2 {
			return false
		}
	}
	return true
}

// stepLengths returns the lengths of the steps between the given times, in microseconds, or a sample of them
// if there are many.
func stepLengths(begins []time.Duration) (lengths []float64) {
	per := 1
	for len(begins)/per > maxLengths {
		per *= 2
	}
	for i := range max(len(begins)-1, 0) {
		if chosen(i, per) {
			lengths = append(lengths, micros(float64(begins[i+1]-begins[i])))
		}
	}
	return lengths
}

// micros returns the times in microseconds.
func (s series) micros() []float64 {
	all := make([]float64, 0, len(s.times))
	for _, t := range s.times {
		if t.n > 0 {
			all = append(all, micros(float64(t.sum)/float64(t.n)))
		}
	}
	return all
}

// estimate is an estimate of a time, with its variance and the degrees of freedom of the variance.
type estimate struct{ value, variance, freedom float64 }

// estimateOf returns the mean of batches of successive times, each of which of summarizes. Successive times
// are correlated, so their number says little about the variance. The batches are nearly independent. If they
// still are not, as when the times drift, their correlation reduces their effective number.
func estimateOf(times []float64, of func([]float64) float64) estimate {
	const n = numBatches
	var batches [n]float64
	for i := range batches {
		batches[i] = of(times[i*len(times)/n : (i+1)*len(times)/n])
	}
	mean, squares, products := mean(batches[:]), 0.0, 0.0
	for i, b := range batches {
		squares += (b - mean) * (b - mean)
		if i > 0 {
			products += (b - mean) * (batches[i-1] - mean)
		}
	}
	r := 0.0
	if squares > 0 {
		r = products / squares
		r = min(max(r+(1+3*r)/n, 0), 0.95) // without the second term r would be too small on average
	}
	effective := n * (1 - r) / (1 + r)
	return estimate{mean, squares / (n - 1) / effective, max(effective-1, 1)}
}

func mean(all []float64) (m float64) {
	for _, x := range all {
		m += x / float64(len(all))
	}
	return m
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2
}

// differ compares the times of two runs. p is the probability of a difference as large if the runs are equal
// (Welch's t-test).
func differ(what, tensor string, a, b []float64, of func([]float64) float64) Difference {
	x, y := estimateOf(a, of), estimateOf(b, of)
	d := Difference{What: what, Tensor: tensor, AUS: x.value, BUS: y.value, DiffUS: y.value - x.value,
		variance: x.variance + y.variance, p: 1}
	if d.AUS > 0 {
		d.Share = d.DiffUS / d.AUS
	}
	switch {
	case d.variance > 0:
		d.freedom = d.variance * d.variance /
			(x.variance*x.variance/x.freedom + y.variance*y.variance/y.freedom)
		d.p = mathext.RegIncBeta(d.freedom/2, 0.5, d.freedom/(d.freedom+d.DiffUS*d.DiffUS/d.variance))
	case d.DiffUS != 0:
		d.p = 0
	}
	return d
}

// decide decides which rows of a family differ (Holm's method), so that the probability of a false claim
// among all of them is at most familyAlpha. The intervals fit the decisions.
func decide(rows []Difference) {
	order := make([]*Difference, len(rows))
	for i := range rows {
		order[i] = &rows[i]
	}
	slices.SortStableFunc(order, func(a, b *Difference) int { return cmp.Compare(a.p, b.p) })
	still, alpha := true, 0.0
	for i, d := range order {
		if still {
			alpha = familyAlpha / float64(len(rows)-i)
			still = d.p <= alpha
		}
		d.Differs = still
		half := 0.0
		if d.variance > 0 {
			x := mathext.InvRegIncBeta(d.freedom/2, 0.5, alpha)
			half = math.Sqrt(d.variance * d.freedom * (1 - x) / x)
		}
		d.LowUS, d.HighUS = d.DiffUS-half, d.DiffUS+half
	}
}

// stepTimes returns the lengths of the complete steps, and for how long a rank held up all others in them.
func (r *Report) stepTimes() (lengths, held []float64, steps int64) {
	for _, s := range r.StepList[:max(len(r.StepList)-1, 0)] { // the end of the last one is not known
		lengths = append(lengths, s.LengthUS/float64(s.Steps))
		held = append(held, s.AnyHeldUS/float64(s.Steps))
		steps += s.Steps
	}
	return lengths, held, steps
}

// Compare compares run b with run a.
func Compare(a, b *Report, titleA, titleB string) *Comparison {
	lengthsA, heldA, stepsA := a.stepTimes()
	lengthsB, heldB, stepsB := b.stepTimes()
	c := &Comparison{A: CompareRun{titleA, cmp.Or(a.Size, len(a.Files)), stepsA},
		B:        CompareRun{titleB, cmp.Or(b.Size, len(b.Files)), stepsB},
		Problems: []string{}, Rows: []Difference{}}
	for _, p := range a.Problems {
		c.Problems = append(c.Problems, "A: "+p)
	}
	for _, p := range b.Problems {
		c.Problems = append(c.Problems, "B: "+p)
	}
	if min(len(a.lengths), len(b.lengths)) < leastTimes {
		c.Verdict = fmt.Sprintf("the runs cannot be compared: A has %d complete steps after the start-up, and B has %d, want %d or more",
			stepsA, stepsB, leastTimes)
		return c
	}
	rows := []Difference{differ("step, median", "", a.lengths, b.lengths, median)}
	if max(stepsA, stepsB) <= mostLonger*min(stepsA, stepsB) {
		rows = append(rows, differ("step, mean", "", lengthsA, lengthsB, mean),
			differ("held up all others", "", heldA, heldB, mean))
	} else {
		c.Problems = append(c.Problems, fmt.Sprintf("means of the steps are not compared, because a run has more than %d times as many as the other one",
			mostLonger))
	}
	decide(rows)
	var tensors []Difference
	names := make(map[string]bool)
	for _, t := range slices.Concat(a.TensorTable, b.TensorTable) {
		if names[t.Name] {
			continue
		}
		names[t.Name] = true
		x, y := a.series[t.Name].micros(), b.series[t.Name].micros()
		if min(len(x), len(y)) >= leastTimes {
			tensors = append(tensors, differ("tensor", t.Name, x, y, median))
		}
	}
	if left := len(names) - len(tensors); left > 0 {
		c.Problems = append(c.Problems, fmt.Sprintf("%d of %d tensors are not compared, because a run has fewer than %d operations on them",
			left, len(names), leastTimes))
	}
	decide(tensors)
	slices.SortStableFunc(tensors, func(x, y Difference) int { return cmp.Compare(x.p, y.p) })
	c.Verdict = verdictOf(rows, tensors)
	c.Rows = append(rows, tensors...)
	return c
}

// verdictOf returns the conclusion about the times of the steps and of the tensors.
func verdictOf(rows, tensors []Difference) string {
	found := func(all []Difference) (n int) {
		for _, d := range all {
			if d.Differs {
				n++
			}
		}
		return n
	}
	step, heldUp := rows[0], Difference{}
	if len(rows) > 1 {
		heldUp = rows[2]
		if rows[1].Differs && !step.Differs {
			step = rows[1]
		}
	}
	text := ""
	switch {
	case step.Differs:
		more := "longer"
		if step.DiffUS < 0 {
			more = "less"
		}
		text = fmt.Sprintf("a step takes %s %s in B (%s)", percent(math.Abs(step.Share)), more,
			step.describe())
	case found(rows)+found(tensors) == 0:
		held := ", in the time for which a rank held up all others,"
		if len(rows) == 1 {
			held = ""
		}
		return fmt.Sprintf("no difference found, in the steps (%s)%s and in %d tensors", step.describe(), held,
			len(tensors))
	default:
		text = fmt.Sprintf("no difference found in the time of a step (%s)", step.describe())
	}
	if heldUp.Differs {
		text += fmt.Sprintf("; the time for which a rank held up all others differs (%s)", heldUp.describe())
	}
	if n := found(tensors); n > 0 {
		text += fmt.Sprintf("; %d of %d tensors differ, most clearly %s (%s)", n, len(tensors),
			logs.Plain(tensors[0].Tensor), tensors[0].describe())
	} else {
		text += fmt.Sprintf("; no difference found in %d tensors", len(tensors))
	}
	return text
}

// describe returns a phrase with the times and the interval.
func (d *Difference) describe() string {
	text := fmt.Sprintf("%s in A, %s in B, difference %s to %s", duration(d.AUS), duration(d.BUS),
		signed(d.LowUS), signed(d.HighUS))
	if _, kind, is := strings.Cut(d.What, ", "); is {
		return kind + " " + text
	}
	return text
}

// signed formats a difference of times.
func signed(us float64) string {
	switch {
	case us < 0:
		return "-" + duration(-us)
	case us > 0:
		return "+" + duration(us)
	}
	return "0"
}

// WriteText writes the comparison as text for a terminal.
func (c *Comparison) WriteText(w io.Writer) error {
	t := &textWriter{}
	run := func(name string, r CompareRun) {
		t.line("%s: %s: %d ranks, %d steps", name, logs.Plain(r.Title), r.Ranks, r.Steps)
	}
	run("A", c.A)
	run("B", c.B)
	for _, p := range c.Problems {
		t.line("note: %s", p)
	}
	t.line("\n%s", c.Verdict)
	shown := c.Rows[:min(len(c.Rows), mostCompared)]
	if len(shown) > 0 {
		t.line("")
		t.table("A|B|difference|from|to|differs", "", func(row func(string, ...any)) {
			for _, d := range shown {
				differs := "-"
				if d.Differs {
					differs = "yes"
				}
				what := d.What
				if d.What == "tensor" {
					what += " " + logs.Plain(d.Tensor)
				}
				row(what, duration(d.AUS), duration(d.BUS), signed(d.DiffUS), signed(d.LowUS),
					signed(d.HighUS), differs)
			}
		})
	}
	if hidden := len(c.Rows) - len(shown); hidden > 0 {
		t.line("  and %d more tensors, in which differences are less clear", hidden)
	}
	_, err := io.WriteString(w, t.b.String())
	return err
}

// WriteJSON writes the comparison as one JSON object.
func (c *Comparison) WriteJSON(w io.Writer) error { return writeJSON(w, c) }
