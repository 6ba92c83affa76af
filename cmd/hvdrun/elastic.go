package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// elasticFlags are the flags of an elastic job.
type elasticFlags struct {
	min, max   string
	discovery  string
	spares     int
	slots      int
	resetLimit int
	cooldown   cooldown
	blacklist  string
}

const (
	discoveryInterval = time.Second
	maxCooldown       = time.Hour
	noResetLimit      = -1
	discoveryLimit    = 60 * time.Second
	settleTime        = 2 * time.Second
)

// group returns the flags of elastic jobs.
func (e *elasticFlags) group() group {
	g := newGroup("Elastic jobs (docs/elastic.md)")
	f := g.flags
	f.StringVar(&e.min, "min-num-proc", "",
		"minimum number `N` of ranks of an elastic job; also --min-np. With fewer ranks the training pauses (default: -np)")
	f.StringVar(&e.max, "max-num-proc", "",
		"maximum number `N` of ranks of an elastic job; also --max-np (default: all slots, at most 4096)")
	f.IntVar(&e.spares, "spares", 0,
		"number `N` of processes that are started besides --max-np (default: -np) ranks, and take the places of ranks that fail")
	f.StringVar(&e.discovery, "host-discovery-script", "",
		"`COMMAND` that prints the hosts of an elastic job, a line for each, as name or name:slots. It is run again 1 s after "+
			"it has ended")
	f.IntVar(&e.slots, "slots-per-host", 1, "number `N` of slots of a host for which the script prints none")
	f.IntVar(&e.resetLimit, "reset-limit", noResetLimit,
		"how often `N` the ranks of an elastic job may change (default: any number)")
	f.Lookup("reset-limit").DefValue = ""
	f.Var(&e.cooldown, "blacklist-cooldown-range",
		"for how many seconds `LO,HI` no process is started where one has failed. The time doubles with each failure (default: "+
			"1,3600 for a slot, for ever for a host)")
	f.StringVar(&e.blacklist, "blacklist", "slot",
		"`UNIT` that is not used after the failure of a process: its slot, or as in Horovod its host, whose other processes "+
			"are killed")
	return g
}

// cooldown is the value of --blacklist-cooldown-range.
type cooldown [2]time.Duration

func (c *cooldown) Type() string { return "LO,HI" }

func (c *cooldown) String() string {
	if c[1] == 0 {
		return ""
	}
	return fmt.Sprintf("%g,%g", c[0].Seconds(), c[1].Seconds())
}

func (c *cooldown) Set(text string) error {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
	if len(words) != 2 {
		return fmt.Errorf("want two numbers of seconds, as in 10,100")
	}
	for i, w := range words {
		seconds, err := strconv.ParseFloat(w, 64)
		if err != nil || !(seconds >= 1 && seconds <= maxCooldown.Seconds()) {
			return fmt.Errorf("want numbers of seconds from 1 to %g", maxCooldown.Seconds())
		}
		c[i] = time.Duration(seconds * float64(time.Second))
	}
	if c[0] > c[1] {
		return fmt.Errorf("want a first number that is at most the second one")
	}
	return nil
}

// isElastic reports whether the flags ask for an elastic job.
func (e *elasticFlags) isElastic() bool { return e.min != "" || e.discovery != "" }

