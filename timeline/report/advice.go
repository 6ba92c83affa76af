package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

const (
	// most is the share from which the report says that a part is most of the whole.
	most = 0.5
	// mostHosts is the maximum number of hosts that a sentence names.
	mostHosts = 8
)

// steady returns the length of the time after the start-up and the number of steps in this time.
func (r *Report) steady() analysis.Span {
	return analysis.Span{Time: time.Duration((r.DurationUS - r.StartupUS) * nanosPerMicro), Steps: r.Steps}
}

// ranksOf returns the given ranks as a phrase, such as "ranks 1, 2, 5".
func ranksOf(late []*analysis.RankLateness) string {
	var ranks []int
	for _, l := range late {
		ranks = append(ranks, l.Rank)
	}
	return topo.FormatRanks(ranks)
}

// verdict returns a clause that says which ranks were late.
func (r *Report) verdict(f *analysis.Lateness) string {
	worst, second := f.Worst()
	switch {
	case f.Compared == 0 && r.Operations == 0:
		return "no operation to compare"
	case f.Compared == 0:
		return "lateness is unknown: the files have submission times of only one rank"
	case worst == nil && r.ClockErrorUS > 0:
		return fmt.Sprintf("no rank was late by more than the clock error, %s", duration(r.ClockErrorUS))
	case worst == nil:
		return "no rank was late"
	}
	late := f.Suspects(r.steady())
	switch {
	case len(late) == 1 && second == nil:
		return fmt.Sprintf("rank %d held up all others for %s; no other rank did", late[0].Rank,
			r.time(late[0].Held))
	case len(late) == 1:
		return fmt.Sprintf("rank %d held up all others for %s; no other rank held up all others for more than %s", late[0].Rank,
			r.time(late[0].Held), r.perStep(second.Held))
	case len(late) > 1:
		who := ranksOf(late)
		if host := r.wholeHost(late); host != "" {
			who += ", all ranks of host " + logs.Plain(host) + ","
		}
		return fmt.Sprintf("%s are late together: they caused %s of the waiting; at least one rank waited for another for %s", who, percent(f.Share(late...)), r.time(f.Anybody))
	case !r.steady().Long(worst.Held):
		return fmt.Sprintf("no rank held up all others for long: rank %d did for the longest time, %s", worst.Rank,
			r.time(worst.Held))
	case second == nil:
		return fmt.Sprintf("no rank stands out: rank %d held up all others for %s", worst.Rank,
			r.time(worst.Held))
	}
	return fmt.Sprintf("no rank stands out: rank %d held up all others for %s, and rank %d for %s", worst.Rank,
		r.time(worst.Held), second.Rank, r.time(second.Held))
}

// wholeHost returns the name of the host that has exactly the given ranks, in ascending order. It is empty if
// there is no such host, if all ranks are on it, or if it is not known where each rank ran.
func (r *Report) wholeHost(late []*analysis.RankLateness) string {
	for _, h := range r.Hosts {
		if len(r.Hosts) > 1 && len(r.Missing) == 0 && slices.EqualFunc(h.Ranks, late,
			func(rank int, l *analysis.RankLateness) bool { return rank == l.Rank }) {
			return h.Host
		}
	}
	return ""
}

// gain returns a clause that says how much shorter a step would be without the ranks that the verdict names
// or, if it names none, without any waiting of all others for one rank. It also returns the time per step in
// microseconds.
func (r *Report) gain(f *analysis.Lateness) (text string, us float64) {
	late := f.Suspects(r.steady())
	d, without := f.Held(), "no rank held up all others"
	switch len(late) {
	case 0:
	case 1:
		d, without = late[0].Held, ranksOf(late)+" were as fast as the others"
	default:
		d, without = f.Anybody, ranksOf(late)+" were as fast as the others"
	}
	if d == 0 {
		return "no time would be gained, because no rank was late", 0
	}
	what := "the job would take"
	if r.Steps > 0 {
		what = "a step would take"
	}
	us = micros(d) / float64(max(r.Steps, 1))
	return fmt.Sprintf("if %s, %s up to %s less", without, what, duration(us)), us
}

// where returns a clause that names the tensor with which most of the time begins for which the late rank
// held up all others: before it submits that tensor, it does something else. The later tensors of the step
// are late too. If there is no such tensor, or not one late rank, the clause names the tensor in which ranks
// waited longest. It is empty if they did not wait.
func (r *Report) where(f *analysis.Lateness) string {
	if late := f.Suspects(r.steady()); len(late) == 1 && 2*late[0].OriginHeld > late[0].Held {
		return fmt.Sprintf("rank %d is late with %s: %s of the time for which it held up all others begins there", late[0].Rank,
			logs.Plain(late[0].Origin), percent(float64(late[0].OriginHeld)/float64(late[0].Held)))
	}
	if len(r.TensorTable) == 0 || r.TensorTable[0].WaitedUS == 0 || r.Lateness.WaitedUS == 0 {
		return ""
	}
	t := r.TensorTable[0]
	return fmt.Sprintf("the ranks waited longest in %s %s: %s of all waiting", t.Kind, logs.Plain(t.Name),
		percent(t.WaitedUS/r.Lateness.WaitedUS))
}

