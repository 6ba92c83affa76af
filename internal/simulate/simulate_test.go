package simulate

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// shapes reads a list of parameters of hvdbench.
func shapes(t *testing.T, name string) *Workload {
	f, err := os.Open("../../cmd/hvdbench/shapes/" + name + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := ReadWorkload(name, f)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func mustRun(t *testing.T, cfg Config) *Result {
	t.Helper()
	cfg.PerHost, cfg.Costs = 8, Measured
	if cfg.CacheCapacity == 0 {
		cfg.CacheCapacity = 1024
	}
	r, err := Run(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// policies has the policies. With groups of 2 leaders, leaders have leaders on two levels.
var policies = []struct {
	policy Policy
	group  int
}{{Star, 0}, {Leaders, 0}, {Levels, 0}, {Levels, 2}}

// The same seed gives the same frames at the same times, and another seed gives others.
func TestSeed(t *testing.T) {
	for _, p := range policies {
		digest := func(seed uint64) uint64 {
			return mustRun(t, Config{Ranks: 64, Policy: p.policy, Group: p.group, Workload: Small(40),
				Steps: 3, Bursts: 5, Backward: 10 * time.Millisecond, Jitter: 0.1, Seed: seed}).Digest
		}
		if a, b, c := digest(1), digest(1), digest(2); a != b || a == c {
			t.Errorf("%v: seeds 1, 1 and 2 give the digests %x, %x and %x", p, a, b, c)
		}
	}
}

// Of four ranks that share a core, only one runs at a time, and being woken takes 1 ms. Rank 3 runs first,
// rank 0 after it and, because it was woken last, again after rank 1 and after rank 2. It grants after 6 ms,
// and the others have the grant 1, 2 and 3 ms later. With a core for each rank, all run at once.
func TestCores(t *testing.T) {
	for cores, want := range map[int]time.Duration{0: 1, 1: 9, 4: 1} {
		r, err := Run(Config{Ranks: 4, PerHost: 8, Policy: Star, Workload: Small(2), Steps: 1, Bursts: 2,
			Backward: 500 * time.Millisecond, Cores: cores,
			Costs: Costs{Wake: time.Millisecond, BytesPerSecond: 1e15}})
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Steps[0].Latency; got != want*time.Millisecond {
			t.Errorf("%d cores: the last grant comes after %v, want %d ms", cores, got, want)
		}
	}
}

// Every rank gets a verdict, which names the rank that was killed, or the ranks of a host that vanished that
// had a connection to rank 0.
func TestFaults(t *testing.T) {
	for _, p := range policies {
		connected := []topo.Rank{16}
		if p.policy == Star {
			connected = []topo.Rank{16, 17, 18, 19, 20, 21, 22, 23}
		}
		for _, c := range []struct {
			fault Fault
			want  []topo.Rank
			most  time.Duration
		}{
			{Fault{Rank: 20}, []topo.Rank{20}, 10 * time.Millisecond},
			{Fault{Rank: 16}, []topo.Rank{16}, 10 * time.Millisecond},
			{Fault{Rank: 16, Host: true}, connected, 12 * time.Second},
			{Fault{Rank: 8}, []topo.Rank{8}, 10 * time.Millisecond}, // with levels, it leads rank 16
		} {
			r := mustRun(t, Config{Ranks: 64, Policy: p.policy, Group: p.group, Workload: Small(4), Steps: 2,
				Fault: c.fault})
			if !slices.Equal(r.Blamed, c.want) || r.Verdict <= 0 || r.Verdict > c.most {
				t.Errorf("%v: %+v: the verdict names %v after %v, want %v after at most %v", p, c.fault,
					r.Blamed, r.Verdict, c.want, c.most)
			}
		}
	}
}

// A straggler delays the step by its lateness, and process sets of shards are negotiated by their members.
func TestWorkloads(t *testing.T) {
	var ends [2]time.Duration // of jobs without and with a straggler
	for i := range ends {
		const steps = 2
		j, err := run(Config{Ranks: 64, PerHost: 8, Policy: Leaders, Workload: Small(4), Steps: steps,
			CacheCapacity: 1024, Costs: Measured, Straggler: 9, Late: time.Duration(i) * time.Second / steps})
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = j.now
	}
	if late := ends[1] - ends[0]; late < 990*time.Millisecond || late > 1010*time.Millisecond {
		t.Errorf("the straggler delays the job by %v, want 1 s", late)
	}
	r := mustRun(t, Config{Ranks: 64, Policy: Leaders, Workload: Sharded(4, 16), Steps: 2})
	if s := r.Steps[1]; s.Grants < 3 {
		t.Errorf("got %d grants at rank 0, want at least those of its two sets", s.Grants)
	}
}
