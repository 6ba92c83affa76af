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
	// operations has nil for each kind and backend that has not run, because those of all of them would take
	// 40 KiB.
	operations [message.NumKinds][message.NumBackends]*operations
}

// operations holds the counters of the operations of one kind and backend.
type operations struct {
	trace.Operations
	moved [tensor.NumDTypes]uint64 // bytes
}

// of returns the counters of a kind and backend, and makes them first if there are none.
func (c *counts) of(k message.Kind, b message.Backend) *operations {
	o := c.operations[k][b]
	if o == nil {
		o = &operations{Operations: trace.Operations{Kind: k, Backend: b}}
		c.operations[k][b] = o
	}
	return o
}

// stats returns the counters as a trace.Stats.
func (c *counts) stats() trace.Stats {
	st := c.Stats
	for k := range c.operations {
		for _, o := range c.operations[k] {
			if o == nil {
				continue
			}
			if o.Tensors > 0 {
				st.Operations = append(st.Operations, o.Operations)
			}
			for d, n := range o.moved {
				if n > 0 {
					st.Moved = append(st.Moved, trace.Moved{Kind: o.Kind, Backend: o.Backend,
						DType: tensor.DType(d), Bytes: n})
				}
			}
		}
	}
	return st
}

// add adds an operation and its responses to the counters. If the ranks disagreed, add adds no bytes, because
// the operation has moved no data.
func (c *counts) add(op *trace.Operation, responses []*message.Response, failed bool, fusionThreshold int64) {
	disagreed := responses[0].Kind == message.Error
	whole := &op.Records[0]
	submitted := op.Records
	if whole.Absent && whole.Name == "" {
		submitted = nil
	}
	if failed {
		for i := range submitted {
			c.Failed += uint64(max(submitted[i].Parts, 1))
		}
		return
	}
	var (
		numBytes int64
		tensors  uint64
	)
	done := c.of(whole.Kind, whole.Backend)
	for i := range submitted {
		t := &submitted[i]
		c.Negotiation.Add(whole.Granted - t.Submitted)
		if t.Cached {
			c.CacheHits++
		} else {
			c.CacheMisses++
		}
		if t.Refused {
			c.Refused += uint64(max(t.Parts, 1))
		}
		if disagreed {
			continue
		}
		tensors += uint64(max(t.Parts, 1))
		numBytes += t.Bytes
		if t.DType.Valid() || t.Parts == 0 {
			done.moved[t.DType] += uint64(t.Bytes)
		} else {
			for dt, shape := range responses[i].Parts.All() {
				n, _ := shape.NumElems() // cannot fail, because the decoder has checked the shape
				done.moved[dt] += uint64(n) * uint64(dt.Size())
			}
		}
	}
	if disagreed {
		return
	}
	c.Queued.Add(whole.Begun - whole.Granted)
	done.Durations.Add(whole.Ended - whole.Begun)
	done.Tensors += tensors
	if whole.Kind.MovesData() && !whole.Kind.SendsRows() && len(submitted) > 0 {
		c.FusionResponses++
		c.FusedTensors += tensors
		// A single tensor that is larger than the fusion buffer counts as one full buffer.
		c.FusionRoomBytes += uint64(max(fusionThreshold, 0))
		c.FusedBytes += uint64(min(numBytes, max(fusionThreshold, 0)))
	}
}

// addMessage adds a Send or a Recv to the counters. Its duration begins with the call.
func (c *counts) addMessage(r *trace.Record, err error) {
	switch _, refused := errors.AsType[*p2p.SizeError](err); {
	case refused:
		c.Refused++
	case err != nil:
		c.Failed++
	default:
		done := c.of(r.Kind, r.Backend)
		done.Durations.Add(r.Ended - r.Submitted)
		done.Tensors++
		done.moved[r.DType] += uint64(r.Bytes)
	}
}
