package engine_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// startOversubscribed starts a job of two ranks. It configures more processes than there are processors, so
// that NotifyLater defers notifications. It sets the deferral period to period unless period is 0.
func startOversubscribed(t *testing.T, recorded *[2]log, period time.Duration) *cluster {
	c := startOn(t, mem.New(2), 2, func(cfg *engine.Config) {
		cfg.LocalProcesses = runtime.NumCPU() + 1
		cfg.Recorder = &recorded[cfg.Rank]
	})
	if period > 0 {
		for _, e := range c.engines {
			e.SetDeferralPeriod(period)
		}
	}
	return c
}

// queue queues a sum at rank r and calls NotifyLater. The result of the sum is sent to done.
func (c *cluster) queue(r int, name string, done chan<- error) {
	e := sum(name, make([]byte, 8))
	e.Done = func(err error) { done <- err }
	if err := c.engines[r].Queue(e); err != nil {
		done <- err
	}
	c.engines[r].NotifyLater()
}

// lateRounds is a number of consecutive operations. Together they take only some milliseconds if none of them
// waits for a heartbeat.
const lateRounds = 40

// promptly fails the test if so much time has passed since began that most of the lateRounds operations must
// have waited for a heartbeat. Heartbeats are one second apart.
func promptly(t *testing.T, began time.Time) {
	if took := time.Since(began); took > lateRounds/2*time.Second {
		t.Errorf("%d operations took %v, want some milliseconds", lateRounds, took)
	}
}

// Queued operations complete soon even if the caller does not call Flush.
func TestNotifyLaterWithoutFlush(t *testing.T) {
	var recorded [2]log
	c := startOversubscribed(t, &recorded, 0)
	began := time.Now()
	c.each(func(r int) {
		for range lateRounds {
			done := make(chan error, 1)
			c.queue(r, "alone", done)
			c.succeeds(done)
		}
	})
	promptly(t, began)
	c.shutdown()
}

// Drive and Flush make the loop run at once after NotifyLater, even if the deferral period is an hour. With
// the default period, the timer notifies the loop in the rounds that call neither. A deferral ends with each
// notification, and the next NotifyLater defers again. So all 40 operations complete promptly in both cases.
func TestDriveAfterNotifyLater(t *testing.T) {
	for _, period := range []time.Duration{0, time.Hour} {
		var recorded [2]log
		c := startOversubscribed(t, &recorded, period)
		began := time.Now()
		c.each(func(r int) {
			for round := range lateRounds {
				done := make(chan error, 1)
				c.queue(r, "a", done)
				switch {
				case round%2 == 0:
					c.engines[r].Drive(c.ctx, func() bool { return len(done) == 1 })
				case period > 0:
					c.engines[r].Flush()
				}
				if err := c.wait(done); err != nil {
					t.Errorf("rank %d: round %d: %v", r, round, err)
				}
			}
		})
		promptly(t, began)
		c.shutdown()
	}
}
