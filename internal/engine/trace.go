package engine

import (
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
)

// With HOROVOD_LOG_LEVEL=trace, a rank logs each negotiation frame that it sends or receives, except
// heartbeats and clock probes. At other levels, the cost for each frame is one check of Engine.traced.

// traceUp logs a frame to the coordinator. The logged text contains new requests in full, and votes as cache
// bits.
func (e *Engine) traceUp(up *message.Up) {
	if e.traced && up.Type != message.UpHeartbeat {
		e.log.Log(logs.Trace, "to the coordinator", zap.String("frame", up.String()))
	}
}

// traceDown logs a frame from the coordinator.
func (e *Engine) traceDown(down *message.Down) {
	if e.traced && down.Type != message.DownHeartbeat {
		e.log.Log(logs.Trace, "from the coordinator", zap.String("frame", down.String()))
	}
}

// traceGrant logs the names of the tensors that run together, because a frame does not contain the names of
// cached tensors.
func (e *Engine) traceGrant(g *controller.Grant) {
	if !e.traced {
		return
	}
	names := make([]string, len(g.Responses))
	for i, r := range g.Responses {
		names[i] = r.Name
	}
	e.log.Log(logs.Trace, "granted", zap.Uint32("process_set", uint32(g.Set)), zap.Uint64("number", g.Number),
		zap.Stringer("operation", g.Responses[0].Kind), zap.Strings("tensors", names),
		zap.Stringer("backend", g.Backend), zap.Stringer("algorithm", g.Algorithm))
}

// traceVectors logs the combined vectors of a cycle in lock-step.
func (e *Engine) traceVectors(and, or message.Bits) {
	if e.traced {
		e.log.Log(logs.Trace, "vectors of all ranks", zap.String("and", and.String()),
			zap.String("or", or.String()))
	}
}
