package hvd

import (
	"fmt"
	"net/http"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/stats"
)

// StartTimeline writes what this rank does from now on to a file: rank 0 to path, rank r to path with .rank<r> before the
// extension (docs/timeline.md has the format). Each rank that is to be seen calls it; other than Horovod's it needs no
// HOROVOD_TIMELINE. markCycles marks when negotiation cycles begin. A timeline that goes to another path ends; if it goes to this
// one already nothing changes. The error is that the file cannot be made; what cannot be written later is dropped and counted.
func (e *Engine) StartTimeline(path string, markCycles bool) error {
	if err := e.rank.Watch.StartTimeline(path, markCycles); err != nil {
		return fmt.Errorf("hvd: start timeline: %w", err)
	}
	return nil
}

// StopTimeline ends the timeline, and returns when its file is complete. Without one it does nothing. Shutdown does it too.
func (e *Engine) StopTimeline() error {
	if err := e.rank.Watch.StopTimeline(); err != nil {
		return fmt.Errorf("hvd: stop timeline: %w", err)
	}
	return nil
}

// StartTimeline is Engine.StartTimeline for the engine that Init started.
func StartTimeline(path string, markCycles bool) error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: start timeline: %w", ErrNotInitialized)
	}
	return e.StartTimeline(path, markCycles)
}

// StopTimeline is Engine.StopTimeline for the engine that Init started.
func StopTimeline() error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: stop timeline: %w", ErrNotInitialized)
	}
	return e.StopTimeline()
}

// MetricsHandler answers /metrics with what the engine that Init started has counted (docs/metrics.md), for a program that has an
// HTTP server of its own; HVD_METRICS_ADDR shows the same without one. Before Init and after Shutdown the counters are 0.
func MetricsHandler() http.Handler {
	return metrics.Handler(func() stats.Stats {
		if e := current(); e != nil {
			return e.rank.Watch.Stats()
		}
		return stats.Stats{}
	})
}

// MetricsHandler is the package-level one for this engine.
func (e *Engine) MetricsHandler() http.Handler {
	return metrics.Handler(e.rank.Watch.Stats)
}

// Dump is, as JSON, what this rank waits for, and its last operations unless HVD_FLIGHT_RECORDER is off. It costs some
// milliseconds, and may be called while operations run, hang or have failed.
func (e *Engine) Dump() ([]byte, error) {
	text, err := e.rank.Watch.Dump("asked for by the program").JSON()
	if err != nil {
		return nil, fmt.Errorf("hvd: dump: %w", err)
	}
	return text, nil
}
