package conformance

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// configuration is the configuration of a job. The results must not depend on it, except that floats may be
// added in another order.
type configuration struct {
	link               link
	cacheCapacity      int
	fusionThreshold    int64
	segmentBytes       int
	deterministic      bool
	disableGroupFusion bool
	leaders            int  // number of levels of leaders; without effect in lock-step
	tuned              bool // whether rank 0 changes settings every few grants
}

func (c configuration) String() string {
	return fmt.Sprintf(
		"%v cache=%d fusion=%d segments=%d deterministic=%v separate groups=%v leaders=%v tuned=%v",
		c.link, c.cacheCapacity, c.fusionThreshold, c.segmentBytes, c.deterministic, c.disableGroupFusion,
		c.leaders, c.tuned)
}

func (c configuration) apply(cfg *engine.Config) {
	cfg.Lockstep = c.link.lockstep
	cfg.CacheCapacity, cfg.FusionThresholdBytes, cfg.DisableGroupFusion = c.cacheCapacity, c.fusionThreshold,
		c.disableGroupFusion
	cfg.Deterministic = c.deterministic
	if c.leaders > 0 {
		cfg.LeadersAbove, cfg.LevelsAbove = 1, []int{0, 0, 1}[c.leaders]
		for r := range cfg.Size { // rank 0 is alone on its host
			cfg.Hosts = append(cfg.Hosts, fmt.Sprint("host", (r+2)/3))
		}
	}
	if c.link.lockstep {
		cfg.CycleTime = 20 * time.Microsecond
	}
}

// configurations returns one configuration for each row of a table that the function rows returns. The table
// has a column for each setting. If rows is product, the table contains every combination of values. If rows
// is pairs, it is smaller, but it contains each pair of values of any two settings.
func configurations(rows func(sizes []int) [][]int) (all []configuration) {
	capacities, thresholds, segments := []int{1024, 2, 0}, []int64{64 << 20, 64, 0}, []int{0, 64}
	for _, row := range rows([]int{len(links), len(capacities), len(thresholds), len(segments), 2, 2, 3, 2}) {
		all = append(all, configuration{links[row[0]], capacities[row[1]], thresholds[row[2]],
			segments[row[3]], row[4] == 1, row[5] == 1, row[6], row[7] == 1})
	}
	return all
}

// product returns the Cartesian product of the ranges from 0 to sizes[a]-1: one row for every combination of
// values.
func product(sizes []int) [][]int {
	rows := [][]int{nil}
	for _, n := range sizes {
		var longer [][]int
		for _, row := range rows {
			for v := range n {
				longer = append(longer, append(slices.Clone(row), v))
			}
		}
		rows = longer
	}
	return rows
}

// A random program runs in several configurations. It gives the results of the reference in each, and the
// same bits in all deterministic configurations. With -full, one program runs in all configurations, and five
// more in some.
func TestSameAnswersInEveryConfiguration(t *testing.T) {
	seed := pickSeed(t)
	programs := uint64(1)
	if *full {
		t.Run("all", func(t *testing.T) { sameAnswers(t, seed, configurations(product)) })
		programs = 6
	}
	for i := range programs {
		t.Run(fmt.Sprint(i), func(t *testing.T) { sameAnswers(t, seed+i, configurations(pairs)) })
	}
}

func sameAnswers(t *testing.T, seed uint64, configurations []configuration) {
	// The results of deterministic configurations are compared with the results of the first one. The results
	// of Adasum are compared only between configurations with the same segment size, because the order in
	// which Adasum adds products depends on the segment size.
	var first answers
	bySegments := make(map[int]answers)
	for i, c := range configurations {
		t.Run(c.String(), func(t *testing.T) {
			p := write(seed, 200, 10, choices(func(what) bool { return true }), false)
			got, tuner := p.newAnswers(), &restless{sameSegments: c.deterministic}
			testcluster.Run(t, testcluster.Options{
				Ranks: p.ranks, Transport: c.link.transport, Hosts: c.link.layout.hosts(p.ranks),
				Sets: p.sets[1:], SegmentBytes: c.segmentBytes,
				Config: func(cfg *engine.Config) {
					if c.apply(cfg); c.tuned && cfg.Rank == 0 {
						cfg.Tuner = tuner
					}
				},
			}, func(r *testcluster.Rank) { p.run(r, hash(seed, uint64(i)), got, yield) })
			// A random program may have hardly any allreduce of all ranks, of which alone the tuner hears.
			if c.tuned && tuner.changes == 0 && tuner.grants >= 10 {
				t.Errorf("the settings have not changed during %d grants", tuner.grants)
			}
			if !c.deterministic || t.Failed() {
				return
			}
			if first == nil {
				first = got
			}
			if bySegments[c.segmentBytes] == nil {
				bySegments[c.segmentBytes] = got
			}
			p.sameBits(t, first, got, func(j *job) bool { return j.op != tensor.Adasum })
			p.sameBits(t, bySegments[c.segmentBytes], got, func(*job) bool { return true })
		})
	}
}

// In deterministic mode, a program runs several times with requests that arrive in different orders, so that
// fusion and the number of cycles differ. The results have the same bits each time.
func TestDeterministicWhateverArrivesWhen(t *testing.T) {
	seed := pickSeed(t)
	for name, fit := range map[string]func(w what) bool{
		"sums": func(w what) bool { return w.kind.Reduces() && w.dt.IsFloat() && w.op != tensor.Adasum },
		"adasum": func(w what) bool {
			return w.op == tensor.Adasum && (w.dt == tensor.Float32 || w.dt == tensor.Float64) &&
				!w.wire.Valid()
		},
	} {
		t.Run(name, func(t *testing.T) { whateverArrivesWhen(t, seed, choices(fit)) })
	}
}

func whateverArrivesWhen(t *testing.T, seed uint64, choices []what) {
	var first answers
	conversations := make(map[string]bool)
	for i := range 8 {
		synctest.Test(t, func(t *testing.T) {
			p := write(seed, 100, 3, choices, true)
			got, heard := p.newAnswers(), newFrames()
			heard.log = make(map[topo.Rank]string)
			random := hash(seed, uint64(i))
			testcluster.Run(t, testcluster.Options{
				Ranks: p.ranks, Sets: p.sets[1:], Latency: time.Millisecond, OnFrame: heard.hear,
				Config: func(cfg *engine.Config) {
					cfg.Deterministic = true
					cfg.FusionThresholdBytes = []int64{64 << 20, 4096, 64 << 20, 0}[i%4]
					cfg.CycleTime = time.Duration(random%4) * 2 * time.Millisecond
				},
			}, func(r *testcluster.Rank) { p.run(r, random, got, sleep) })
			conversations[fmt.Sprint(heard.log)] = true
			if first == nil {
				first = got
			} else if !t.Failed() {
				p.sameBits(t, first, got, func(*job) bool { return true })
			}
		})
	}
	if len(conversations) < 8 {
		t.Errorf("8 runs had %d different conversations, want 8", len(conversations))
	}
}
