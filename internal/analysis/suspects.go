package analysis

import (
	"cmp"
	"slices"
	"time"
)

const (
	// majority is the share of the whole from which a part counts as most of it.
	majority = 0.5
	// minShare is the share of the time below which a wait is not worth looking into.
	minShare = 0.05
	// minPerStep is the time per step below which a wait is not worth looking into either: waking a process
	// late costs as much.
	minPerStep = 100 * time.Microsecond
	// dominance is how many times as long as any other rank a rank must hold up the others to be named by
	// itself. If ranks take turns, one of them is the worst too, and of two that waited for each other 50
	// times one often has two thirds of the time.
	dominance = 3
	// jointShare is the share of all waiting from which ranks that are late at the same time are named as its
	// cause.
	jointShare = 0.8
)

// Span is a part of a job: how long it took, and how many steps it had, 0 if no steps are known.
type Span struct {
	Time  time.Duration
	Steps int64
}

// Long reports whether a time within the span is long enough to look into.
func (s Span) Long(d time.Duration) bool {
	return float64(d) >= minShare*float64(s.Time) && d >= minPerStep*time.Duration(max(s.Steps, 1))
}

// Worst returns the ranks that held up all others longest and second longest. A result is nil if there is no
// such rank.
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

// WorstInStartup returns the rank that held up all others longest in a start-up of the given length; nil if
// none did for 5 % of it.
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

// Held returns for how long any single rank held up all others, added up over the ranks.
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

// Suspects returns the ranks to look at after the start-up; steady is the time after it. The result is the
// rank that holds up all others, or, ascending, several ranks that are late together, so that none of them
// holds up all others by itself. It is empty if no rank stands out.
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
