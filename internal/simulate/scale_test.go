package simulate

import (
	"bytes"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"
	"text/tabwriter"
	"time"
)

var (
	scale    = flag.Bool("scale", false, "print the table of docs/scale.md (make scale)")
	maxRanks = flag.Int("ranks", 16384, "leave out larger jobs from the table")
)

// TestScale prints the tables of docs/scale.md. Everything but the memory is computed from the seed.
func TestScale(t *testing.T) {
	if !*scale {
		t.Skip("make scale prints the table")
	}
	debug.SetGCPercent(300)
	debug.SetMemoryLimit(12 << 30)
	var out bytes.Buffer
	w := tabwriter.NewWriter(&out, 0, 0, 1, ' ', 0)
	row := func(format string, args ...any) { fmt.Fprintf(w, "|\t"+format+"\t|\n", args...) }
	flush := func() {
		w.Flush()
		fmt.Println(out.String())
		out.Reset()
	}
	sizes := slicesUpTo(64, 1024, 16384)
	steps := func(workload *Workload, bursts int, policies ...Policy) {
		row("workload\t|\tranks\t|\tpolicy\t|\tstep\t|\tconnections\t|\tframes\t|\tKiB\t|\tCPU, rank 0\t|\tleader\t|\tmember\t|\tlatency")
		row("---\t|\t---:\t|\t---\t|\t---\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:")
		for _, ranks := range sizes {
			for _, p := range policies {
				if ranks > 1024 && p == Star {
					continue // it takes too long
				}
				r := mustRun(t, Config{Ranks: ranks, Policy: p, Workload: workload, Steps: 2, Bursts: bursts,
					Backward: 100 * time.Millisecond, Jitter: 0.02, Seed: 1})
				for i, s := range r.Steps {
					row("%s\t|\t%d\t|\t%s\t|\t%s\t|\t%d\t|\t%d\t|\t%d\t|\t%s\t|\t%s\t|\t%s\t|\t%s", workload.Name, ranks, p,
						[]string{"uncached", "cached"}[i], s.Connections, s.Root.FramesIn+s.Root.FramesOut,
						(s.Root.BytesIn+s.Root.BytesOut)>>10, short(s.Root.CPU), short(s.Leader.CPU),
						short(s.Member.CPU), short(s.Latency))
				}
				runtime.GC()
			}
		}
		flush()
	}
	steps(Small(1), 1, Star, Leaders, Levels)
	sizes = slicesUpTo(64, 1024)
	steps(shapes(t, "resnet50"), 10, Star, Leaders, Levels)
	steps(shapes(t, "gpt2"), 10, Leaders, Levels)
	steps(Sharded(8, 32), 8, Leaders, Levels)

	row("ranks\t|\tfault\t|\tverdict at all ranks")
	row("---:\t|\t---\t|\t---:")
	for _, ranks := range slicesUpTo(64, 1024, 16384) {
		for _, f := range []Fault{{Rank: 20}, {Rank: 16}, {Rank: 8}, {Rank: 16, Host: true},
			{Rank: 8, Host: true}} {
			if f.Rank == 8 && usual(ranks) != Levels {
				continue
			}
			r := mustRun(t, Config{Ranks: ranks, Policy: usual(ranks), Workload: Small(8), Steps: 2,
				Fault: f})
			row("%d\t|\t%s\t|\t%s", ranks, map[Fault]string{
				{Rank: 20}: "a rank is killed",
				{Rank: 16}: "a leader is killed", {Rank: 16, Host: true}: "the host of a leader vanishes",
				{Rank: 8}:             "a leader of leaders is killed",
				{Rank: 8, Host: true}: "the host of a leader of leaders vanishes"}[f], short(r.Verdict))
		}
	}
	flush()

	row("ranks\t|\tjoin\t|\tcheck-in\t|\tgather\t|\tready\t|\tCPU, rank 0\t|\tconnections\t|\tMiB at rank 0\t|\tMiB at others\t|\tbytes of a record\t|\tre-formed without a host: join and first cycle")
	row("---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:\t|\t---:")
	for _, ranks := range slicesUpTo(256, 1024, 4096, 16384) {
		j, again := Join(ranks, 8, &Measured), Join(ranks-8, 8, &Measured)
		r := mustRun(t, Config{Ranks: ranks - 8, Policy: usual(ranks), Workload: Small(8), Steps: 1})
		row("%d\t|\t%s\t|\t%s\t|\t%s\t|\t%s\t|\t%s\t|\t%d\t|\t%.1f\t|\t%.1f\t|\t%d\t|\t%s", ranks, short(j.Time()), short(j.CheckIn),
			short(j.Gather), short(j.Ready), short(j.RootCPU), j.Connections, float64(j.RootBytes)/(1<<20),
			float64(j.MemberBytes)/(1<<20),
			j.RecordBytes, short(again.Time()+r.Steps[0].Latency))
	}
	flush()

	fmt.Println("Memory of the state machines, measured:")
	row("workload\t|\tranks\t|\tcoordinator\t|\tleader\t|\tmember")
	row("---\t|\t---:\t|\t---:\t|\t---:\t|\t---:")
	for _, ranks := range slicesUpTo(64, 1024, 4096) {
		for _, workload := range []*Workload{Small(1), shapes(t, "resnet50")} {
			m := measureMemory(t, Config{Ranks: ranks, PerHost: 8, Policy: usual(ranks), Workload: workload,
				Steps: 2, CacheCapacity: 1024, Costs: Measured})
			row("%s\t|\t%d\t|\t%d KiB\t|\t%d KiB\t|\t%d KiB", workload.Name, ranks, m.coordinator>>10,
				m.leader>>10, m.member>>10)
		}
	}
	flush()
}

// memory is the heap of the state machines of each role, in bytes.
type memory struct{ coordinator, leader, member uint64 }

// measureMemory simulates a job and measures the heap of its state machines afterwards. Members share the
// responses of cached tensors in the simulation, so a member has its part of them.
func measureMemory(t *testing.T, cfg Config) memory {
	t.Helper()
	j, err := run(cfg)
	if err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	j.queue, j.operations, j.loads = nil, nil, nil
	for _, p := range j.all {
		p.inbox, p.queued, p.parts = nil, nil, nil
	}
	before := heap()
	j.all[0].coord = nil
	after := heap()
	m := memory{coordinator: before - after}
	before = after
	for _, p := range j.all {
		p.member = nil
	}
	after = heap() // a combiner is referred to by its process too
	m.member, before = (before-after)/uint64(len(j.all)), after
	leaders := uint64(0)
	for _, p := range j.all {
		if p.combiner != nil {
			leaders++
			p.combiner = nil
		}
	}
	m.leader = (before - heap()) / max(leaders, 1)
	return m
}

// usual returns the policy of a real job on hosts of 8 (control.Leaders).
func usual(ranks int) Policy {
	if ranks/8-1 > 64 {
		return Levels
	}
	return Leaders
}

func slicesUpTo(sizes ...int) (kept []int) {
	for _, n := range sizes {
		if n <= *maxRanks {
			kept = append(kept, n)
		}
	}
	return kept
}

func short(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d us", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}
