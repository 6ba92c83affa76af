package watch

import (
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
)

// With HOROVOD_LOG_LEVEL=trace, a rank logs each negotiation frame that it sends or receives, except
// heartbeats and clock probes. At other levels, the cost for each frame is one check of Frames.traced.

// Frames logs the frames of the negotiation.
type Frames struct {
	log    *zap.Logger
	traced bool // whether the log has level trace
}

// NewFrames returns a Frames that writes to log if log has level trace.
func NewFrames(log *zap.Logger) *Frames {
	return &Frames{log: log, traced: log.Core().Enabled(logs.Trace)}
}

// Up logs a frame to the coordinator. The logged text contains new requests in full, and votes as cache
// bits.
func (f *Frames) Up(up *message.Up) {
	if f.traced && up.Type != message.UpHeartbeat {
		f.log.Log(logs.Trace, "to the coordinator", zap.String("frame", up.String()))
	}
}

// Down logs a frame from the coordinator.
func (f *Frames) Down(down *message.Down) {
	if f.traced && down.Type != message.DownHeartbeat {
		f.log.Log(logs.Trace, "from the coordinator", zap.String("frame", down.String()))
	}
}

// Grant logs the names of the tensors that run together, because a frame does not contain the names of
// cached tensors.
func (f *Frames) Grant(g *controller.Grant) {
	if !f.traced {
		return
	}
	names := make([]string, len(g.Responses))
	for i, r := range g.Responses {
		names[i] = r.Name
	}
	f.log.Log(logs.Trace, "granted", zap.Uint32("process_set", uint32(g.Set)), zap.Uint64("number", g.Number),
		zap.Stringer("operation", g.Responses[0].Kind), zap.Strings("tensors", names),
		zap.Stringer("backend", g.Backend), zap.Stringer("algorithm", g.Algorithm))
}

// Vectors logs the combined vectors of a cycle in lock-step.
func (f *Frames) Vectors(and, or message.Bits) {
	if f.traced {
		f.log.Log(logs.Trace, "vectors of all ranks", zap.String("and", and.String()),
			zap.String("or", or.String()))
	}
}
