package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// work holds a grant with this rank's tensors for it, in the same order.
type work struct {
	grant   *controller.Grant
	entries []*tensorqueue.Entry
	// absent means that this rank has joined: it has no tensors, and contributes neutral elements.
	absent bool
	// started means that its operation was started and must be finished; failed, that it ended in an error and its tensors await
	// the verdict.
	started, failed bool
	// granted and begun are when the work was granted and begun. If a timeline is on, marks are its activities, by clock.
	granted, begun time.Duration
	watched        bool
	clock          time.Time
	marks          []mark
	// arrivals are when the members' requests came, by tensor and member, where that is known.
	arrivals []time.Duration
	// refused are the errors of tensors whose result this rank cannot take though all ranks agreed; nil, or as long
	// as entries.
	refused []error
}

func (w *work) reset() {
	clear(w.entries)
	clear(w.refused)
	*w = work{entries: w.entries[:0], refused: w.refused[:0], marks: w.marks[:0], arrivals: w.arrivals[:0]}
}

// refuse answers one tensor with an error while the operation goes on for the others.
func (w *work) refuse(i int, err error) {
	for len(w.refused) < len(w.entries) {
		w.refused = append(w.refused, nil)
	}
	w.refused[i] = err
}

// lane executes the grants of one process set, in order. It shares nothing with other lanes, so that a set that
// executes for seconds delays no other. Its goroutine, run, executes; or the loop, if it has claimed the lane while run has
// nothing to do.
type lane struct {
	set            controller.Set
	me             int // position of this rank in the set
	queue          *tensorqueue.Queue
	manager        *ops.Manager
	maxResultBytes int64
	observer       *observer
	scratch        scratch
	execution      execution

	// voted finds what was submitted by the bits of the response cache. Owned by the loop.
	voted votes

	mu        sync.Mutex // for what follows; claimed and executing also say who owns scratch and execution
	changed   sync.Cond  // run waits for it
	todo      []*work
	executing bool  // run executes
	answering bool  // run has executed something, and has not answered all of it
	claimed   bool  // the loop has the lane, and run waits
	ended     bool  // no more work will come
	err       error // answers everything that is left
}

// newLane makes the lane of a set in which this rank has position me.
func (e *Engine) newLane(set controller.Set, me int) (*lane, error) {
	manager, err := ops.NewManager(e.cfg.Backends, set.ID, set.Ranks, me)
	l := &lane{set: set, me: me, queue: tensorqueue.New(), maxResultBytes: e.cfg.MaxResultBytes, observer: &e.observer, manager: manager}
	l.changed.L = &l.mu
	return l, err
}

// votes has entries by the cache bits for which they may be votes, so that a grant of many needs no search for each.
type votes []*tensorqueue.Entry

// add enters e, which has passed the cache.
func (v *votes) add(e *tensorqueue.Entry) {
	for int(e.Request.Bit) >= len(*v) {
		*v = append(*v, nil)
	}
	(*v)[e.Request.Bit] = e
}

// take removes and returns the entry of a bit if it is for r, and returns nil otherwise.
func (v votes) take(bit uint32, r *message.Response) *tensorqueue.Entry {
	if int64(bit) >= int64(len(v)) || v[bit] == nil {
		return nil
	}
	e := v[bit]
	if q := &e.Request; q.Hit != r && q.Name != r.Name {
		return nil
	}
	v[bit] = nil
	return e
}

// drop removes e, so that what it refers to can be collected. It may be nil.
func (v votes) drop(e *tensorqueue.Entry) {
	if e != nil && int64(e.Request.Bit) < int64(len(v)) && v[e.Request.Bit] == e {
		v[e.Request.Bit] = nil
	}
}

// push queues w.
func (l *lane) push(w *work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.todo = append(l.todo, w)
	l.wake()
}

// wake wakes run if there is something for it to do. The caller holds mu.
func (l *lane) wake() {
	if !l.claimed && (len(l.todo) > 0 || l.ended) {
		l.changed.Signal()
	}
}

// claim takes the lane from run, if run has nothing to do. With inOrder run must have answered what it has executed, too.
func (l *lane) claim(inOrder bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.executing || l.claimed || l.ended || l.err != nil || len(l.todo) > 0 || inOrder && l.answering {
		return false
	}
	l.claimed = true
	return true
}

// unclaim gives the lane back, with work that is to be done first unless that is nil.
func (l *lane) unclaim(w *work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claimed = false
	if w != nil {
		l.todo = slices.Insert(l.todo, 0, w)
	}
	l.wake()
}

// end lets run return when nothing is left to do. An err answers whatever has not begun; what has begun is cut
// off by the end of run's context.
func (l *lane) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.ended = err, true
	l.changed.Signal() // also if run waits for the verdict
}

// next takes the oldest work for run, waiting for it. It is nil at the end.
func (l *lane) next() (w *work, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering = false, false
	for l.claimed || len(l.todo) == 0 {
		if l.ended && !l.claimed {
			return nil, nil
		}
		l.changed.Wait()
	}
	w = l.todo[0]
	l.todo = slices.Delete(l.todo, 0, 1)
	l.executing = true
	return w, l.err
}

// executed notes that run has executed what next gave. It comes before the answers: a caller that gets one and begins the
// next operation may find the lane free.
func (l *lane) executed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering = false, true
}

// verdict waits until the epoch is given up, and returns why.
func (l *lane) verdict() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		l.changed.Wait()
	}
	return l.err
}

// run executes until end. finished hears of each piece of work, after its tensors were answered, and of its
// error. After an error the work is not answered before end says with what: the verdict may name another
// rank than the one whose channel broke.
func (l *lane) run(ctx context.Context, finished func(w *work, err error)) {
	for {
		w, err := l.next()
		if w == nil {
			return
		}
		// What was started is finished also at the end: peers may still read what it takes from here, and if it cannot be
		// finished they must hear of it, before the caller has its memory again.
		if (err == nil || w.started) && !w.failed {
			if err = l.execute(ctx, w); err == nil {
				l.executed()
				l.answer(w)
				finished(w, nil)
				continue
			}
			finished(w, err)
			w.failed = true
		}
		if w.failed {
			err = l.verdict()
		}
		l.observer.ended(l.set.ID, w, err)
		for _, e := range w.entries {
			l.finish(e, err)
		}
	}
}

// blame returns the rank to suspect for an error of execution: the peer whose channel failed, else this rank.
func blame(err error, self topo.Rank) (topo.Rank, string) {
	var p *transport.PeerError
	if errors.As(err, &p) {
		return p.Peer, cause(err).Error()
	}
	return self, err.Error()
}
