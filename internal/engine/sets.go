package engine

import (
	"errors"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// ErrNoProcessSet refuses an operation on a process set that has been removed, or that this rank is no member of, and
// answers what was still waiting in a set when it was removed.
var ErrNoProcessSet = errors.New("the process set was removed, or this rank is not a member of it")

// laneTable has the lanes of the process sets that this rank is a member of. The loop alone changes it.
type laneTable struct {
	mu sync.RWMutex // for the loop to change, for others to read; the loop reads without
	// all is ascending by process set. A removed set stays until its last work is done.
	all []*lane
}

// find is the lane of a set, or nil. Any goroutine may call it.
func (t *laneTable) find(id topo.ProcessSetID) *lane {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if i, ok := t.search(id); ok {
		return t.all[i]
	}
	return nil
}

func (t *laneTable) search(id topo.ProcessSetID) (int, bool) {
	return slices.BinarySearchFunc(t.all, id, func(l *lane, id topo.ProcessSetID) int { return int(l.set.ID) - int(id) })
}

func (t *laneTable) add(l *lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := t.search(l.set.ID)
	t.all = slices.Insert(t.all, i, l)
}

func (t *laneTable) drop(id topo.ProcessSetID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i, ok := t.search(id); ok {
		t.all = slices.Delete(t.all, i, i+1)
	}
}

// snapshot is the table for a goroutine other than the loop.
func (t *laneTable) snapshot() []*lane {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Clone(t.all)
}

// addSet makes a lane for a set, unless this rank is not in it.
func (e *Engine) addSet(set controller.Set) error {
	me := slices.Index(set.Ranks, e.cfg.Rank)
	if me < 0 {
		return nil
	}
	l, err := e.newLane(set, me)
	if err != nil {
		return err
	}
	e.lanes.add(l)
	if !e.cfg.Lockstep {
		e.running.Go(func() {
			e.pin()
			l.run(e.ctx, e.laneFinished)
		})
	}
	return nil
}

// changeSets does what a grant says about the process sets themselves, and returns the lane on which the grant is to
// be answered: the removal of a set comes after its last operation. (Its entry is in the queue of the global set.)
func (e *Engine) changeSets(g *controller.Grant) (*lane, error) {
	here := e.lanes.find(g.Set)
	switch r := g.Responses[0]; r.Kind {
	case message.AddProcessSet:
		return here, e.addSet(controller.Set{ID: r.Set, Ranks: r.Ranks})
	case message.RemoveProcessSet:
		if l := e.lanes.find(r.Set); l != nil {
			l.refuse(ErrNoProcessSet)
			return l, nil
		}
	}
	return here, nil
}

// dropSet lets go of a set whose last work is done. The lane is released by those who are no members too: the mesh
// remembers a run of released lanes in a few bytes, but not gaps between them.
func (e *Engine) dropSet(id topo.ProcessSetID) {
	if l := e.lanes.find(id); l != nil {
		l.end(nil)
		e.lanes.drop(id)
	}
	e.cfg.Mesh.Release(transport.DataLane(id))
}

// refuse closes the queue of a lane, and answers what is not granted.
func (l *lane) refuse(reason error) {
	l.queue.Close(reason)
	for _, entry := range l.queue.InFlight() {
		if entry.Times.Granted.Load() == 0 {
			l.observer.abandoned(1)
			entry.Finish(opError(&entry.Request, reason))
		}
	}
}
