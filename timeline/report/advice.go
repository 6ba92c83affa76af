package report

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/gohvd/gohvd/topo"
)

const (
	// most is the share of something from which it is most of it.
	most = 0.5
	// worthwhile is the share of the time below which it is not worth while to look for the rank that holds up the others.
	worthwhile = 0.05
	// noticeable is the time per step, in us, below which it is not either: waking a process late costs as much.
	noticeable = 100
	// outstanding is how many times as long as any other a rank that is named alone holds up the others. Among ranks that take turns one
	// is the worst too, and of two that have waited for each other 50 times it often has two thirds.
	outstanding = 3
	// together is the share of all waiting from which ranks that are late at the same time are named as its cause.
	together = 0.8
)

// worst returns the ranks that held up all others longest and second longest; nil if none did, or no other.
func (r *Report) worst() (worst, second *LateRank) {
	for i := range r.Lateness.Ranks {
		switch l := &r.Lateness.Ranks[i]; {
		case l.HeldUS == 0:
		case worst == nil || l.HeldUS > worst.HeldUS:
			worst, second = l, worst
		case second == nil || l.HeldUS > second.HeldUS:
			second = l
		}
	}
	return worst, second
}

// steadyUS returns the time after the start-up.
func (r *Report) steadyUS() float64 { return r.DurationUS - r.StartupUS }

// long reports whether a time after the start-up is worth while to look into.
func (r *Report) long(us float64) bool {
	return us >= worthwhile*r.steadyUS() && us >= noticeable*float64(max(r.Steps, 1))
}

// late returns the ranks to look at: the one that holds up all others, or some that are late together, so that none of them does
// alone. It is empty if there are none.
func (r *Report) late() []*LateRank {
	l := &r.Lateness
	worst, second := r.worst()
	if worst != nil && r.long(worst.HeldUS) && worst.HeldShare >= most && (second == nil || worst.HeldUS >= outstanding*second.HeldUS) {
		return []*LateRank{worst}
	}
	if !r.long(l.AnybodyUS) {
		return nil
	}
	var all []*LateRank
	for i := range l.Ranks {
		all = append(all, &l.Ranks[i])
	}
	slices.SortStableFunc(all, func(a, b *LateRank) int { return cmp.Compare(b.CausedUS, a.CausedUS) })
	for n := 2; n <= len(all)/2; n++ {
		if shareOf(all[:n]) >= together && all[n-1].CausedUS >= outstanding*all[n].CausedUS {
			slices.SortFunc(all[:n], func(a, b *LateRank) int { return cmp.Compare(a.Rank, b.Rank) })
			return all[:n]
		}
	}
	return nil
}

// shareOf returns the share of all waiting that ranks have caused.
func shareOf(ranks []*LateRank) float64 {
	share := 0.0
	for _, l := range ranks {
		share += l.Share
	}
	return share
}

// ranksOf lists ranks, as in "ranks 1, 2, 5".
func ranksOf(late []*LateRank) string {
	var ranks []int
	for _, l := range late {
		ranks = append(ranks, l.Rank)
	}
	return topo.FormatRanks(ranks)
}

func (r *Report) verdict() string {
	l := &r.Lateness
	worst, second := r.worst()
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
	late := r.late()
	switch {
	case len(late) == 1 && second == nil:
		return fmt.Sprintf("rank %d held up all others for %s; no other did", late[0].Rank, r.held(late[0]))
	case len(late) == 1:
		return fmt.Sprintf("rank %d held up all others for %s; no other for more than %s", late[0].Rank, r.held(late[0]), r.perStep(second.HeldUS))
	case len(late) > 1:
		return fmt.Sprintf("%s are late together: they caused %s of the waiting, and others waited for %s (%s of the time)", ranksOf(late),
			percent(shareOf(late)), r.perStep(l.AnybodyUS), percent(l.AnybodyUS/r.steadyUS()))
	case !r.long(worst.HeldUS):
		return fmt.Sprintf("no rank held up the others for long: rank %d most, for %s", worst.Rank, r.held(worst))
	case second == nil:
		return fmt.Sprintf("no rank stands out: rank %d held up all others for %s", worst.Rank, r.held(worst))
	}
	return fmt.Sprintf("no rank stands out: rank %d held up all others for %s, rank %d for %s", worst.Rank, r.held(worst), second.Rank, r.held(second))
}

