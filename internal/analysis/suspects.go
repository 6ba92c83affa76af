package analysis

import (
	"cmp"
	"slices"
	"time"
)

const (
	// most is the share from which a part counts as most of the whole.
	most = 0.5
	// worthwhile is the share of the time below which a wait is not worth looking into.
	worthwhile = 0.05
	// noticeable is the time per step below which it is not either: waking a process late costs as much.
	noticeable = 100 * time.Microsecond
	// outstanding is how many times as long as any other a rank that is named alone holds up the others. Among ranks that take turns one
	// is the worst too, and of two that have waited for each other 50 times it often has two thirds.
	outstanding = 3
	// together is the share of all waiting from which ranks that are late at the same time are named as its cause.
	together = 0.8
)

// Span is a part of a job: how long it took, and how many steps it had, 0 if none are known.
type Span struct {
	Time  time.Duration
	Steps int64
}

// Long reports whether a time within the span is long enough to look into.
func (s Span) Long(d time.Duration) bool {
	return float64(d) >= worthwhile*float64(s.Time) && d >= noticeable*time.Duration(max(s.Steps, 1))
}

// Worst returns the ranks that held up all others longest and second longest; nil if none did, or no other.
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

// WorstInStartup returns the rank that held up all others longest in a start-up of a length; nil if none did for long.
func (f *Lateness) WorstInStartup(length time.Duration) (worst *RankLateness) {
	for _, r := range f.Ranks {
		if worst == nil || r.StartupHeld > worst.StartupHeld {
			worst = r
		}
	}
	if worst == nil || float64(worst.StartupHeld) < worthwhile*float64(length) {
		return nil
	}
	return worst
}

// Held returns for how long a single rank held up all others, whichever it was.
func (f *Lateness) Held() (sum time.Duration) {
	for _, r := range f.Ranks {
		sum += r.Held
	}
	return sum
}

// Share returns the share of all waiting that ranks have caused.
func (f *Lateness) Share(ranks ...*RankLateness) (share float64) {
	for _, r := range ranks {
		if f.Waited > 0 {
			share += r.Caused / f.Waited
		}
	}
	return share
}

// Suspects returns the ranks to look at after the start-up, which took a span: the one that holds up all others, or, in order, several
// that are late together, so that none of them does alone. It is empty if no rank stands out.
func (f *Lateness) Suspects(steady Span) []*RankLateness {
	worst, second := f.Worst()
	if worst != nil && steady.Long(worst.Held) && float64(worst.Held) >= most*float64(f.Held()) && (second == nil || worst.Held >= outstanding*second.Held) {
		return []*RankLateness{worst}
	}
	if !steady.Long(f.Anybody) {
		return nil
	}
	all := slices.Clone(f.Ranks)
	slices.SortStableFunc(all, func(a, b *RankLateness) int { return cmp.Compare(b.Caused, a.Caused) })
	for n := 2; n <= len(all)/2; n++ {
		if f.Share(all[:n]...) >= together && all[n-1].Caused >= outstanding*all[n].Caused {
			slices.SortFunc(all[:n], func(a, b *RankLateness) int { return cmp.Compare(a.Rank, b.Rank) })
			return all[:n]
		}
	}
	return nil
}
