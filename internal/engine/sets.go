package engine

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/exec"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/watch"
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

	rank     topo.Rank
	exec     *exec.Executor
	mesh     transport.Mesh
	observer *watch.Observer
	// forget is called when a set that was removed is released, also if this rank is not a member of it.
	forget func(topo.ProcessSetID)
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

// add adds a set. It does nothing if this rank is not a member of the set.
func (t *setTable) add(set controller.Set) error {
	me := slices.Index(set.Ranks, t.rank)
	if me < 0 {
		return nil
	}
	lane, err := t.exec.NewLane(set, me)
	if err != nil {
		return err
	}
	i, _ := search(t.all, set.ID)
	s := &processSet{Set: set, me: me, queue: tensorqueue.New(), lane: lane}
	t.replace(slices.Insert(slices.Clone(t.all), i, s))
	return nil
}

// change applies a grant that adds or removes a process set, and returns the lane that reports the
// result. If all ranks add a set, this is the lane of the global set. If only the members add it, this is the
// lane of the new set, so that the result does not wait for operations of the global set; an error is
// reported by the lane of the global set. For a removal, it is the lane of the removed set, so that the
// result comes after the last operation of that set. The entry of the change is in the queue of the set
// g.Asked.
func (t *setTable) change(g *controller.Grant) (*exec.Lane, error) {
	switch r := g.Responses[0]; r.Kind {
	case message.AddProcessSet:
		if err := t.add(controller.Set{ID: r.Set, Ranks: r.Ranks}); err != nil {
			return nil, err
		}
	case message.RemoveProcessSet:
		if s := t.find(r.Set); s != nil {
			t.refuse(s, ErrNoProcessSet)
			return s.lane, nil
		}
	}
	if s := t.find(g.Set); s != nil {
		return s.lane, nil
	}
	return t.find(g.Asked).lane, nil
}

// drop releases a set whose last work is done. Every rank releases the lanes of the set in the mesh, even
// if it is not a member of the set, and the lanes of all sets with lower IDs of which it is not a member,
// because it does not learn when their members remove them. The mesh stores a contiguous range of released
// lanes in a few bytes, and a lane that was not released would be a gap in the range.
func (t *setTable) drop(id topo.ProcessSetID) {
	if s := t.find(id); s != nil {
		s.lane.End(nil)
		i, _ := search(t.all, id)
		t.replace(slices.Delete(slices.Clone(t.all), i, i+1))
	}
	t.release(id)
	for ; t.released < id; t.released++ {
		if t.find(t.released) == nil {
			t.release(t.released)
		}
	}
}

func (t *setTable) release(id topo.ProcessSetID) {
	t.mesh.Release(transport.DataLane(id))
	t.mesh.Release(transport.OuterLane(id))
	t.mesh.Release(transport.DeviceLane(id))
	t.forget(id)
}

// refuse closes the queue of a set and ends all its entries that have no grant with the given error.
func (t *setTable) refuse(s *processSet, reason error) {
	t.endEntries(s, reason, func(entry *tensorqueue.Entry) bool { return entry.Times.Granted.Load() == 0 })
}

// endEntries closes the queue of a set and ends the entries for which the function which returns true with
// the given error, without an operation.
func (t *setTable) endEntries(s *processSet, reason error, which func(*tensorqueue.Entry) bool) {
	s.queue.Close(reason)
	s.queue.FinishAll(which, func(entry *tensorqueue.Entry) error {
		t.observer.Abandoned(max(len(entry.Parts), 1), entry.Times.Submitted)
		return outcome.Of(&entry.Request, reason)
	})
}

// endLanes makes the lanes return when no work is left. If err is not nil, work that has not begun ends with
// err.
func (t *setTable) endLanes(err error) {
	for _, s := range t.all {
		s.lane.End(err)
	}
}

// timeoutReportInterval is the time between two reports of one expired operation by a rank. The rank repeats
// the report because the coordinator ignores the first one if the request or the grant was on its way.
const timeoutReportInterval = time.Second

// expire reports operations that have not ended by their deadlines at the time now to the coordinator. It
// returns the earliest deadline that is left.
func (t *setTable) expire(now time.Duration, member *controller.Member) (due time.Duration) {
	due = controller.Never
	for _, s := range t.all {
		s.queue.Each(func(entry *tensorqueue.Entry) {
			switch {
			case entry.Deadline == 0:
			case entry.Deadline <= now:
				member.Timeout(entry.Set, entry.Request.Name, entry.Timeout)
				entry.Deadline = now + timeoutReportInterval
				fallthrough
			default:
				due = min(due, entry.Deadline)
			}
		})
		report := func(name string, timeout time.Duration) { member.Timeout(s.ID, name, timeout) }
		due = min(due, s.lane.Expire(now, timeoutReportInterval, report))
	}
	return due
}
