package engine

import (
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/tensorqueue"
)

// processSet is a process set to which this rank belongs.
type processSet struct {
	controller.Set
	me    int // the position of this rank in the set
	queue *tensorqueue.Queue
	voted votes // submitted entries, indexed by their cache bits; only the loop uses it
	lane  *exec.Lane
}

// setTable holds the process sets to which this rank belongs. Only the loop changes it.
type setTable struct {
	// all is sorted by process set. A removed set stays in all until the last work of the set is done. The
	// loop does not change the slice but replaces it, because other goroutines read it.
	all []*processSet
	// shared points to the same slice as all, for goroutines other than the loop.
	shared atomic.Pointer[[]*processSet]
	// released is an ID. The mesh has released the lanes of all process sets with lower IDs that are not in
	// all.
	released topo.ProcessSetID
}

// find returns the set with the given ID, or nil if there is none. Any goroutine may call it.
func (t *setTable) find(id topo.ProcessSetID) *processSet {
	all := t.snapshot()
	if len(all) > 0 && all[0].ID == id {
		return all[0] // usually the global set
	}
	if i, ok := search(all, id); ok {
		return all[i]
	}
	return nil
}

func search(all []*processSet, id topo.ProcessSetID) (int, bool) {
	return slices.BinarySearchFunc(all, id, func(s *processSet, id topo.ProcessSetID) int {
		return int(s.ID) - int(id)
	})
}

func (t *setTable) add(s *processSet) {
	i, _ := search(t.all, s.ID)
	t.replace(slices.Insert(slices.Clone(t.all), i, s))
}

func (t *setTable) drop(id topo.ProcessSetID) {
	if i, ok := search(t.all, id); ok {
		t.replace(slices.Delete(slices.Clone(t.all), i, i+1))
	}
}

func (t *setTable) replace(all []*processSet) {
	t.all = all
	t.shared.Store(&all)
}

// snapshot returns the sets. Any goroutine may call it. The caller must not change the slice.
func (t *setTable) snapshot() []*processSet {
	if all := t.shared.Load(); all != nil {
		return *all
	}
	return nil
}

// addSet adds a set. It does nothing if this rank is not a member of the set.
func (e *Engine) addSet(set controller.Set) error {
	me := slices.Index(set.Ranks, e.cfg.Rank)
	if me < 0 {
		return nil
	}
	lane, err := e.exec.NewLane(set, me)
	if err != nil {
		return err
	}
	e.sets.add(&processSet{Set: set, me: me, queue: tensorqueue.New(), lane: lane})
	return nil
}

// changeSets applies a grant that adds or removes a process set, and returns the lane that reports the
// result. If all ranks add a set, this is the lane of the global set. If only the members add it, this is the
// lane of the new set, so that the result does not wait for operations of the global set; an error is
// reported by the lane of the global set. For a removal, it is the lane of the removed set, so that the
// result comes after the last operation of that set. The entry of the change is in the queue of the set
// g.Asked.
func (e *Engine) changeSets(g *controller.Grant) (*exec.Lane, error) {
	switch r := g.Responses[0]; r.Kind {
	case message.AddProcessSet:
		if err := e.addSet(controller.Set{ID: r.Set, Ranks: r.Ranks}); err != nil {
			return nil, err
		}
	case message.RemoveProcessSet:
		if s := e.sets.find(r.Set); s != nil {
			e.refuse(s, ErrNoProcessSet)
			return s.lane, nil
		}
	}
	if s := e.sets.find(g.Set); s != nil {
		return s.lane, nil
	}
	return e.sets.find(g.Asked).lane, nil
}

// dropSet releases a set whose last work is done. Every rank releases the lanes of the set in the mesh, even
// if it is not a member of the set, and the lanes of all sets with lower IDs of which it is not a member,
// because it does not learn when their members remove them. The mesh stores a contiguous range of released
// lanes in a few bytes, and a lane that was not released would be a gap in the range.
func (e *Engine) dropSet(id topo.ProcessSetID) {
	if s := e.sets.find(id); s != nil {
		s.lane.End(nil)
		e.sets.drop(id)
	}
	e.releaseLanes(id)
	for ; e.sets.released < id; e.sets.released++ {
		if e.sets.find(e.sets.released) == nil {
			e.releaseLanes(e.sets.released)
		}
	}
}

func (e *Engine) releaseLanes(id topo.ProcessSetID) {
	e.cfg.Mesh.Release(transport.DataLane(id))
	e.cfg.Mesh.Release(transport.OuterLane(id))
	e.cfg.Mesh.Release(transport.DeviceLane(id))
	e.dropMessages(id)
}

// refuse closes the queue of a set and ends all its entries that have no grant with the given error.
func (e *Engine) refuse(s *processSet, reason error) {
	e.endEntries(s, reason, func(entry *tensorqueue.Entry) bool { return entry.Times.Granted.Load() == 0 })
}

// endEntries closes the queue of a set and ends the entries for which the function which returns true with
// the given error, without an operation.
func (e *Engine) endEntries(s *processSet, reason error, which func(*tensorqueue.Entry) bool) {
	s.queue.Close(reason)
	s.queue.FinishAll(which, func(entry *tensorqueue.Entry) error {
		e.observer.abandoned(max(len(entry.Parts), 1))
		return outcome.Of(&entry.Request, reason)
	})
}
