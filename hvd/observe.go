package hvd

import (
	"fmt"
	"net/http"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/trace"
)

// StartTimeline writes what this rank does from now on to a file: rank 0 to path, rank r to path with
// .rank<r> before the extension (docs/timeline.md describes the format). Each rank that is to be recorded
// calls it; unlike Horovod's it does not need HOROVOD_TIMELINE. markCycles marks when negotiation cycles
// begin. A timeline to another path ends first; if the timeline goes to path already nothing changes. The
// error says that the file cannot be created. Records that cannot be written later are dropped and counted.
func (e *Engine) StartTimeline(path string, markCycles bool) error {
	if err := e.rank.Watch.StartTimeline(path, markCycles); err != nil {
		return fmt.Errorf("hvd: start timeline: %w", err)
	}
	return nil
}

// StopTimeline ends the timeline and returns when its file is complete. Without a timeline it does nothing.
// Shutdown calls it too.
func (e *Engine) StopTimeline() error {
	if err := e.rank.Watch.StopTimeline(); err != nil {
		return fmt.Errorf("hvd: stop timeline: %w", err)
	}
	return nil
}

// StartTimeline calls Engine.StartTimeline for the engine that Init started.
func StartTimeline(path string, markCycles bool) error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: start timeline: %w", ErrNotInitialized)
	}
	return e.StartTimeline(path, markCycles)
}

// StopTimeline calls Engine.StopTimeline for the engine that Init started.
func StopTimeline() error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: stop timeline: %w", ErrNotInitialized)
	}
	return e.StopTimeline()
}

// MetricsHandler returns a handler for /metrics with the counters of the engine that Init started
// (docs/metrics.md), for a program that has an HTTP server. HVD_METRICS_ADDR serves the same without one.
// Before Init and after Shutdown the counters are 0.
func MetricsHandler() http.Handler {
	return metrics.Handler(func() trace.Stats {
		if e := current(); e != nil {
			return e.rank.Watch.Stats()
		}
		return trace.Stats{}
	})
}

// MetricsHandler returns a handler for /metrics with the counters of this engine.
func (e *Engine) MetricsHandler() http.Handler {
	return metrics.Handler(e.rank.Watch.Stats)
}

// Dump returns, as JSON, what this rank waits for and, unless HVD_FLIGHT_RECORDER is off, its last
// operations. It takes some milliseconds, and may be called while operations run, hang or have failed.
func (e *Engine) Dump() ([]byte, error) {
	text, err := e.rank.Watch.Dump("requested by the program").JSON()
	if err != nil {
		return nil, fmt.Errorf("hvd: dump: %w", err)
	}
	return text, nil
}
