package analysis

import (
	"cmp"
	"slices"
	"time"
)

const (
	// majority is the smallest share of a whole that counts as most of it.
	majority = 0.5
	// minShare is the smallest share of the time that makes a wait worth looking into.
	minShare = 0.05
	// minPerStep is the shortest time per step that makes a wait worth looking into. A shorter wait may only
	// be the time that it takes to wake a process.
	minPerStep = 100 * time.Microsecond
	// A rank is named by itself only if it held up the other ranks at least dominance times as long as any
	// other rank did. The factor is needed because one of several ranks that take turns in being late is the
	// worst by chance. For example, if two ranks waited for each other 50 times, one of them often has two
	// thirds of the time.
	dominance = 3
	// jointShare is the smallest share of all waiting that several ranks must have caused to be named
	// together.
	jointShare = 0.8
)

// Span is a period of a job. It has a length and a number of steps, which is 0 if the steps are not known.
type Span struct {
	Time  time.Duration
	Steps int64
}

// Long reports whether a time d within the span is long enough to be worth looking into.
func (s Span) Long(d time.Duration) bool {
	return float64(d) >= minShare*float64(s.Time) && d >= minPerStep*time.Duration(max(s.Steps, 1))
}

// Worst returns the rank that held up all others longest and the rank that held them up second longest.
// Either result is nil if there is no such rank.
func (f *Lateness) Worst() (worst, second *RankLateness) {
	for _, r := range f.Ranks {
		switch {
		case r.Held == 0:
		case worst == nil || r.Held > worst.Held:
			worst, second = r, worst
		case second == nil || r.Held > second.Held:
			second = r
		}
	}
	return worst, second
}

// WorstInStartup returns the rank that held up all others longest in a start-up of the given length. It
// returns nil if no rank held them up for at least 5 % of the start-up.
func (f *Lateness) WorstInStartup(length time.Duration) (worst *RankLateness) {
	for _, r := range f.Ranks {
		if worst == nil || r.StartupHeld > worst.StartupHeld {
			worst = r
		}
	}
	if worst == nil || float64(worst.StartupHeld) < minShare*float64(length) {
		return nil
	}
	return worst
}

// Held returns the sum over all ranks of the time for which the rank held up all others.
func (f *Lateness) Held() (sum time.Duration) {
	for _, r := range f.Ranks {
		sum += r.Held
	}
	return sum
}

// Share returns the share of all waiting that the given ranks caused.
func (f *Lateness) Share(ranks ...*RankLateness) (share float64) {
	for _, r := range ranks {
		if f.Waited > 0 {
			share += r.Caused / f.Waited
		}
	}
	return share
}

// Suspects returns the ranks to look at. steady is the span after the start-up. If one rank holds up all
// others, the result is this rank. If several ranks are late together, so that none of them holds up all
// others by itself, the result is these ranks in ascending order. It is empty if no rank stands out.
func (f *Lateness) Suspects(steady Span) []*RankLateness {
	worst, second := f.Worst()
	if worst != nil && steady.Long(worst.Held) && float64(worst.Held) >= majority*float64(f.Held()) &&
		(second == nil || worst.Held >= dominance*second.Held) {
		return []*RankLateness{worst}
	}
	if !steady.Long(f.Anybody) {
		return nil
	}
	all := slices.Clone(f.Ranks)
	slices.SortStableFunc(all, func(a, b *RankLateness) int { return cmp.Compare(b.Caused, a.Caused) })
	for n := 2; n <= len(all)/2; n++ {
		if f.Share(all[:n]...) >= jointShare && all[n-1].Caused >= dominance*all[n].Caused {
			slices.SortFunc(all[:n], func(a, b *RankLateness) int { return cmp.Compare(a.Rank, b.Rank) })
			return all[:n]
		}
	}
	return nil
}
