// Package timeline writes the operations of a rank as a Chrome trace: when each rank asked for a tensor, when
// the operation was granted, and how it was executed. docs/timeline.md has the format and the guarantees for
// readers of the files.
//
// Invariants:
//
//  1. Record never waits for a disk, and allocates nothing: it copies into memory that exists already. Only
//     an operation that is larger than that memory by itself gets more. If the memory is full because the
//     disk is slow, full or gone, the operation is dropped and counted.
//  2. The path names a complete JSON file (or gzip file of one) before and after each write, which
//     overwrites the closing bracket and puts a new one behind it. If the process is killed in the middle of
//     a write, the end of that write may be missing. A crash of the machine is not covered: nothing is
//     synced.
//  3. All events of an operation are written together when it has ended, so that every beginning has its
//     end.
//  4. The files of a rank take at most MaxBytes.
//  5. One goroutine owns the files; it sleeps while there is nothing to write.
package timeline

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/trace"
)

// ErrClosed is the error of Write on a closed timeline.
var ErrClosed = errors.New("timeline: closed")

// Config is the configuration of a timeline.
type Config struct {
	// Path is the file of this rank (see PathOf). A name that ends in .gz is written compressed. If the path
	// exists and is not a regular file, such as a FIFO or /dev/stdout, the events are written to it as a
	// stream, without cap or segments.
	Path       string
	Rank, Size int
	Host       string
	Epoch      uint64
	Clock      trace.Clock
	// MarkCycles writes the cycles that are passed to Cycle. Default false.
	MarkCycles bool
	// MaxBytes is the most that all segments together take on disk; 0 is no cap, and one segment. A greater
	// value keeps operations for longer.
	MaxBytes int64
	// Last, if above 0, keeps the operations of that much time in memory, and only Write and Close write
	// them.
	Last time.Duration
	// Log receives warnings that files cannot be written, at most one a minute of a kind. Nil disables them.
	Log *zap.Logger
}

// knobs are the sizes and times that tests change.
type knobs struct {
	// tensors is the capacity of each of the two buffers.
	tensors int
	// interval is how long the first record in an empty buffer waits for more before it is written; retry is
	// how long after a failure writing is tried again.
	interval, retry time.Duration
	// timeout is how long Close and Write wait for the disk.
	timeout time.Duration
}

// defaultKnobs are the knobs outside tests. The interval leaves 10 ms for the writing itself:
// docs/timeline.md promises events in the file after 50 ms.
var defaultKnobs = knobs{tensors: 16 << 10, interval: 40 * time.Millisecond, retry: time.Second,
	timeout: 5 * time.Second}

// Timeline is the timeline of one rank. Its methods may be called from any goroutine.
type Timeline struct {
	knobs   knobs
	mark    bool
	dropped atomic.Uint64

	mu      sync.Mutex // guards filling and closed; held only for copying
	filling *batch
	closed  bool

	// wake is notified when there is something to write, full when a buffer is half full and should be
	// written soon.
	wake, full chan struct{}
	requests   chan chan error
	closing    chan struct{}
	done       chan struct{}
	once       sync.Once
	err        error // the result of Close; set before done is closed
	stream     *stream
}

// PathOf returns the file of a rank: path for rank 0, and path with .rank<r> before the extension for other
// ranks. Devices and paths under /proc are the same for all ranks: no files can be made beside them.
func PathOf(path string, rank int) string {
	if rank == 0 || isDevice(path) {
		return path
	}
	return beside(path, "rank"+strconv.Itoa(rank))
}

// beside inserts a word before the extension of a path. Compressed files have two extensions (t.json.gz).
func beside(path, word string) string {
	stem, ext := split(path)
	return stem + "." + word + ext
}

// split splits a path before its extension. A .gz and the extension before it count as one.
func split(path string) (stem, ext string) {
	base := filepath.Base(path)
	ext = filepath.Ext(base)
	if ext == ".gz" {
		ext = filepath.Ext(strings.TrimSuffix(base, ext)) + ext
	}
	if ext == base {
		ext = "" // the dot begins the name of a hidden file
	}
	return strings.TrimSuffix(path, ext), ext
}

// isDevice reports whether path is in a folder in which no files can be made. /dev/shm is an ordinary folder.
func isDevice(path string) bool {
	path = filepath.Clean(path)
	return strings.HasPrefix(path, "/dev/") && !strings.HasPrefix(path, "/dev/shm/") ||
		strings.HasPrefix(path, "/proc/")
}

// Start makes the file, replacing an existing one, removes the segments of an earlier run and returns the
// timeline. It fails if the file cannot be made. With Last it does not touch an existing file and only tests
// whether one can be made. The caller closes the timeline.
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

// Record records an operation that has ended. It costs some tens of nanoseconds per tensor and keeps nothing
// of op but strings and shapes. After Close it does nothing.
func (t *Timeline) Record(op *trace.Operation) {
	t.add(func(b *batch) bool { return b.operation(op) })
}

// Cycle marks the beginning of a negotiation cycle, if cycles are marked.
func (t *Timeline) Cycle(at time.Duration) {
	if t.mark {
		t.add(func(b *batch) bool {
			return b.mark(record{Operation: trace.Operation{Granted: at}, cycle: true})
		})
	}
}

// Offset records a measurement of this rank's clock relative to rank 0's.
func (t *Timeline) Offset(o trace.Offset) {
	t.add(func(b *batch) bool {
		return b.mark(record{Operation: trace.Operation{Granted: o.At}, offset: &o})
	})
}

// add adds a record to the filling batch by a call of to, which returns false if there is no room. Then the
// record is dropped and counted. add wakes the writer if needed.
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
	if before == 0 && after > 0 || !taken { // the writer reports drops to the log
		signal(t.wake)
	}
	if before < 0.5 && after >= 0.5 {
		signal(t.full)
	}
}

// signal notifies a channel of capacity 1 without blocking.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a notification is pending already
	}
}

// Dropped returns the number of operations and marks that were lost because they could not be written.
func (t *Timeline) Dropped() uint64 { return t.dropped.Load() }

// Write writes everything that was recorded. With Last it writes the operations in memory as one file,
// replacing the file before. It waits at most 5 seconds. After Close it returns ErrClosed.
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

// slow returns the error of a disk that did not answer in time.
func (t *Timeline) slow(doing string) error {
	return fmt.Errorf("timeline: %s: the disk did not finish within %v", doing, t.knobs.timeout)
}

// Close writes the remaining records and closes the file. It waits at most 5 seconds and then abandons a
// write that hangs. Further calls return the same result.
func (t *Timeline) Close() error {
	t.once.Do(func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		if t.stream != nil {
			// The write in progress gets half of the time, so that its error can still be returned.
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

// run owns the files and writes the records until Close.
func (t *Timeline) run(w *writer) {
	defer close(t.done)
	// flushAll writes all records so far: first the rest of an earlier attempt, then the records added
	// meanwhile.
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
			// The timer is set to the next attempt; records that are added until then wait.
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
			left := len(t.filling.records)
			t.mu.Unlock()
			t.err = w.close(err, left)
			return
		}
		err := flushAll()
		if err == nil && answer != nil && w.ring != nil {
			err = w.writeRing()
		}
		if failing = err != nil; failing {
			timer.Reset(t.knobs.retry)
		}
		w.report(err)
		if answer != nil {
			answer <- err
		}
	}
}
