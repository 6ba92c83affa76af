package engine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/logs"
)

// At log level trace, each rank logs the requests, cache bits and grants of every cycle. At log level debug
// it logs none of them.
func TestTracedCycles(t *testing.T) {
	both(t, func(t *testing.T, lockstep bool) {
		for _, level := range []zapcore.Level{logs.Trace, zapcore.DebugLevel} {
			synctest.Test(t, func(t *testing.T) {
				const n = 2
				var logged [n]*observer.ObservedLogs
				c := start(t, n, func(cfg *engine.Config) {
					var core zapcore.Core
					core, logged[cfg.Rank] = observer.New(level)
					cfg.Log, cfg.Lockstep = zap.New(core), lockstep
				})
				for range 2 { // in the second round the request is a vote
					c.each(func(r int) {
						c.succeeds(c.allreduce(r, "grad/7", make([]byte, 8)))
					})
				}
				c.shutdown()
				for r := range n {
					var lines []string
					for _, entry := range logged[r].All() {
						if entry.Level == logs.Trace {
							lines = append(lines, fmt.Sprint(entry.Message, " ", entry.ContextMap()))
						}
					}
					want := []string{
						"to the coordinator map[frame:up seen=", "request allreduce grad/7 int64[1]",
						"from the coordinator map[frame:down n=", "grant allreduce grad/7 ", "put grad/7=0",
						"granted map[algorithm:",
						"number:1 operation:allreduce process_set:0 tensors:[grad/7]",
						"number:2 operation:allreduce",
						"grant bits=0",
					}
					if lockstep {
						want = append(want, "vectors of all ranks map[and:")
					} else {
						want = append(want, "hits=1")
					}
					for _, part := range want {
						found := slices.ContainsFunc(lines, func(l string) bool {
							return strings.Contains(l, part)
						})
						if found != (level == logs.Trace) {
							t.Errorf("%v, rank %d: %q found: %v in\n%s", level, r, part, found,
								strings.Join(lines, "\n"))
						}
					}
					if slices.ContainsFunc(lines, func(l string) bool {
						return strings.Contains(l, "heartbeat")
					}) {
						t.Errorf("rank %d: heartbeats in %q", r, lines)
					}
				}
			})
		}
	})
}
