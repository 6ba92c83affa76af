package exec

import (
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/controller"
)

// A Lane executes the grants of one process set in order. It shares no state with other lanes, so a long
// operation of one set does not delay other sets. The goroutine of the lane runs the method run, which
// executes the grants. While run has nothing to do, turns of the loop may claim the lane and execute grants
// themselves (StartInTurn).
type Lane struct {
	cfg     *Config
	machine machine
	// spawn starts the goroutine of run. It is called when run has something to do for the first time.
	spawn func()

	// mu guards the fields below. The fields executing and claimed also determine the owner of machine: run
	// owns it while executing is set, and the loop while claimed is set.
	mu        sync.Mutex
	changed   sync.Cond // wakes run
	todo      []*Work
	spawned   bool  // whether the goroutine of run was started
	executing bool  // whether run is executing an operation
	answering bool  // whether run has executed an operation but not reported all its results
	claimed   bool  // whether the loop has claimed the lane, so that run waits
	limit     limit // of the operation that run is executing, if its entries have completed
	ended     bool  // whether no more work will be pushed
	err       error // the error with which all remaining work ends, or nil if the work is to be executed
}

// Expire calls report if the operation whose entries have completed has not ended in time, and again after
// each interval. It returns when it must be called again.
func (l *Lane) Expire(now, interval time.Duration, report func(name string,
	timeout time.Duration)) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m := &l.limit; {
	case m.timeout == 0:
		return controller.Never
	case m.due <= now:
		report(m.name, m.timeout)
		m.due = now + interval
	}
	return l.limit.due
}

// setLimit sets the time limit of the operation that run executes.
func (l *Lane) setLimit(of limit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit = of
}

// Queued returns the number of grants that wait for the goroutine of the lane.
func (l *Lane) Queued() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.todo)
}

// Push appends w to the work that run has to execute.
func (l *Lane) Push(w *Work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.todo = append(l.todo, w)
	l.wake()
}

// wake wakes the goroutine of run if it has something to do. The caller holds mu.
func (l *Lane) wake() {
	if !l.claimed && (len(l.todo) > 0 || l.ended) {
		l.signal()
	}
}

// signal wakes the goroutine of run, or starts it if it was not started before. The caller holds mu.
func (l *Lane) signal() {
	if l.spawned {
		l.changed.Signal()
		return
	}
	l.spawned = true
	l.spawn()
}

// claim claims the lane for the loop if run has nothing to do, and reports whether it has succeeded. If
// inOrder is set, claim also requires that run has reported the results of everything that it has executed.
func (l *Lane) claim(inOrder bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.executing || l.claimed || l.ended || l.err != nil || len(l.todo) > 0 || inOrder && l.answering {
		return false
	}
	l.claimed = true
	return true
}

// unclaim returns the lane to run. If w is not nil, run continues with w.
func (l *Lane) unclaim(w *Work) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claimed = false
	if w != nil {
		l.todo = slices.Insert(l.todo, 0, w)
	}
	l.wake()
}

// End makes run return when no work is left. If err is not nil, run ends work that has not begun with err
// instead of executing it. Work that has begun is aborted only when the context of run ends.
func (l *Lane) End(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.ended = err, true
	l.signal() // this wakes run even if it waits for the verdict
}

// next removes and returns the oldest work. It also returns the error that was passed to End, if any. It
// blocks until there is work. If the lane has ended and no work is left, next returns nil.
func (l *Lane) next() (w *Work, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering, l.limit = false, false, limit{}
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

// executed records that run has executed the work that next returned. run calls it before it reports the
// results. So if a caller gets its result and begins the next operation, it finds the lane free.
func (l *Lane) executed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering, l.limit = false, true, limit{}
}

// verdict blocks until the epoch has failed, and returns the reason.
func (l *Lane) verdict() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		l.changed.Wait()
	}
	return l.err
}
