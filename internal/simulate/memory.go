package simulate

import "runtime"

// Memory is the heap of the state machines of each role, in bytes.
type Memory struct{ Coordinator, Leader, Member uint64 }

// MeasureMemory simulates a job and measures the heap of its state machines afterwards. Members share the
// responses of cached tensors in the simulation, so a member has its part of them.
func MeasureMemory(cfg Config) (*Memory, error) {
	j, err := run(cfg)
	if err != nil {
		return nil, err
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	j.queue, j.operations, j.loads = nil, nil, nil
	for _, p := range j.all {
		p.inbox, p.queued, p.parts = nil, nil, nil
	}
	before := heap()
	j.all[0].coord = nil
	after := heap()
	m := &Memory{Coordinator: before - after}
	before = after
	for _, p := range j.all {
		p.member = nil
	}
	after = heap() // a combiner is referred to by its process too
	m.Member, before = (before-after)/uint64(len(j.all)), after
	leaders := uint64(0)
	for _, p := range j.all {
		if p.combiner != nil {
			leaders++
			p.combiner = nil
		}
	}
	m.Leader = (before - heap()) / max(leaders, 1)
	return m, nil
}
