package autotune

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Options say how long a Tuner measures. DefaultOptions returns the usual values.
type Options struct {
	// Seed selects the random numbers. With the same space, options and scores, a Tuner proposes the same
	// points on all machines of one architecture.
	Seed uint64
	// WarmupSamples is the number of samples at the beginning that are discarded
	// (HOROVOD_AUTOTUNE_WARMUP_SAMPLES). The default is 3.
	WarmupSamples int
	// StepsPerSample is the number of steps of a sample (HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE). The default is
	// 10. A higher value makes samples less noisy, but tuning takes longer.
	StepsPerSample int
	// SamplesPerRound is the maximum number of samples of a round. The default is 3. A higher value makes
	// scores less noisy, but tuning takes longer.
	SamplesPerRound int
	// MaxRounds is the maximum number of rounds, and so of points that are tried
	// (HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES). The comparison at the end is not included. The default is 20.
	// With 0 or 1 there is no tuning.
	MaxRounds int
	// Noise is the maximum standard deviation of the noise in a score, as a fraction of the standard
	// deviation of the scores of different points (HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE). It is from 0, if
	// scores are exact, to 1. The default is 0.8. Horovod assumes that there is as much noise as this setting
	// says. A Tuner assumes less if that explains the scores better.
	Noise float64
}

// DefaultOptions returns the defaults of all options. The default seed is 0.
func DefaultOptions() Options {
	return Options{WarmupSamples: 3, StepsPerSample: 10, SamplesPerRound: 3, MaxRounds: 20, Noise: 0.8}
}

// check returns an error if o is not valid.
func (o *Options) check() error {
	for _, v := range []struct {
		name       string
		got, least int
	}{
		{"WarmupSamples", o.WarmupSamples, 0}, {"StepsPerSample", o.StepsPerSample, 1},
		{"SamplesPerRound", o.SamplesPerRound, 1}, {"MaxRounds", o.MaxRounds, 0},
	} {
		if v.got < v.least {
			return fmt.Errorf("autotune: %s is %d, want at least %d", v.name, v.got, v.least)
		}
	}
	if !(o.Noise >= 0 && o.Noise <= 1) {
		return fmt.Errorf("autotune: Noise is %v, want a number from 0 to 1", o.Noise)
	}
	return nil
}

const (
	// hopeless is the fraction of the best score below which all samples of a round, but at least two, end
	// the round early. So bad points slow the program down for a shorter time. A single slow sample does not
	// end a round, because it may have another cause.
	hopeless = 0.9
	// finalists is the number of points that are compared with the defaults at the end. In this comparison
	// each point gets SamplesPerRound new samples, but at least leastFinalSamples.
	finalists, leastFinalSamples = 2, 3
	// negligible is the expected relative improvement below which a proposal is not worth a round. The search
	// ends after as many such proposals in succession as patience says.
	negligible, patience = 0.003, 3
	// scoreRange is the greatest difference to the best score that the model sees, in natural logarithms.
	// Large differences between bad points would hide small differences between good ones.
	scoreRange = 1.0
	// settling is the number of steps that Step discards after a change of the point. They fill caches and
	// buffers again.
	settling = 1
)

// phase is a part of the work of a Tuner.
type phase uint8

const (
	warmup phase = iota
	search
	final
	done
)

// trial is a point with its samples.
type trial struct {
	at      place
	x       []float64 // the coordinates of at
	samples []float64
}

// Round is the result of a round.
type Round struct {
	// Point is the point that was measured.
	Point Point
	// Score is the median of the samples, in bytes per microsecond.
	Score float64
	// Samples is the number of samples.
	Samples int
	// Final is set if the round belongs to the comparison at the end.
	Final bool
}

// Tuner searches for the point with the greatest score. It is deterministic, and not safe for concurrent use.
type Tuner struct {
	o      Options
	grid   *grid
	random random
	phase  phase
	warm   int // the number of warm-up samples so far

	at      place     // the place that is measured now
	samples []float64 // the scores of the samples in the current round of the search
	trials  []trial   // one for each round of the search; trials[0] is the defaults
	design  []place   // the places that are measured before the model proposes places
	idle    int       // the number of negligible proposals in succession
	rounds  []Round

	best  Point
	score float64 // the score of best; 0 if best was not measured

	contest []trial // the finalists, with their new samples; contest[0] is the defaults
	turn    int     // the index in contest of the finalist that is measured now

	steps         int // the number of steps in the current sample, including discarded steps
	bytes, micros float64
}