// startup returns the verdict on the start-up.
func (r *Report) startup() string {
	if r.StartupUS == 0 {
		return ""
	}
	text := fmt.Sprintf("start-up, %s until the first complete step, is not counted", duration(r.StartupUS))
	var worst *LateRank
	for i := range r.Lateness.Ranks {
		if l := &r.Lateness.Ranks[i]; worst == nil || l.StartupHeldUS > worst.StartupHeldUS {
			worst = l
		}
	}
	if worst != nil && worst.StartupHeldUS >= worthwhile*r.StartupUS {
		text += fmt.Sprintf("; rank %d held up all others for %s of it", worst.Rank, duration(worst.StartupHeldUS))
	}
	return text
}

// perStep shows a time after the start-up.
func (r *Report) perStep(us float64) string {
	return duration(us/float64(max(r.Steps, 1))) + " " + r.per()
}

// per says what times are divided by.
func (r *Report) per() string {
	if r.Steps > 0 {
		return "per step"
	}
	return "in all"
}

// held shows for how long a rank held up the others.
func (r *Report) held(l *LateRank) string {
	return fmt.Sprintf("%s (%s of the time)", r.perStep(l.HeldUS), percent(l.HeldUS/r.steadyUS()))
}

// part is the share of the time of all ranks that went into a phase.
func (r *Report) part(p phase) float64 {
	if r.steadyUS() == 0 || len(r.Phases) == 0 {
		return 0
	}
	sum := 0.0
	for _, rank := range r.Phases {
		sum += rank.US[phaseNames[p]]
	}
	return sum / float64(len(r.Phases)) / r.steadyUS()
}

// suggest says what could be set otherwise, where the files show a reason.
func (r *Report) suggest(c *collection, o Options) []Suggestion {
	all := []Suggestion{}
	add := func(setting, do, because string, args ...any) {
		all = append(all, Suggestion{Setting: setting, Do: do, Because: fmt.Sprintf(because, args...)})
	}
	late := r.late()
	const before = "before it submits: its input pipeline, its share of the data, its cores (HOROVOD_THREAD_AFFINITY), other load on %s; not at the network"
	switch {
	case len(late) == 1:
		add("", fmt.Sprintf("look at what rank %d does "+before, late[0].Rank, c.place(late[0].Rank)),
			"it holds up all others for %s of the time", percent(late[0].HeldUS/r.steadyUS()))
	case len(late) > 1:
		add("", fmt.Sprintf("look at what each of %s does "+before, ranksOf(late), c.place(late[0].Rank)),
			"they cause %s of the waiting", percent(shareOf(late)))
	case r.Outside.Share >= most:
		add("", "look at the program, not at gohvd or the network: its input pipeline (more DataLoader workers, prefetching), then its computation",
			"at every rank at least %s of %s %s pass with no operation in flight", duration(r.Outside.US), duration(r.Outside.StepUS), r.per())
	}
	once := c.once()
	autoNamed := once >= 100 && float64(once) >= most*float64(r.Names)
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
	// While the ones before exchange data, lanes of their own would share the same network.
	if q := r.part(queue); q >= 0.25 && q > r.part(waiting) && q > r.part(exchange) {
		add("", "put operations that do not depend on each other into process sets of their own: each set has a lane",
			"granted operations wait for the ones before them for %s of the time", percent(q))
	}
	tcp, exchanging := c.backends["tcp"], r.part(exchange)+r.part(negotiation)
	switch {
	case tcp > 0 && 2*tcp > c.operations && c.hosts() == 1 && len(r.Missing) == 0 && r.Size > 1 && r.part(exchange) >= 0.1:
		add("HOROVOD_CPU_OPERATIONS", "set it to shm, or leave it out",
			"all ranks are on one host, and %s of the time go into exchanging data by TCP", percent(r.part(exchange)))
	case len(late) == 0 && exchanging >= 0.3 && r.Size > 1 && !r.Horovod:
		faster := "look at the network between the hosts: measure it with hvdbench, choose its interface (HOROVOD_GLOO_IFACE)"
		if c.hosts() == 1 && len(r.Missing) == 0 {
			faster = "give each rank processor cores of its own, if others use them"
		}
		add("", faster+"; or send less: 16-bit compression, fewer and larger steps (backward_passes_per_step)",
			"no rank is late, and %s of the time go into exchanging data, %s into agreeing on it", percent(r.part(exchange)), percent(r.part(negotiation)))
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
		if t := &c.tensors[id].total; id != int(noName) && t.N > 0 && t.N <= uint64(len(c.streams)) {
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
