package hvd

import (
	"fmt"
	"net/http"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/trace"
)

// StartTimeline starts a timeline: a file with a record of what this rank does, in the format of
// docs/timeline.md. Rank 0 writes to path. Any other rank r inserts .rank<r> before the extension of path and
// writes to the resulting file. Only this rank is recorded, so each rank that is to be recorded must call
// StartTimeline. Unlike in Horovod, HOROVOD_TIMELINE need not be set. If markCycles is true, the file also
// shows when each negotiation cycle begins. If this rank already records to a different path, that timeline
// ends first. If it already records to the same path, nothing changes. StartTimeline fails if the file cannot
// be created, and with ErrShutDown after Shutdown. Records that cannot be written later are dropped and
// counted.
func (e *Engine) StartTimeline(path string, markCycles bool) error {
	if err := e.rank.Watch.StartTimeline(path, markCycles); err != nil {
		return fmt.Errorf("hvd: start timeline: %w", public(err))
	}
	return nil
}

// StopTimeline ends the timeline and returns when its file is complete. The error says that the file could
// not be written completely. If there is no timeline, it does nothing. Shutdown calls it too.
func (e *Engine) StopTimeline() error {
	if err := e.rank.Watch.StopTimeline(); err != nil {
		return fmt.Errorf("hvd: stop timeline: %w", public(err))
	}
	return nil
}

// StartTimeline calls Engine.StartTimeline for the engine that Init started. Before Init and after Shutdown
// it fails with ErrNotInitialized.
func StartTimeline(path string, markCycles bool) error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: start timeline: %w", ErrNotInitialized)
	}
	return e.StartTimeline(path, markCycles)
}

// StopTimeline calls Engine.StopTimeline for the engine that Init started. Before Init and after Shutdown it
// fails with ErrNotInitialized.
func StopTimeline() error {
	e := current()
	if e == nil {
		return fmt.Errorf("hvd: stop timeline: %w", ErrNotInitialized)
	}
	return e.StopTimeline()
}

// MarkStep says that the program now begins the training step with the given number. The step lasts until
// the next mark. The timeline shows the marks, and hvd_steps_total counts them. All ranks should mark the
// same steps, with growing numbers.
func (e *Engine) MarkStep(number uint64) { e.rank.Engine.Observer().MarkStep(number) }

// MarkStep calls Engine.MarkStep for the engine that Init started. Before Init and after Shutdown it does
// nothing.
func MarkStep(number uint64) {
	if e := current(); e != nil {
		e.MarkStep(number)
	}
}

// MarkRange says that the program now begins something with the given name, such as "data" or "forward", and
// returns a function that the program calls when it ends. The timeline shows these ranges, and hvdrun
// timeline says in which of them a late rank was. Ranges may be inside of each other, and goroutines may have
// ranges at the same time. Without a timeline it costs some nanoseconds.
func (e *Engine) MarkRange(name string) (end func()) {
	begun := e.rank.Engine.Observer().BeginSpan()
	if begun == 0 {
		return func() {}
	}
	return func() { e.rank.Engine.Observer().EndSpan(trace.Range, name, begun) }
}

// MarkRange calls Engine.MarkRange for the engine that Init started. Before Init and after Shutdown it
// records nothing.
func MarkRange(name string) (end func()) {
	if e := current(); e != nil {
		return e.MarkRange(name)
	}
	return func() {}
}

// MetricsHandler returns a handler that a program with an HTTP server of its own can install for /metrics.
// The handler serves the counters of the engine that Init started (docs/metrics.md), or zeros before Init and
// after Shutdown. A program without an HTTP server can set HVD_METRICS_ADDR instead; then the engine itself
// serves the same counters.
func MetricsHandler() http.Handler {
	return metrics.Handler(func() trace.Stats {
		if e := current(); e != nil {
			return e.rank.Watch.Stats()
		}
		return trace.Stats{}
	})
}

// MetricsHandler returns a handler for /metrics that serves the counters of this engine.
func (e *Engine) MetricsHandler() http.Handler {
	return metrics.Handler(e.rank.Watch.Stats)
}

// Dump returns a JSON object with the operations that this rank waits for and, unless HVD_FLIGHT_RECORDER is
// off, its last operations. Dump takes a few milliseconds. It may be called while operations run, hang or
// have failed.
func (e *Engine) Dump() ([]byte, error) {
	text, err := e.rank.Watch.Dump("requested by the program").JSON()
	if err != nil {
		return nil, fmt.Errorf("hvd: dump: %w", public(err))
	}
	return text, nil
}
