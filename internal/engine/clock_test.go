package engine_test

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/engine"
)

// measureClocks waits until every rank has measured its clock. It records what the ranks report in logs.
func (c *cluster) measureClocks(logs []log) {
	c.each(func(r int) {
		aligned := make(chan struct{}, 64)
		logs[r].aligned = func() {
			select {
			case aligned <- struct{}{}:
			default:
			}
		}
		c.engines[r].Observer().Watch(&logs[r])
		select {
		case <-aligned:
		case <-c.ctx.Done():
			c.t.Errorf("rank %d: no measurement of the clock", r)
		}
	})
}

// All ranks of a job compute the same name for the job, whether they share a clock or not. The ranks of a
// different job compute a different name.
func TestJobIsNamed(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		seen := make(map[string]int)
		for job := range 4 {
			const n = 3
			logs := make([]log, n)
			c := start(t, n, func(cfg *engine.Config) {
				cfg.Lockstep = lockstep
				if job%2 == 1 {
					cfg.ClockDomain = fmt.Sprint(cfg.Rank)
				}
			})
			c.measureClocks(logs)
			want := c.engines[0].Clock().Job()
			for r := range n {
				if o, _ := c.engines[r].Observer().Offset(); o.Job != want || want == "" {
					t.Errorf("rank %d: got job %q, want %q", r, o.Job, want)
				}
			}
			if before, again := seen[want]; again {
				t.Errorf("jobs %d and %d have the same name", before, job)
			}
			seen[want] = job
			c.shutdown()
		}
	})
}
