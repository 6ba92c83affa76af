// Package timeline writes the operations of a rank to a file as a Chrome trace. The trace shows when each
// rank submitted a tensor, when the operation was granted, and how it was executed. docs/timeline.md
// describes the format, and says on which properties of the files programs can rely.
//
// Invariants:
//
//  1. Record never waits for a disk and copies into preallocated memory. It allocates only if a single
//     operation is larger than this memory. If the memory is full because the disk is slow, full or gone,
//     the timeline drops the operation and counts it.
//  2. Before and after each write, the path names a complete JSON file, or a complete gzip file of one. A
//     write overwrites the closing bracket and puts a new one after the new text. If the process is killed
//     during a write, the end of this write may be missing. A crash of the machine may lose more, because
//     the files are not synced.
//  3. All events of an operation are written together after the operation has ended, so that every begin
//     event has an end event.
//  4. The files of a rank take at most MaxBytes on disk.
//  5. One goroutine owns the files. It sleeps while there is nothing to write.
package timeline

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// ErrClosed is returned by Write after Close.
var ErrClosed = errors.New("timeline: closed")

// Timeline is the timeline of one rank. Its methods may be called from any goroutine.
type Timeline struct {
	knobs   knobs
	mark    bool
	dropped atomic.Uint64

	mu      sync.Mutex // guards filling and closed; held only while a record is copied
	filling *batch
	closed  bool

	// wake is notified when there are records to write. full is notified when the filling batch is half full
	// and should be written soon.
	wake, full chan struct{}
	requests   chan chan error
	closing    chan struct{}
	done       chan struct{}
	once       sync.Once
	err        error // the result of Close; it is set before done is closed
	stream     *stream
}

// Start creates or replaces the file, removes the segments of an earlier run and returns the timeline. It
// fails if the file cannot be created. With Config.New it neither replaces nor removes files. The caller must
// close the timeline.
func Start(cfg Config) (*Timeline, error) { return start(cfg, defaultKnobs) }

func start(cfg Config, k knobs) (*Timeline, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	t := &Timeline{
		knobs: k, mark: cfg.MarkCycles, filling: newBatch(k.tensors),
		wake: make(chan struct{}, 1), full: make(chan struct{}, 1),
		requests: make(chan chan error), closing: make(chan struct{}), done: make(chan struct{}),
	}
	w := newWriter(cfg, k, &t.dropped)
	if err := w.open(); err != nil {
		return nil, fmt.Errorf("timeline: rank %d: %w", cfg.Rank, err)
	}
	t.stream, _ = w.sink.(*stream)
	go t.run(w)
	return t, nil
}

// Record records an operation that has ended. It takes tens of nanoseconds per tensor. The timeline copies
// op, so the caller may reuse op, except that its strings and shapes must not change. After Close, Record
// does nothing.
func (t *Timeline) Record(op *trace.Operation) {
	t.add(func(b *batch) bool { return b.operation(op) })
}

// Cycle records the beginning of a negotiation cycle at the given time. Without Config.MarkCycles it does
// nothing.
func (t *Timeline) Cycle(at time.Duration) {
	if t.mark {
		t.add(func(b *batch) bool { return b.mark(entry{at: at}) })
	}
}

// Step records that the training step with the given number begins at the given time.
func (t *Timeline) Step(at time.Duration, number uint64) {
	t.add(func(b *batch) bool { return b.mark(entry{at: at, step: true, number: number}) })
}

// Span records what the program did. It takes tens of nanoseconds.
func (t *Timeline) Span(s trace.Span) {
	t.add(func(b *batch) bool { return b.mark(entry{span: s}) })
}

// Set records the members of a new process set. The caller must not change ranks afterwards.
func (t *Timeline) Set(id topo.ProcessSetID, ranks []topo.Rank) {
	t.rare(func(f *formatter, dst []byte) []byte {
		s := set{id, ranks}
		if !slices.ContainsFunc(f.sets, func(known set) bool { return known.id == id }) {
			f.sets = append(f.sets, s)
		}
		return f.set(dst, &s)
	})
}

// RemoveSet records that a process set was removed. Later segments do not have it.
func (t *Timeline) RemoveSet(id topo.ProcessSetID) {
	t.rare(func(f *formatter, dst []byte) []byte {
		f.remember()
		f.sets = slices.DeleteFunc(f.sets, func(known set) bool { return known.id == id })
		return dst
	})
}

// maxPending limits the pending operations that a timeline shows.
const maxPending = 1 << 10

