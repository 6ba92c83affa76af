package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

const (
	// outstanding is the share of all waiting from which a rank is named as its cause.
	outstanding = 0.5
	// worthwhile is the share of the time below which nothing is worth changing.
	worthwhile = 0.02
)

// worst is the rank that caused most; nil if there was no waiting.
func (r *Report) worst() *LateRank {
	var worst *LateRank
	for i := range r.Lateness.Ranks {
		if l := &r.Lateness.Ranks[i]; l.CausedUS > 0 && (worst == nil || l.CausedUS > worst.CausedUS) {
			worst = l
		}
	}
	return worst
}

func (r *Report) verdict() string {
	l := &r.Lateness
	worst := r.worst()
	switch {
	case l.Compared == 0 && r.Operations == 0:
		return "there is nothing to compare"
	case l.Compared == 0:
		return "nobody can be called late: the files have the submissions of one rank alone"
	case worst == nil && r.ClockErrorUS > 0:
		return fmt.Sprintf("no rank was later than the clocks can tell, which is %s", duration(r.ClockErrorUS))
	case worst == nil:
		return "no rank was late"
	}
	held := fmt.Sprintf("%s in all", duration(worst.HeldUS))
	if r.Steps > 0 {
		held = fmt.Sprintf("%s per step", duration(worst.HeldPerStepUS))
	}
	small := ""
	if r.DurationUS > 0 && worst.HeldUS/r.DurationUS < worthwhile {
		small = fmt.Sprintf("; that is only %s of the time", percent(worst.HeldUS/r.DurationUS))
	}
	rest := 0.0
	for _, other := range l.Ranks {
		if other.Rank != worst.Rank {
			rest = max(rest, other.Share)
		}
	}
	if worst.Share >= outstanding && rest < worst.Share {
		return fmt.Sprintf("rank %d caused %s of the waiting (%s); no other more than %s%s",
			worst.Rank, percent(worst.Share), held, percent(rest), small)
	}
	return fmt.Sprintf("no rank stands out: rank %d caused most of the waiting, %s (%s)%s", worst.Rank, percent(worst.Share), held, small)
}

// part is the share of the time of all ranks that went into a phase.
func (r *Report) part(p phase) float64 {
	if r.DurationUS == 0 || len(r.Phases) == 0 {
		return 0
	}
	sum := 0.0
	for _, rank := range r.Phases {
		sum += rank.US[phaseNames[p]]
	}
	return sum / float64(len(r.Phases)) / r.DurationUS
}

// suggest says what could be set otherwise, where the files show a reason.
func (r *Report) suggest(c *collection, o Options) []Suggestion {
	all := []Suggestion{}
	add := func(setting, do, because string, args ...any) {
		all = append(all, Suggestion{Setting: setting, Do: do, Because: fmt.Sprintf(because, args...)})
	}
	if w := r.worst(); w != nil && w.Share >= outstanding && r.DurationUS > 0 && w.HeldUS/r.DurationUS >= worthwhile {
		add("", fmt.Sprintf("look at what rank %d does before it submits: its input pipeline, its share of the data, its cores "+
			"(HOROVOD_THREAD_AFFINITY), other load on %s; not at the network", w.Rank, c.place(w.Rank)),
			"it holds up all others for %s of the time", percent(w.HeldUS/r.DurationUS))
	}
	once := c.once()
	autoNamed := once >= 100 && float64(once) >= outstanding*float64(r.Names)
	if autoNamed {
		add("", "give tensors names that are the same in every step",
			"%d of %d names never come again; what has no lasting name is negotiated in full each time", once, r.Names)
	}
	if n := r.Cache.SteadyHits + r.Cache.SteadyMisses; !autoNamed && !r.Horovod && n >= 100 && float64(r.Cache.SteadyMisses) >= 0.05*float64(n) {
		missed := percent(float64(r.Cache.SteadyMisses) / float64(n))
		if o.CacheCapacity > 0 && r.Names > o.CacheCapacity {
			add("HOROVOD_CACHE_CAPACITY", fmt.Sprintf("set it to %d or more", r.Names),
				"%s of the requests for names that had come before were not cached, and there are %d names for %d places", missed, r.Names, o.CacheCapacity)
		} else {
			add("", "keep shapes, types and operations of a name the same from step to step",
				"%s of the requests for names that had come before were not cached, though the cache has room for their %d names", missed, r.Names)
		}
	}
	if f := &r.Fusion; f.Responses >= 200 && r.Steps > 0 && f.MeanTensors < 2 && f.MeanBytes < 64<<10 && r.part(negotiation) >= 0.1 {
		add("HOROVOD_CYCLE_TIME", "set it to 1 (ms), so that more tensors run as one, or submit them as a group",
			"responses have %.1f tensors and %s on average, and negotiation goes on for %s of the time", f.MeanTensors, size(f.MeanBytes), percent(r.part(negotiation)))
	}
	if q := r.part(queue); q >= 0.25 && q > r.part(waiting) {
		add("", "put operations that do not depend on each other into process sets of their own: each set has a lane",
			"granted operations wait for the ones before them for %s of the time", percent(q))
	}
	if tcp := c.backends["tcp"]; tcp > 0 && 2*tcp > c.operations && c.hosts() == 1 && len(r.Missing) == 0 && r.Size > 1 && r.part(exchange) >= 0.1 {
		add("HOROVOD_CPU_OPERATIONS", "set it to shm, or leave it out",
			"all ranks are on one host, and %s of the time go into exchanging data by TCP", percent(r.part(exchange)))
	}
	if p := r.part(copies); p >= 0.1 && p > r.part(exchange) && !r.Horovod {
		add("", "allocate tensors with hvd.Alloc, which are not copied",
			"copies take %s of the time, the exchange itself %s", percent(p), percent(r.part(exchange)))
	}
	return all
}

// once is how many names came once at each rank at most.
func (c *collection) once() int64 {
	n := int64(0)
	for id := range c.tensors {
		if t := &c.tensors[id].total; id != int(noName) && t.n > 0 && t.n <= uint64(len(c.streams)) {
			n++
		}
	}
	return n
}

// hosts is on how many hosts the ranks with files ran.
func (c *collection) hosts() int {
	var all []string
	for _, f := range c.job.ranks {
		if h := f.host(); !slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	return len(all)
}

// place is where a rank ran.
func (c *collection) place(rank int) string {
	for _, f := range c.job.ranks {
		if f.rank == rank && f.host() != "" {
			return "host " + printable(f.host())
		}
	}
	return "its host"
}

func percent(share float64) string {
	switch p := 100 * share; {
	case p == 0:
		return "0 %"
	case p < 0.1:
		return "less than 0.1 %"
	case p < 9.95, p >= 99 && p < 99.95: // how little is left is worth knowing
		return fmt.Sprintf("%.1f %%", p)
	default:
		return fmt.Sprintf("%.0f %%", p)
	}
}

// duration shows microseconds to three places.
func duration(us float64) string {
	for _, unit := range []struct {
		name string
		us   float64
	}{{"s", 1e6}, {"ms", 1e3}} {
		if us >= 0.9995*unit.us {
			return places(us/unit.us) + " " + unit.name
		}
	}
	return places(us) + " us"
}

func places(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 9.995:
		return fmt.Sprintf("%.2f", v)
	case v < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// size shows bytes.
func size(bytes float64) string {
	for _, unit := range []struct {
		name  string
		bytes float64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if bytes >= unit.bytes {
			return places(bytes/unit.bytes) + " " + unit.name
		}
	}
	return fmt.Sprintf("%.0f B", bytes)
}

// printable is a text of a file as it may be shown on a terminal.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}