// startup returns a clause about the start-up: how long it was, and which rank held up all others, if one
// did. The clause is empty if there was no start-up.
func (r *Report) startup(f *analysis.Lateness) string {
	if r.StartupUS == 0 {
		return ""
	}
	text := fmt.Sprintf("start-up (%s until the first complete step) is not counted", duration(r.StartupUS))
	if worst := f.WorstInStartup(time.Duration(r.StartupUS * nanosPerMicro)); worst != nil {
		text += fmt.Sprintf("; rank %d held up all others for %s of it", worst.Rank,
			duration(micros(worst.StartupHeld)))
	}
	return text
}

// perStep formats a duration d after the start-up. If there are steps, it formats d divided by their number.
func (r *Report) perStep(d time.Duration) string {
	return duration(micros(d)/float64(max(r.Steps, 1))) + " " + r.per()
}

// per returns the words that perStep puts after a time: "per step" if there are steps, otherwise "in total".
func (r *Report) per() string {
	if r.Steps > 0 {
		return "per step"
	}
	return "in total"
}

// time formats a duration d after the start-up, followed by its share of the whole time after the start-up.
func (r *Report) time(d time.Duration) string {
	return fmt.Sprintf("%s (%s of the time)", r.perStep(d), percent(r.share(d)))
}

// share returns d divided by the whole time after the start-up.
func (r *Report) share(d time.Duration) float64 { return micros(d) / (r.DurationUS - r.StartupUS) }

// part returns the share of the time after the start-up that a rank spent in phase p, averaged over the
// ranks.
func (r *Report) part(p phase) float64 {
	steady := r.DurationUS - r.StartupUS
	if steady == 0 || len(r.Phases) == 0 {
		return 0
	}
	sum := 0.0
	for _, rank := range r.Phases {
		sum += rank.US[phaseNames[p]]
	}
	return sum / float64(len(r.Phases)) / steady
}

// suggest returns suggestions to change settings or the program. Each has a reason, taken from the files.
func (r *Report) suggest(c *collection, f *analysis.Lateness, o Options) []Suggestion {
	all := []Suggestion{}
	add := func(setting, do, because string, args ...any) {
		all = append(all, Suggestion{Setting: setting, Do: do, Because: fmt.Sprintf(because, args...)})
	}
	late := f.Suspects(r.steady())
	const before = "before it submits, not at the network: its input pipeline, its share of the data, its cores (HOROVOD_THREAD_AFFINITY), other load on %s"
	switch {
	case len(late) == 1:
		add("", fmt.Sprintf("look at what rank %d does "+before, late[0].Rank, c.place(late[0])),
			"rank %d holds up all others for %s of the time", late[0].Rank, percent(r.share(late[0].Held)))
	case len(late) > 1:
		add("", fmt.Sprintf("look at what each of %s does "+before, ranksOf(late), c.place(late...)),
			"%s cause %s of the waiting", ranksOf(late), percent(f.Share(late...)))
	case r.Outside.Share >= most:
		add("", "look at the program, not at gohvd or the network: its input pipeline (more DataLoader workers, prefetching), then its computation",
			"every rank has no operation in flight for at least %s of %s %s", duration(r.Outside.US),
			duration(r.Outside.StepUS), r.per())
	}
	once := c.once()
	autoNamed := once >= 100 && float64(once) >= most*float64(r.Names)
	if autoNamed {
		add("", "give tensors names that are the same in every step",
			"%d of %d names occur only once, and a tensor with a new name is negotiated in full", once,
			r.Names)
	}
	if n := r.Cache.SteadyHits + r.Cache.SteadyMisses; !autoNamed && n >= 100 &&
		float64(r.Cache.SteadyMisses) >= 0.05*float64(n) {
		missed := percent(float64(r.Cache.SteadyMisses) / float64(n))
		if o.CacheCapacity > 0 && r.Names > o.CacheCapacity {
			add("HOROVOD_CACHE_CAPACITY", fmt.Sprintf("set it to %d or more", r.Names),
				"%s of the requests whose name had occurred before were not cached: there are %d names, but the cache holds only %d responses", missed, r.Names, o.CacheCapacity)
		} else {
			add("", "keep shapes, types and operations of a name the same from step to step",
				"%s of the requests whose name had occurred before were not cached, although the cache has room for all %d names", missed, r.Names)
		}
	}
	if f := &r.Fusion; f.Responses >= 200 && r.Steps > 0 && f.MeanTensors < 2 && f.MeanBytes < 64<<10 &&
		r.part(negotiation) >= 0.1 {
		add("HOROVOD_CYCLE_TIME",
			"set it to 1 (ms), so that more tensors are fused, or submit them as a group",
			"a response has %.1f tensors and %s on average, and negotiation takes %s of the time",
			f.MeanTensors, size(f.MeanBytes), percent(r.part(negotiation)))
	}
	// Process sets are suggested only if operations spend less time in the exchange of data than in the
	// queue. Otherwise further lanes would only share the same network.
	if q := r.part(queue); q >= 0.25 && q > r.part(waiting) && q > r.part(exchange) {
		add("", "put operations that do not depend on each other into different process sets: the operations of one set run one after the other",
			"granted operations wait for earlier operations for %s of the time", percent(q))
	}
	tcp, exchanging := c.backends[message.TCP], r.part(exchange)+r.part(negotiation)
	switch {
	case tcp > 0 && 2*tcp > c.operations && c.hosts() == 1 && len(r.Missing) == 0 && r.Size > 1 &&
		r.part(exchange) >= 0.1:
		add("HOROVOD_CPU_OPERATIONS", "set it to shm, or unset it",
			"all ranks are on one host, and the exchange of data over TCP takes %s of the time",
			percent(r.part(exchange)))
	case len(late) == 0 && exchanging >= 0.3 && r.Size > 1:
		faster := "look at the network between the hosts: measure it with hvdbench, choose its interface (HOROVOD_GLOO_IFACE)"
		if c.hosts() == 1 && len(r.Missing) == 0 {
			faster = "give each rank processor cores that nothing else uses"
		}
		add("", faster+"; or send less: 16-bit compression, fewer and larger steps (backward_passes_per_step)",
			"no rank is late, the exchange of data takes %s of the time, and negotiation takes %s",
			percent(r.part(exchange)), percent(r.part(negotiation)))
	}
	if p := r.part(copies); p >= 0.1 && p > r.part(exchange) {
		add("", "allocate tensors with hvd.Alloc, which avoids the copies",
			"copies take %s of the time, and the exchange takes %s", percent(p), percent(r.part(exchange)))
	}
	return all
}

