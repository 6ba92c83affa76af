package engine

import (
	"runtime"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// backends are those of a set in which this rank has position me, in the order in which they are asked. They are the same
// for all sets: the coordinator chooses for sets that it is no member of.
func (e *Engine) backends(set controller.Set, me int) (*ops.Manager, error) {
	m := new(ops.Manager)
	kinds := []message.Kind{message.Allreduce, message.Allgather, message.Broadcast, message.Alltoall, message.Reducescatter}
	lane := transport.DataLane(set.ID)
	if e.cfg.Memory != nil {
		b := shm.New(e.cfg.Memory, lane, set.Ranks, me, shm.Config{StageBytes: int64(e.cfg.SegmentBytes), Crowded: e.crowded()})
		// The set of all ranks must have its memory before anything runs. Others may never be used.
		if set.ID == topo.Global {
			if err := b.Open(); err != nil {
				return nil, err
			}
		}
		if err := m.Add(b, kinds...); err != nil {
			return nil, err
		}
	}
	b := tcp.New(e.cfg.Mesh, lane, set.Ranks, me, tcp.Config{SegmentBytes: e.cfg.SegmentBytes, Deterministic: e.cfg.Deterministic})
	return m, m.Add(b, kinds...)
}

// crowded reports whether this host has more ranks than processors for them, so that who waits must give way.
func (e *Engine) crowded() bool {
	ranks := e.cfg.LocalSize
	if ranks == 0 {
		ranks = e.cfg.Size
	}
	return ranks > min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
}
