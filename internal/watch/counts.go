package watch

import (
	"errors"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/trace"
)

// counts holds the counters from which Stats computes its result.
type counts struct {
	trace.Stats
	operations [message.NumKinds][message.NumBackends]trace.Operations
	moved      [message.NumKinds][message.NumBackends][tensor.NumDTypes]uint64
}

// stats returns the counters as a trace.Stats.
func (c *counts) stats() trace.Stats {
	st := c.Stats
	for k := range c.operations {
		for b := range c.operations[k] {
			ops := c.operations[k][b]
			if ops.Tensors > 0 {
				ops.Kind, ops.Backend = message.Kind(k), message.Backend(b)
				st.Operations = append(st.Operations, ops)
			}
			for d, n := range c.moved[k][b] {
				if n > 0 {
					st.Moved = append(st.Moved, trace.Moved{Kind: message.Kind(k),
						Backend: message.Backend(b), DType: tensor.DType(d), Bytes: n})
				}
			}
		}
	}
	return st
}

// add adds an operation and its responses to the counters. If the ranks disagreed, add adds no bytes, because
// the operation has moved no data.
func (c *counts) add(op *trace.Operation, responses []*message.Response, fusionThreshold int64) {
	disagreed := responses[0].Kind == message.Error
	if op.Failed != nil {
		for i := range op.Tensors {
			c.Failed += uint64(max(op.Tensors[i].Parts, 1))
		}
		return
	}
	var (
		numBytes int64
		tensors  uint64
	)
	for i := range op.Tensors {
		t := &op.Tensors[i]
		c.Negotiation.Add(op.Granted - t.Submitted)
		if t.Cached {
			c.CacheHits++
		} else {
			c.CacheMisses++
		}
		if t.Refused != nil {
			c.Refused += uint64(max(t.Parts, 1))
		}
		if disagreed {
			continue
		}
		tensors += uint64(max(t.Parts, 1))
		numBytes += t.Bytes
		if moved := &c.moved[op.Kind][op.Backend]; t.DType.Valid() || t.Parts == 0 {
			moved[t.DType] += uint64(t.Bytes)
		} else {
			for dt, shape := range responses[i].Parts.All() {
				n, _ := shape.NumElems() // cannot fail, because the decoder has checked the shape
				moved[dt] += uint64(n) * uint64(dt.Size())
			}
		}
	}
	if disagreed {
		return
	}
	c.Queued.Add(op.Begun - op.Granted)
	done := &c.operations[op.Kind][op.Backend]
	done.Durations.Add(op.Ended - op.Begun)
	done.Tensors += tensors
	if op.Kind.MovesData() && !op.Kind.SendsRows() && len(op.Tensors) > 0 {
		c.FusionResponses++
		c.FusedTensors += tensors
		// A single tensor that is larger than the fusion buffer counts as one full buffer.
		c.FusionRoomBytes += uint64(max(fusionThreshold, 0))
		c.FusedBytes += uint64(min(numBytes, max(fusionThreshold, 0)))
	}
}

// addMessage adds a Send or a Recv to the counters. Its duration begins with the call.
func (c *counts) addMessage(op *trace.Operation) {
	switch _, refused := errors.AsType[*p2p.SizeError](op.Failed); {
	case refused:
		c.Refused++
	case op.Failed != nil:
		c.Failed++
	default:
		n, done := &op.Tensors[0], &c.operations[op.Kind][op.Backend]
		done.Durations.Add(op.Ended - n.Submitted)
		done.Tensors++
		c.moved[op.Kind][op.Backend][n.DType] += uint64(n.Bytes)
	}
}
