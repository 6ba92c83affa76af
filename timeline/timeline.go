// Package timeline writes what a rank has done as a Chrome trace: who asked for which tensor when, when it was granted, and what
// was done with it. docs/timeline.md has the format and the guarantees for those who read the files.
//
// What holds:
//
//  1. Record never waits for a disk, and allocates nothing: it copies into memory that is there already, or for an operation that
//     alone is larger than that, into more. If it is full because the disk is slow, full or gone, the operation is dropped and
//     counted.
//  2. The path names a complete JSON file (or gzip file of one) before and after each write, which goes over the closing bracket
//     and puts a new one behind it. If the process is killed in the middle of a write, the end of that write may be missing. A
//     machine that crashes is not covered: nothing is synced.
//  3. All events of an operation are written together when it has ended, so that every beginning has its end.
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

// ErrClosed is what a closed timeline answers.
var ErrClosed = errors.New("timeline: closed")

// Config says what to write where.
type Config struct {
	// Path is this rank's file (PathOf). With .gz at its end it is compressed. If it is there and is no regular file, as a FIFO or
	// /dev/stdout, the events are written to it as a stream, without cap or segments.
	Path       string
	Rank, Size int
	Host       string
	Epoch      uint64
	Clock      trace.Clock
	// MarkCycles writes what Cycle is told.
	MarkCycles bool
	// MaxBytes is the most that all segments together take on disk; 0 is no cap, and one segment.
	MaxBytes int64
	// Last, if above 0, keeps the operations of that time in memory and writes them in Write and Close alone.
	Last time.Duration
	// Log is told, seldom, that files cannot be written. Nil is silence.
	Log *zap.Logger
}

// knobs are what tests turn.
type knobs struct {
	// tensors is how many each of the two buffers holds.
	tensors int
	// interval is how long what was recorded waits for more before it is written, retry how long after a failure.
	interval, retry time.Duration
	// patience is how long Close and Write wait for the disk.
	patience time.Duration
}

// The interval leaves 10 ms for the writing itself: docs/timeline.md promises events in the file after 50.
var usual = knobs{tensors: 16 << 10, interval: 40 * time.Millisecond, retry: time.Second, patience: 5 * time.Second}

// Timeline is the timeline of one rank. Its methods may be called from any goroutine.
type Timeline struct {
	knobs   knobs
	mark    bool
	dropped atomic.Uint64

	mu      sync.Mutex // guards filling and closed; held for copying alone
	filling *batch
	closed  bool

	// wake says that there is something to write, full that it should be soon.
	wake, full chan struct{}
	requests   chan chan error
	closing    chan struct{}
	done       chan struct{}
	once       sync.Once
	err        error // of closing; set before done is closed
	stream     *stream
}

// PathOf returns the file of a rank: path for rank 0, and for others with .rank<r> before the extension. Devices and what is under
// /proc have no files beside them, and are the same for all ranks.
func PathOf(path string, rank int) string {
	if rank == 0 || isDevice(path) {
		return path
	}
	return beside(path, "rank"+strconv.Itoa(rank))
}

// beside puts a word before the extension of a path, which is two for compressed files (t.json.gz).
func beside(path, word string) string {
	stem, ext := split(path)
	return stem + "." + word + ext
}

func split(path string) (stem, ext string) {
	base := filepath.Base(path)
	ext = filepath.Ext(base)
	if ext == ".gz" {
		ext = filepath.Ext(strings.TrimSuffix(base, ext)) + ext
	}
	if ext == base {
		ext = "" // the dot of a hidden file
	}
	return strings.TrimSuffix(path, ext), ext
}

// isDevice reports whether path is where no files can be made. /dev/shm is a folder as any other.
func isDevice(path string) bool {
	path = filepath.Clean(path)
	return strings.HasPrefix(path, "/dev/") && !strings.HasPrefix(path, "/dev/shm/") || strings.HasPrefix(path, "/proc/")
}

// Start makes the file, replacing one that is there, and removes the segments of an earlier run. It fails if it cannot; with Last
// it leaves the file alone and only tries whether it can make one. The caller closes the timeline.
func Start(cfg Config) (*Timeline, error) { return start(cfg, usual) }

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

// Record takes an operation that has ended. It costs some tens of nanoseconds per tensor and keeps nothing of op but strings and
// shapes. After Close it does nothing.
func (t *Timeline) Record(op *trace.Operation) {
	t.add(func(b *batch) bool { return b.operation(op) })
}

// Cycle marks the beginning of a negotiation cycle, if cycles are marked.
func (t *Timeline) Cycle(at time.Duration) {
	if t.mark {
		t.add(func(b *batch) bool { return b.mark(record{Operation: trace.Operation{Granted: at}, cycle: true}) })
	}
}

// Offset takes a measurement of this rank's clock against rank 0's.
func (t *Timeline) Offset(o trace.Offset) {
	t.add(func(b *batch) bool { return b.mark(record{Operation: trace.Operation{Granted: o.At}, offset: &o}) })
}

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
	if before == 0 && after > 0 || !taken { // the log is told of a drop by who writes
		signal(t.wake)
	}
	if before < 0.5 && after >= 0.5 {
		signal(t.full)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it was told already
	}
}

// Dropped returns how many operations and marks were lost because they could not be written.
func (t *Timeline) Dropped() uint64 { return t.dropped.Load() }

// Write brings what was recorded to the disk: with Last, what is in memory as a file of its own, replacing the one before. It
// waits for at most 5 seconds.
func (t *Timeline) Write() error {
	timer := time.NewTimer(t.knobs.patience)
	defer timer.Stop()
	answer := make(chan error, 1)
	select {
	case t.requests <- answer:
	case <-t.done:
		return ErrClosed
	case <-timer.C:
		return t.slow("writing")
	}
	select {
	case err := <-answer:
		return err
	case <-timer.C:
		return t.slow("writing")
	}
}

func (t *Timeline) slow(doing string) error {
	return fmt.Errorf("timeline: %s: the disk has not answered within %v", doing, t.knobs.patience)
}

// Close writes what is there and closes the file. It waits for at most 5 seconds; what hangs after that is left behind. Calling
// it again gives the same answer.
func (t *Timeline) Close() error {
	t.once.Do(func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		if t.stream != nil {
			// Half of the time for what is under way, so that its failure is still heard.
			t.stream.limit(time.Now().Add(t.knobs.patience / 2))
		}
		close(t.closing)
	})
	timer := time.NewTimer(t.knobs.patience)
	defer timer.Stop()
	select {
	case <-t.done:
		return t.err
	case <-timer.C:
		return t.slow("closing")
	}
}

// run is the goroutine that owns the files.
func (t *Timeline) run(w *writer) {
	defer close(t.done)
	// settle writes all that was recorded before: what an earlier attempt has left, and then what has come in meanwhile.
	settle := func() error {
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
			// The time of the next attempt is set already; what comes in until then waits.
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
			err := settle()
			t.mu.Lock()
			left := len(t.filling.records)
			t.mu.Unlock()
			t.err = w.close(err, left)
			return
		}
		err := settle()
		if err == nil && answer != nil && w.ring != nil {
			err = w.unroll()
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