// Pending records the operations that are pending at the given time, because the timeline or the job ends
// then. If there are too many, it records the first ones. The caller must not change all afterwards.
func (t *Timeline) Pending(at time.Duration, all []trace.Record) {
	for i := range all[:min(len(all), maxPending)] {
		t.rare(func(f *formatter, dst []byte) []byte { return f.pending(dst, at, &all[i]) })
	}
}

func (t *Timeline) rare(format func(f *formatter, dst []byte) []byte) {
	t.add(func(b *batch) bool { return b.mark(entry{rare: format}) })
}

// Tuned records that rank 0 has changed settings at the given time. The caller must not change v afterwards.
func (t *Timeline) Tuned(at time.Duration, v *message.Tuning) {
	t.add(func(b *batch) bool { return b.mark(entry{at: at, tuning: v}) })
}

// Offset records a measurement of this rank's clock against rank 0's clock.
func (t *Timeline) Offset(o trace.Offset) {
	t.add(func(b *batch) bool { return b.mark(entry{at: o.At, offset: &o}) })
}

// add calls the given function, which adds an entry to the filling batch and returns false if there is no
// room. In that case add drops the entry and counts the drop. add wakes the writing goroutine if needed.
func (t *Timeline) add(to func(*batch) bool) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return
	}
	before := t.filling.fill()
	taken := to(t.filling)
	if !taken {
		t.dropped.Add(1)
	}
	after := t.filling.fill()
	t.mu.Unlock()
	if before == 0 && after > 0 || !taken { // also after a drop, because the writer logs drops
		signal(t.wake)
	}
	if before < 0.5 && after >= 0.5 {
		signal(t.full)
	}
}

// signal notifies a channel of capacity 1 and does not block.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a notification is pending already
	}
}

// Dropped returns the number of operations and marks that were lost because they could not be written.
func (t *Timeline) Dropped() uint64 { return t.dropped.Load() }

// Write writes all records so far to the file. It waits at most 5 seconds. After Close it returns ErrClosed.
func (t *Timeline) Write() error {
	timer := time.NewTimer(t.knobs.timeout)
	defer timer.Stop()
	answer := make(chan error, 1)
	select {
	case t.requests <- answer:
	case <-t.done:
		return ErrClosed
	case <-timer.C:
		return t.slow("write")
	}
	select {
	case err := <-answer:
		return err
	case <-timer.C:
		return t.slow("write")
	}
}

// slow returns the error of a call that waited too long for the disk. The parameter doing describes the call.
func (t *Timeline) slow(doing string) error {
	return fmt.Errorf("timeline: %s: the disk did not finish within %v", doing, t.knobs.timeout)
}

// Close writes the remaining records and closes the file. If a write hangs, Close abandons it after 5
// seconds. Further calls return the same result.
func (t *Timeline) Close() error {
	t.once.Do(func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		if t.stream != nil {
			// The deadline is half of the timeout, so that a write in progress can fail and return its error
			// in time.
			t.stream.limit(time.Now().Add(t.knobs.timeout / 2))
		}
		close(t.closing)
	})
	timer := time.NewTimer(t.knobs.timeout)
	defer timer.Stop()
	select {
	case <-t.done:
		return t.err
	case <-timer.C:
		return t.slow("close")
	}
}

// run owns the files and writes records to them until Close. It runs in a goroutine of its own.
func (t *Timeline) run(w *writer) {
	defer close(t.done)
	// flushAll writes all records so far. The records left by an earlier failed attempt come first, then the
	// records that were added since.
	flushAll := func() error {
		if err := w.flush(); err != nil {
			return err
		}
		t.mu.Lock()
		t.filling, w.reading = w.reading, t.filling
		t.mu.Unlock()
		return w.flush()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	failing := false
	for {
		var retry <-chan time.Time
		wake := t.wake
		if failing {
			// Until the timer expires, added records do not wake the goroutine.
			retry, wake = timer.C, nil
		}
		var answer chan error
		select {
		case <-wake:
			timer.Reset(t.knobs.interval)
			select {
			case <-timer.C:
			case <-t.full:
			case answer = <-t.requests:
			case <-t.closing:
			}
		case <-retry:
		case answer = <-t.requests:
		case <-t.closing:
			err := flushAll()
			t.mu.Lock()
			left := len(t.filling.entries)
			t.mu.Unlock()
			t.err = w.close(err, left)
			return
		}
		err := flushAll()
		if failing = err != nil; failing {
			timer.Reset(t.knobs.retry)
		}
		w.report(err)
		if answer != nil {
			answer <- err
		}
	}
}
