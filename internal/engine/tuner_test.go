package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// fakeTuner changes the settings once, after the first grant, and records what it is told.
type fakeTuner struct {
	change  message.Tuning
	notify  func()
	granted []string
	pending bool
	closed  bool
}

func (f *fakeTuner) Start(notify func()) { f.notify = notify }

func (f *fakeTuner) Granted(name string, bytes int64, _ time.Duration) {
	f.pending = len(f.granted) == 0
	f.granted = append(f.granted, fmt.Sprint(name, " ", bytes))
	f.notify()
}

func (f *fakeTuner) Changed() (message.Tuning, bool) {
	changed := f.pending
	f.pending = false
	return f.change, changed
}

func (f *fakeTuner) Stats() *trace.Tuning { return &trace.Tuning{Rounds: 7} }
func (f *fakeTuner) Close()               { f.closed = true }

// The tuner of rank 0 learns which tensors of the global set are granted. Its change reaches all ranks, and
// the timeline of rank 0.
func TestTuner(t *testing.T) {
	for _, lockstep := range []bool{false, true} {
		t.Run(fmt.Sprint("lockstep=", lockstep), func(t *testing.T) {
			tuner := &fakeTuner{change: message.Tuning{FusionThresholdBytes: 1234, SegmentBytes: 64,
				CycleTime: 100 * time.Microsecond, CacheOff: true, Allreduce: message.HalvingDoubling}}
			const n = 3
			timelines := make([]log, n)
			c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
				cfg.Sets = []controller.Set{{ID: 1, Ranks: []topo.Rank{0, 1}}}
				cfg.Lockstep = lockstep
				if cfg.Rank == 0 {
					cfg.Tuner = tuner
				}
			})
			c.each(func(r int) { c.engines[r].Observer().Watch(&timelines[r]) })
			c.each(func(r int) {
				for range 3 {
					if r < 2 {
						of := sum("elsewhere", make([]byte, 80))
						of.Set = 1
						c.succeeds(c.submit(r, of))
					}
					for _, name := range []string{"a", "b"} {
						c.succeeds(c.submit(r, sum(name, make([]byte, 80))))
					}
				}
			})
			stats := c.engines[0].Stats()
			var later log
			c.engines[0].Observer().Watch(&later)
			if !slices.Equal(later.tunings, []message.Tuning{tuner.change}) {
				t.Errorf("a timeline that begins later has %+v, want the settings in force", later.tunings)
			}
			c.each(func(r int) { _ = c.engines[r].Shutdown(c.ctx, engine.Departure{}) })
			if want := []string{"a 80", "b 80", "a 80", "b 80", "a 80", "b 80"}; !slices.Equal(tuner.granted,
				want) || !tuner.closed {
				t.Errorf("the tuner was told of %q and was closed: %v, want %q", tuner.granted, tuner.closed, want)
			}
			if stats.Tuning == nil || stats.Tuning.Rounds != 7 {
				t.Errorf("got statistics %+v of the tuner, want its own", stats.Tuning)
			}
			for r := range n {
				if got := c.engines[r].Stats().FusionThresholdBytes; got != 1234 {
					t.Errorf("rank %d has the fusion threshold %d, want 1234", r, got)
				}
				if ops := timelines[r].ops; ops[len(ops)-1].Records[0].Algorithm != message.HalvingDoubling {
					t.Errorf("rank %d: the last operation ran by %v, want %v", r, ops[len(ops)-1].Records[0].Algorithm,
						message.HalvingDoubling)
				}
				var want []message.Tuning
				if r == 0 {
					want = append(want, tuner.change)
				}
				if got := timelines[r].tunings; !slices.Equal(got, want) {
					t.Errorf("the timeline of rank %d has %+v, want %+v", r, got, want)
				}
			}
		})
	}
}
