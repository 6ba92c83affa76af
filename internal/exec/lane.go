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
	spawned   bool    // whether the goroutine of run was started
	executing bool    // whether run is executing an operation
	answering bool    // whether run has executed an operation but not reported all its results
	inFlight  int     // the number of operations that were launched on a device and have not ended
	claimed   bool    // whether the loop has claimed the lane, so that run waits
	limited   []*Work // work whose entries have completed before its end, and that has a limit
	closing   bool    // whether no more work will be pushed
	err       error   // the error with which all remaining work ends, or nil if the work is to be executed
}

// Expire calls report for each operation whose entries have completed and that has not ended in time, and
// again after each interval. It returns when it must be called again.
func (l *Lane) Expire(now, interval time.Duration, report func(name string,
	timeout time.Duration)) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	due := controller.Never
	for _, w := range l.limited {
		m := &w.limit
		if m.due <= now {
			report(m.name, m.timeout)
			m.due = now + interval
		}
		due = min(due, m.due)
	}
	return due
}

// setLimit sets the time limit of w.
func (l *Lane) setLimit(w *Work, to limit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.limit = to
	l.limited = append(l.limited, w)
}

// unlimit removes the time limit of w. The caller holds mu.
func (l *Lane) unlimit(w *Work) {
	l.limited = slices.DeleteFunc(l.limited, func(o *Work) bool { return o == w })
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
	if !l.claimed && (len(l.todo) > 0 || l.closing) {
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
// inOrder is set, claim also requires that the results of everything that run has executed were reported.
func (l *Lane) claim(inOrder bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.executing || l.claimed || l.closing || l.err != nil || len(l.todo) > 0 ||
		inOrder && (l.answering || l.inFlight > 0) {
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
	l.err, l.closing = err, true
	l.signal() // this wakes run even if it waits for the verdict
}

// next removes and returns the oldest work. It also returns the error that was passed to End, if any. It
// blocks until there is work. Work that does not move data, such as a barrier, waits for the operations in
// flight. If the lane has ended and no work is left, next returns nil.
func (l *Lane) next() (w *Work, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing, l.answering = false, false
	for l.claimed || len(l.todo) == 0 || l.inFlight > 0 && !l.todo[0].overtakes() {
		if l.closing && !l.claimed && l.inFlight == 0 {
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
	l.executing, l.answering = false, true
}

// launched records that the work that next returned has been launched on a device, where it goes on.
func (l *Lane) launched() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.executing = false
	l.inFlight++
}

// ended reports the results of work that was launched on a device. If it has failed, run does so when the
// verdict is known. It may be called before launched, while run executes the work.
func (l *Lane) ended(w *Work, err error) {
	if err == nil {
		l.mu.Lock()
		l.unlimit(w)
		l.mu.Unlock()
		l.machine.finish(w, nil)
	}
	l.cfg.Finished(w, err) // without an error, w may be used again now
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		w.failed, w.cause = true, err
		l.unlimit(w)
		l.todo = slices.Insert(l.todo, 0, w)
	}
	l.inFlight--
	l.wake()
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