// elastic returns what the flags ask for, or nil if the job is not elastic. np is the number of slots that
// there must be at the start.
func (r *runner) elastic(flags *pflag.FlagSet, np int, hosts []launch.Host,
	set *config.Config) (*launch.Elastic, error) {
	e := &r.elasticFlags
	if !e.isElastic() {
		for _, name := range []string{"max-num-proc", "slots-per-host", "reset-limit",
			"blacklist-cooldown-range", "blacklist", "spares"} {
			if flags.Changed(name) {
				return nil, usagef("--%s is for elastic jobs: give --min-np or --host-discovery-script too", name)
			}
		}
		return nil, nil
	}
	switch {
	case r.mpi.on:
		return nil, usagef("--min-np and --host-discovery-script cannot be used with --mpi, because MPI cannot lose ranks")
	case flags.Changed("torch-store") && r.torchStore != torchStoreOff:
		return nil, usagef("--torch-store cannot be used in an elastic job, whose ranks change")
	case e.discovery == "" && flags.Changed("slots-per-host"):
		return nil, usagef("--slots-per-host is for the hosts of --host-discovery-script: give the numbers of slots as in -H h1:4")
	case set.BindTo != binding.None:
		return nil, usagef("--bind-to %s cannot be used in an elastic job, because the ranks of a host change", set.BindTo)
	}
	c := elastic.Config{Min: np, Timeout: set.ElasticTimeout, StartTimeout: set.StartTimeout,
		Settle: settleTime, Answer: set.LivenessTimeout, ResetLimit: e.resetLimit, Cooldown: e.cooldown}
	var err error
	if e.min != "" {
		if c.Min, err = strconv.Atoi(e.min); err != nil || c.Min < 1 || c.Min > np {
			return nil, usagef("--min-np: got %q, want a number from 1 to %d, the value of -np", e.min, np)
		}
	}
	if e.max != "" {
		if c.Max, err = strconv.Atoi(e.max); err != nil || c.Max < np || c.Max > launch.MaxRanks {
			return nil, usagef("--max-np: got %q, want a number from %d, the value of -np, to %d", e.max, np, launch.MaxRanks)
		}
	}
	if most := launch.MaxRanks - max(c.Max, np); e.spares < 0 || e.spares > most {
		return nil, usagef("--spares: got %d, want a number from 0 to %d", e.spares, most)
	}
	c.Spares = e.spares
	if c.Spares > 0 && c.Max == 0 {
		c.Max = np
	}
	switch e.blacklist {
	case "slot":
		if !flags.Changed("blacklist-cooldown-range") {
			c.Cooldown = [2]time.Duration{time.Second, maxCooldown}
		}
	case "host":
		c.ByHost = true
	default:
		return nil, usagef("--blacklist: got %q, want slot or host", e.blacklist)
	}
	if flags.Changed("reset-limit") && e.resetLimit < 0 {
		return nil, usagef("--reset-limit: got %d, want at least 0", e.resetLimit)
	}
	c.Fixed = e.discovery == ""
	job := &launch.Elastic{Config: c}
	if c.Fixed {
		slots := launch.Slots(hosts)
		switch {
		case hosts == nil:
		case slots < np:
			return nil, usagef("-np: got %d, but the hosts have %d slots, and without --host-discovery-script they get no more",
				np, slots)
		case c.Spares > 0 && slots < c.Max+c.Spares:
			fmt.Fprintf(r.stderr, "hvdrun: warning: --spares %d: the hosts have %d slots for up to %d ranks, so the number of "+
				"spares is %d\n", c.Spares, slots, c.Max, max(0, slots-c.Max))
		}
		return job, nil
	}
	if hosts != nil {
		return nil, usagef("--host-discovery-script cannot be used together with --hosts or --hostfile")
	}
	if e.slots < 1 || e.slots > launch.MaxSlots {
		return nil, usagef("--slots-per-host: got %d, want 1 to %d", e.slots, launch.MaxSlots)
	}
	job.Discovery = &launch.Discovery{Command: e.discovery, Slots: e.slots, Interval: discoveryInterval,
		Limit: discoveryLimit}
	return job, nil
}

// elasticCounts are the metrics of an elastic job that the launcher counts.
type elasticCounts struct {
	mu      sync.Mutex
	hosts   []string // of the ranks
	metrics metrics.Elastic
}

// changed counts a new generation.
func (c *elasticCounts) changed(r *elastic.Roster) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hosts = nil
	for _, m := range r.Members {
		c.hosts = append(c.hosts, m.Host)
	}
	c.metrics.Resets = int(r.Generation) - 1
}

// resumed counts a stop of the training.
func (c *elasticCounts) resumed(s *elastic.Resume) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.Lost {
		c.metrics.StoppedByFailures += s.Stopped
	} else {
		c.metrics.StoppedByPlan += s.Stopped
	}
}

// get returns the counts, and the host of each rank.
func (c *elasticCounts) get() ([]string, *metrics.Elastic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.metrics
	return c.hosts, &now
}

// serveMembers connects an elastic job with its processes, which talk to the launcher through kv, until ctx
// ends.
func serveMembers(ctx context.Context, e *launch.Elastic, kv *store.HashStore, reports *reporter,
	counts *elasticCounts) {
	events := make(chan func(*elastic.Machine, time.Time) elastic.Output)
	e.Events = events
	// put passes an event to the supervisor, and returns when the supervisor has handled it. It reports
	// whether the job is over.
	put := func(f func(*elastic.Machine, time.Time) elastic.Output) (over bool) {
		handled := make(chan struct{})
		select {
		case events <- func(m *elastic.Machine, now time.Time) elastic.Output {
			defer close(handled)
			over = m.Over()
			return f(m, now)
		}:
			<-handled
			return over
		case <-ctx.Done():
			return true
		}
	}
	members := joblink.NewMembers(kv)
	e.Resumed = counts.resumed
	e.Publish = func(r *elastic.Roster) {
		reports.setRanks(r.Generation, len(r.Members))
		counts.changed(r)
		_ = members.Publish(r) // fails only if kv is closed, and then the job is over
	}
	reports.ranks.OnVerdict(func(v joblink.Verdict, by topo.Rank) {
		go put(func(m *elastic.Machine, now time.Time) elastic.Output {
			return m.Failed(now, m.Processes(v.Generation, by, v.Ranks, v.Starting), logs.Escape(v.Reason))
		})
	})
	go func() {
		// It fails only if kv is closed.
		_ = members.Listen(ctx, func(event joblink.MemberEvent) (a joblink.Answer) {
			a.Over = put(func(m *elastic.Machine, now time.Time) elastic.Output {
				switch event.Kind {
				case joblink.Building:
					a.Later = m.HasRoster()
					if !a.Later {
						return m.Ready(now, event.Member)
					}
				case joblink.Ready:
					return m.Ready(now, event.Member)
				case joblink.Synced:
					return m.Synced(now, event.Generation, event.Stopped)
				case joblink.Leave:
					return m.Leave(now, event.Member, logs.Escape(event.Why))
				case joblink.Done:
					return m.Done(now, event.Member)
				case joblink.Again:
					return m.Again(now, event.Member)
				}
				return elastic.Output{}
			})
			return a
		})
	}()
}
