package engine

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/tensorqueue"
)

// ErrNoProcessSet reports that the process set of an operation was removed or does not contain this rank. If
// a set is removed, the operations that wait in it also fail with this error.
var ErrNoProcessSet = errors.New("the process set was removed, or this rank is not a member of it")

// laneTable holds the lanes of the process sets to which this rank belongs. Only the loop changes it.
type laneTable struct {
	// all is sorted by process set. A removed set stays in all until the last work of the set is done. The
	// loop does not change the slice but replaces it, because other goroutines read it.
	all []*lane
	// shared points to the same slice as all, for goroutines other than the loop.
	shared atomic.Pointer[[]*lane]
	// released is an ID. The mesh has released the lanes of all process sets with lower IDs that are not in
	// all.
	released topo.ProcessSetID
}

// find returns the lane of a set, or nil if there is none. Any goroutine may call it.
func (t *laneTable) find(id topo.ProcessSetID) *lane {
	all := t.snapshot()
	if len(all) > 0 && all[0].set.ID == id {
		return all[0] // usually the lane of the global set
	}
	if i, ok := search(all, id); ok {
		return all[i]
	}
	return nil
}

func search(all []*lane, id topo.ProcessSetID) (int, bool) {
	return slices.BinarySearchFunc(all, id, func(l *lane, id topo.ProcessSetID) int {
		return int(l.set.ID) - int(id)
	})
}

func (t *laneTable) add(l *lane) {
	i, _ := search(t.all, l.set.ID)
	t.replace(slices.Insert(slices.Clone(t.all), i, l))
}

func (t *laneTable) drop(id topo.ProcessSetID) {
	if i, ok := search(t.all, id); ok {
		t.replace(slices.Delete(slices.Clone(t.all), i, i+1))
	}
}

func (t *laneTable) replace(all []*lane) {
	t.all = all
	t.shared.Store(&all)
}

// snapshot returns the lanes. Any goroutine may call it. The caller must not change the slice.
func (t *laneTable) snapshot() []*lane {
	if all := t.shared.Load(); all != nil {
		return *all
	}
	return nil
}

// addSet creates a lane for a set. It does nothing if this rank is not a member of the set. The goroutine of
// the lane starts with the first work that turns of the loop do not execute, so a set without such work has
// none.
func (e *Engine) addSet(set controller.Set) error {
	me := slices.Index(set.Ranks, e.cfg.Rank)
	if me < 0 {
		return nil
	}
	l, err := e.newLane(set, me)
	if err != nil {
		return err
	}
	l.spawn = func() {
		e.running.Go(func() {
			e.pin()
			l.run(e.ctx, e.laneFinished)
			l.manager.Close()
		})
	}
	e.lanes.add(l)
	return nil
}

// changeSets applies a grant that adds or removes a process set, and returns the lane that reports the
// result. If all ranks add a set, this is the lane of the global set. If only the members add it, this is the
// lane of the new set, so that the result does not wait for operations of the global set; an error is
// reported by the lane of the global set. For a removal, it is the lane of the removed set, so that the
// result comes after the last operation of that set. The entry of the change is in the queue of the set
// g.Asked.
func (e *Engine) changeSets(g *controller.Grant) (*lane, error) {
	switch r := g.Responses[0]; r.Kind {
	case message.AddProcessSet:
		if err := e.addSet(controller.Set{ID: r.Set, Ranks: r.Ranks}); err != nil {
			return nil, err
		}
	case message.RemoveProcessSet:
		if l := e.lanes.find(r.Set); l != nil {
			l.refuse(ErrNoProcessSet)
			return l, nil
		}
	}
	if l := e.lanes.find(g.Set); l != nil {
		return l, nil
	}
	return e.lanes.find(g.Asked), nil
}

// dropSet releases a set whose last work is done. Every rank releases the lanes of the set in the mesh, even
// if it is not a member of the set, and the lanes of all sets with lower IDs of which it is not a member,
// because it does not learn when their members remove them. The mesh stores a contiguous range of released
// lanes in a few bytes, and a lane that was not released would be a gap in the range.
func (e *Engine) dropSet(id topo.ProcessSetID) {
	if l := e.lanes.find(id); l != nil {
		l.end(nil)
		e.lanes.drop(id)
	}
	e.releaseLanes(id)
	for ; e.lanes.released < id; e.lanes.released++ {
		if e.lanes.find(e.lanes.released) == nil {
			e.releaseLanes(e.lanes.released)
		}
	}
}

func (e *Engine) releaseLanes(id topo.ProcessSetID) {
	e.cfg.Mesh.Release(transport.DataLane(id))
	e.cfg.Mesh.Release(transport.OuterLane(id))
	e.cfg.Mesh.Release(transport.DeviceLane(id))
	e.dropMessages(id)
}

// refuse closes the queue of a lane and ends all its entries that have no grant with the given error.
func (l *lane) refuse(reason error) {
	l.queue.Close(reason)
	waits := func(e *tensorqueue.Entry) bool { return e.Times.Granted.Load() == 0 }
	l.queue.FinishAll(waits, func(e *tensorqueue.Entry) error { return l.abandon(e, reason) })
}

// abandon counts an entry that ends without a grant, and returns the error with which the entry ends.
func (l *lane) abandon(e *tensorqueue.Entry, reason error) error {
	l.observer.abandoned(max(len(e.Parts), 1))
	return opError(&e.Request, reason)
}