// New returns a Tuner for a space. If there is nothing to tune, because the space has no parameter that may
// change or MaxRounds is less than 2, Done reports true at once. New returns an error if the space or the
// options are not valid.
func New(s Space, o Options) (*Tuner, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	s = slices.Clone(s)
	t := &Tuner{o: o, grid: newGrid(s), random: random{o.Seed}, best: s.Default()}
	t.at = t.grid.start()
	if len(t.grid.free) == 0 || o.MaxRounds < 2 {
		t.phase = done
		return t, nil
	}
	for _, shares := range t.random.hypercube(min(len(t.grid.free)+2, o.MaxRounds/2), len(t.grid.free)) {
		t.design = append(t.design, t.grid.at(shares))
	}
	if o.WarmupSamples == 0 {
		t.phase = search
	}
	return t, nil
}

// Next returns the point with which the program has to run now. The first point is the defaults. Next returns
// another point only after Step has reported true or after Record. When the Tuner is done, Next returns the
// best point.
func (t *Tuner) Next() Point {
	if t.phase == done {
		return t.best
	}
	return t.grid.point(t.at)
}

// Done reports whether tuning has ended.
func (t *Tuner) Done() bool { return t.phase == done }

// Best returns the best point so far. When the Tuner is done, it is the winner of the comparison at the end.
func (t *Tuner) Best() Point { return t.best }

// BestScore returns the score of Best in bytes per microsecond. It is 0 until the first round has ended.
func (t *Tuner) BestScore() float64 { return t.score }

// Rounds returns all rounds that have ended, in their order. Warm-up samples belong to no round.
func (t *Tuner) Rounds() []Round { return slices.Clone(t.rounds) }

// Step adds a step of the program, which has run with Next. The arguments are the bytes that the step reduced
// and the time that it took. Step discards the first step after each change of the point. With the last step
// of a sample, Step records the sample and reports true; then Next may have changed. Its score is the sum of
// the bytes over the sum of the times.
//
// A step without bytes, or whose time is not a positive number, is ignored, because it says nothing about the
// point.
func (t *Tuner) Step(bytes int64, micros float64) (sampled bool) {
	if t.phase == done || bytes <= 0 || !valid(micros) {
		return false
	}
	if t.steps++; t.steps <= settling {
		return false
	}
	t.bytes, t.micros = t.bytes+float64(bytes), t.micros+micros
	if t.steps < settling+t.o.StepsPerSample {
		return false
	}
	before := t.at
	if err := t.Record(t.bytes / t.micros); err != nil {
		// The score is not a number that a float64 can represent, so the sample is measured again.
		t.steps, t.bytes, t.micros = 0, 0, 0
		return false
	}
	if slices.Equal(before, t.at) {
		t.steps = settling
	}
	return true
}

// Record adds a sample of the point Next, whose score is in bytes per microsecond. It is for programs that do
// not count steps; Step calls it. Record returns an error and changes nothing if the score is not a positive
// finite number. When the Tuner is done, Record does nothing.
func (t *Tuner) Record(score float64) error {
	if t.phase == done {
		return nil
	}
	if !valid(score) {
		return fmt.Errorf("autotune: score of %v is %v, want a positive finite number", t.Next(), score)
	}
	t.steps, t.bytes, t.micros = 0, 0, 0
	switch t.phase {
	case warmup:
		if t.warm++; t.warm >= t.o.WarmupSamples {
			t.phase = search
		}
	case search:
		t.samples = append(t.samples, score)
		if len(t.samples) >= t.o.SamplesPerRound ||
			len(t.samples) >= 2 && slices.Max(t.samples) < hopeless*t.score {
			t.endRound()
		}
	case final:
		t.contest[t.turn].samples = append(t.contest[t.turn].samples, score)
		t.nextTurn()
	}
	return nil
}