// once returns the number of tensor names that occur at most once at each rank.
func (c *collection) once() int64 {
	n := int64(0)
	for _, t := range c.names {
		if t.total.Len() <= len(c.streams) {
			n++
		}
	}
	return n
}

// hosts returns the number of hosts on which the ranks with files ran.
func (c *collection) hosts() int {
	var all []string
	for _, f := range c.job.ranks {
		if h := f.host(); !slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	return len(all)
}

// place returns a phrase that names the hosts of ranks. It names none if the host of a rank is unknown.
func (c *collection) place(late ...*analysis.RankLateness) string {
	var hosts []string
	known := 0
	for _, f := range c.job.ranks {
		is := slices.ContainsFunc(late, func(l *analysis.RankLateness) bool { return l.Rank == f.rank })
		if !is || f.host() == "" {
			continue
		}
		known++
		if host := logs.Plain(f.host()); !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	switch n := len(hosts); {
	case known < len(late) && len(late) == 1:
		return "its host"
	case known < len(late):
		return "their hosts"
	case n == 1:
		return "host " + hosts[0]
	case n > mostHosts:
		hosts = append(hosts[:mostHosts], fmt.Sprintf("and %d more", n-mostHosts))
	}
	return "hosts " + strings.Join(hosts, ", ")
}

// percent formats a share as a percentage.
func percent(share float64) string {
	switch p := 100 * share; {
	case p == 0:
		return "0 %"
	case p < 0.1:
		return "less than 0.1 %"
	case p < 9.95, p >= 99 && p < 99.95: // one decimal is shown for shares close to 0 % or 100 %
		return fmt.Sprintf("%.1f %%", p)
	default:
		return fmt.Sprintf("%.0f %%", p)
	}
}

// duration formats a time in microseconds with three significant digits and a unit.
func duration(us float64) string {
	switch {
	case us >= 0.9995e6:
		return places(us/1e6) + " s"
	case us >= 0.9995e3:
		return places(us/1e3) + " ms"
	}
	return places(us) + " us"
}

// places formats a number with up to three significant digits.
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

// size formats a number of bytes with a unit.
func size(bytes float64) string {
	switch {
	case bytes >= 1<<30:
		return places(bytes/(1<<30)) + " GiB"
	case bytes >= 1<<20:
		return places(bytes/(1<<20)) + " MiB"
	case bytes >= 1<<10:
		return places(bytes/(1<<10)) + " KiB"
	}
	return fmt.Sprintf("%.0f B", bytes)
}
