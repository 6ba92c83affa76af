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

// localProcesses is Config's, as it is meant.
func (e *Engine) localProcesses() int {
	if e.cfg.LocalProcesses == 0 {
		return e.cfg.Size
	}
	return e.cfg.LocalProcesses
}

// crowded reports whether this host has more processes of the job than processors for them, so that who waits must give way.
func (e *Engine) crowded() bool {
	return e.localProcesses() > min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
}