// valid reports whether v is positive and finite.
func valid(v float64) bool { return v > 0 && !math.IsInf(v, 1) }

// endRound ends a round of the search and selects what to measure next.
func (t *Tuner) endRound() {
	t.trials = append(t.trials, trial{t.at, t.grid.coordinates(t.at), t.samples})
	t.conclude(t.at, t.samples, false)
	t.samples = nil
	for len(t.design) > 0 && len(t.trials) < t.o.MaxRounds {
		t.at, t.design = t.design[0], t.design[1:]
		if !t.taken(t.at) {
			return
		}
	}
	r, order := t.model()
	if r == nil || len(t.trials) >= t.o.MaxRounds {
		t.startFinal(order)
		return
	}
	observed := make([]place, min(refined, len(order)))
	for i := range observed {
		observed[i] = t.trials[order[i]].at
	}
	best, _ := r.predict(t.trials[order[0]].x)
	at, improvement, ok := t.grid.propose(r, best, observed, t.taken, &t.random)
	// Scores are modelled by their logarithms, so this is a relative improvement.
	if t.idle++; improvement*r.dev >= negligible {
		t.idle = 0
	}
	if !ok || t.idle >= patience {
		t.startFinal(order)
		return
	}
	t.at = at
}

// conclude adds the result of a round.
func (t *Tuner) conclude(at place, samples []float64, isFinal bool) {
	r := Round{t.grid.point(at), median(samples), len(samples), isFinal}
	t.rounds = append(t.rounds, r)
	if r.Score > t.score {
		t.best, t.score = r.Point, r.Score
	}
}

// taken reports whether a place was measured.
func (t *Tuner) taken(at place) bool {
	return slices.ContainsFunc(t.trials, func(tr trial) bool { return slices.Equal(tr.at, at) })
}

// model fits a regression to the logarithms of the scores. Noise is then a fraction of the score, as it is in
// measurements. model also returns the indexes of the trials, the best first. The order is that of the means
// of the regression, which are less noisy than the scores. If the fit fails, the regression is nil and the
// order is that of the scores.
func (t *Tuner) model() (r *regression, order []int) {
	all, values := make([]observation, len(t.trials)), make([]float64, len(t.trials))
	for i, tr := range t.trials {
		values[i] = math.Log(median(tr.samples))
	}
	floor := slices.Max(values) - scoreRange
	for i, tr := range t.trials {
		all[i] = observation{tr.x, max(values[i], floor), float64(len(tr.samples)) /
			float64(t.o.SamplesPerRound)}
		order = append(order, i)
	}
	r, err := fit(all, t.grid.unordered(), t.o.Noise)
	if err != nil {
		r = nil
	} else {
		for i := range values {
			values[i], _ = r.predict(all[i].x)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(values[b], values[a]) })
	return r, order
}

// startFinal starts the comparison of the best points with the defaults. Its samples are new, because the
// best of many noisy scores is too high. The points take turns, so that slow changes of the program's speed
// affect all of them. order has the indexes of the trials, the best first.
func (t *Tuner) startFinal(order []int) {
	t.contest = []trial{{at: t.trials[0].at}}
	for _, i := range order {
		if i == 0 || len(t.contest) > finalists {
			break // points that are worse than the defaults cannot win
		}
		t.contest = append(t.contest, trial{at: t.trials[i].at})
	}
	t.at, t.phase = t.contest[0].at, final
	if len(t.contest) == 1 {
		t.best, t.score, t.phase = t.rounds[0].Point, t.rounds[0].Score, done
	}
}

// nextTurn goes on to the next finalist, or ends the comparison. If scores are equal, the defaults win.
func (t *Tuner) nextTurn() {
	t.turn = (t.turn + 1) % len(t.contest)
	t.at = t.contest[t.turn].at
	if t.turn != 0 || len(t.contest[0].samples) < max(t.o.SamplesPerRound, leastFinalSamples) {
		return
	}
	t.score, t.phase = 0, done
	for _, c := range t.contest {
		t.conclude(c.at, c.samples, true)
	}
}

// median returns the median of at least one number.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
