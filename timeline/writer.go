package timeline

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// chunk is how much text is written at a time.
	chunk = 256 << 10
	// warnEvery is how often, at most, the log hears that writing fails.
	warnEvery = time.Minute
)

// writer turns records into files. Each step can fail and be taken again later: what is not done stays where it is, and nothing
// is written twice.
type writer struct {
	cfg     Config
	knobs   knobs
	dropped *atomic.Uint64
	sink    sink
	enc     encoder
	format  formatter
	ring    *ring // nil but with Last

	reading *batch // what was recorded, from at on not yet in pending
	at      cursor
	pending []byte // text that is not yet encoded
	out     []byte // bytes that the sink has not taken
	tail    []byte
	// tailBytes is how long every tail is.
	tailBytes int

	segment int
	stale   bool  // a file has to be begun before anything is written
	body    int64 // of the segment: what the sink has taken, with its header
	header  int64 // how much of body is the header
	limit   int64 // of a segment; 0 is none
	unseen  int   // records since the last commit

	// When the log was last told, how much was dropped then, and whether it was told of an error that is not over.
	warnedSlow, warnedBroken time.Time
	told                     uint64
	failed                   bool
}

func newWriter(cfg Config, k knobs, dropped *atomic.Uint64) *writer {
	w := &writer{cfg: cfg, knobs: k, dropped: dropped, enc: plain{}, reading: newBatch(k.tensors), stale: true}
	if strings.HasSuffix(cfg.Path, ".gz") {
		w.enc = &gzipped{}
	}
	w.format.cfg = &w.cfg
	if cfg.Rank == 0 {
		// Its clock is the one that others are held against.
		w.format.offset, w.format.known = trace.Offset{Job: cfg.Clock.Job()}, true
	}
	if cfg.Last > 0 {
		w.ring = newRing(cfg.Last, cfg.MaxBytes)
		w.ring.offset, w.ring.known = w.format.offset, w.format.known
	}
	return w
}

// open finds out what the path is and, unless it is for a ring, begins the file.
func (w *writer) open() error {
	// The program may change its folder. The file itself is replaced, not a link to it.
	if whole, err := filepath.Abs(w.cfg.Path); err == nil && !isDevice(w.cfg.Path) {
		w.cfg.Path = whole
	}
	if real, err := filepath.EvalSymlinks(w.cfg.Path); err == nil && !isDevice(w.cfg.Path) {
		w.cfg.Path = real
	}
	at, err := os.Stat(w.cfg.Path)
	switch {
	case err == nil && at.IsDir():
		return fmt.Errorf("%s is a folder, want a file", w.cfg.Path)
	case err == nil && (!at.Mode().IsRegular() || isDevice(w.cfg.Path)):
		if w.sink, err = openStream(w.cfg.Path, at.Mode()); err != nil {
			return err
		}
	case err == nil || errors.Is(err, fs.ErrNotExist):
		if err := w.openDisk(); err != nil {
			return err
		}
	default:
		return err
	}
	if w.ring != nil {
		return nil
	}
	if err := w.begin(); err != nil {
		return errors.Join(err, w.sink.close())
	}
	return nil
}

func (w *writer) openDisk() error {
	most := w.cfg.MaxBytes
	d, err := newDisk(w.cfg.Path, most, w.ring != nil, w.knobs.change)
	if err != nil {
		return err
	}
	if w.ring != nil {
		// What the ring holds is meant to be one file. If it has more text than it looked like, the rest of the cap is for it.
		d.limit = most / 2
	}
	w.sink, w.limit = d, d.limit
	return nil
}

// begin starts a segment, if the last one is finished.
func (w *writer) begin() error {
	if !w.stale {
		return nil
	}
	w.enc.reset()
	first, _ := w.enc.encode(nil, w.format.header(nil, w.segment+1, w.dropped.Load()))
	whole := w.enc.tail(first)
	if err := w.sink.next(w.segment, whole, len(whole)-len(first)); err != nil {
		if errors.Is(err, errLost) {
			w.lose()
		}
		return err
	}
	w.segment++
	w.tailBytes = len(whole) - len(first)
	w.stale, w.body, w.header = false, int64(len(first)), int64(len(first))
	return nil
}

// lose counts what was written and not shown, and goes on with a new file.
func (w *writer) lose() {
	w.dropped.Add(uint64(w.unseen))
	w.unseen, w.pending, w.out, w.stale = 0, w.pending[:0], w.out[:0], true
	w.sink.forget()
}

// idle reports whether all that was taken is in pending, or further.
func (w *writer) idle() bool { return w.at.entry == len(w.reading.entries) }

// take gives the writer a batch when it is idle.
func (w *writer) take(b *batch) { w.reading, w.at = b, cursor{} }

// flush writes and shows what was taken.
func (w *writer) flush() error {
	if w.ring != nil {
		w.ring.add(w.reading)
		w.at.entry = len(w.reading.entries)
		return nil
	}
	if err := w.drain(); err != nil {
		return err
	}
	return w.commit()
}

// write is what follows a flush on request: with a ring, what it holds becomes a file.
func (w *writer) write() error {
	if w.ring == nil {
		return nil
	}
	if err := w.unroll(); err != nil {
		return err
	}
	return w.commit()
}

// unroll makes text of what the ring holds. A stream only goes on, so for one the ring gives up what has become text.
func (w *writer) unroll() error {
	_, once := w.sink.(*stream)
	if !once {
		// Each is a file of its own, in place of the one before.
		w.pending, w.out, w.unseen = w.pending[:0], w.out[:0], 0
		w.sink.forget()
		if err := w.openDisk(); err != nil {
			return err
		}
		w.segment, w.stale = 0, true
		w.format.offset, w.format.known = w.ring.offset, w.ring.known
	}
	keep, at := w.reading, w.at
	defer func() { w.reading, w.at = keep, at }()
	for b := range w.ring.all() {
		w.reading, w.at = b, cursor{}
		err := w.drain()
		if once {
			w.ring.shorten(b.from(w.at))
		}
		if err != nil {
			return err
		}
	}
	return w.begin() // if there was nothing
}

// drain makes text of all that was taken, and writes it.
func (w *writer) drain() error {
	b := w.reading
	for w.at.entry < len(b.entries) {
		e := &b.entries[w.at.entry]
		if e.what != anOperation {
			if err := w.mark(e); err != nil {
				return err
			}
		}
		activities := b.activities[w.at.activity:][:e.activities]
		for w.at.inside < int(e.tensors) {
			n := &b.tensors[w.at.tensor]
			if err := w.tensor(e, n, activities, b.arrivals[w.at.arrival:][:n.arrivals]); err != nil {
				return err
			}
			w.at.inside++
			w.at.tensor++
			w.at.arrival += int(n.arrivals)
		}
		w.at.entry++
		w.at.inside = 0
		w.at.activity += int(e.activities)
		w.unseen++
	}
	return nil
}

func (w *writer) mark(e *entry) error {
	return w.place(func(dst []byte) []byte {
		if e.what == aCycle {
			return w.format.cycle(dst, e.at)
		}
		return w.format.clock(dst, e.offset())
	}, func() {})
}

func (w *writer) tensor(e *entry, n *tensorEntry, activities []trace.Activity, arrivals []time.Duration) error {
	return w.place(func(dst []byte) []byte { return w.format.tensor(dst, e, n, activities, arrivals) }, w.format.undo)
}

// place puts text in the segment, or in the next if it does not fit. If it fails the text was not used. What fits in no segment
// is dropped.
func (w *writer) place(format func([]byte) []byte, undo func()) error {
	for {
		if err := w.begin(); err != nil {
			return err
		}
		if len(w.pending) >= chunk {
			if err := w.push(); err != nil {
				return err
			}
		}
		before := len(w.pending)
		w.pending = format(w.pending)
		if w.fits() {
			return nil
		}
		w.pending = w.pending[:before]
		undo()
		switch {
		case len(w.pending)+len(w.out) > 0:
			// Compressed, it may be less than it could have been.
			if err := w.push(); err != nil {
				return err
			}
		case w.body == w.header:
			w.dropped.Add(1)
			return nil
		default:
			if err := w.commit(); err != nil {
				return err
			}
			w.stale = true
		}
	}
}

// fits reports whether all text that is there leaves the segment within its limit.
func (w *writer) fits() bool {
	return w.limit <= 0 || w.body+int64(len(w.out)+w.tailBytes)+w.enc.most(len(w.pending)) <= w.limit
}

// push gives the sink all text that is there.
func (w *writer) push() error {
	if len(w.out) == 0 && len(w.pending) > 0 {
		w.out, w.pending = w.enc.encode(w.out, w.pending)
	}
	if len(w.out) == 0 {
		return nil
	}
	w.tail = w.enc.tail(w.tail[:0])
	n, err := w.sink.write(w.out, w.tail)
	w.body += int64(n)
	w.out = w.out[:copy(w.out, w.out[n:])]
	if err != nil {
		return err
	}
	return w.push() // what came to be pending while the sink failed
}

// commit shows what was written.
func (w *writer) commit() error {
	if w.stale {
		return nil
	}
	if err := w.push(); err != nil {
		return err
	}
	w.tail = w.enc.tail(w.tail[:0])
	if err := w.sink.commit(w.tail); err != nil {
		if errors.Is(err, errLost) {
			w.lose()
		}
		return err
	}
	w.unseen = 0
	return nil
}

// close ends the file. err is how the last flush went, left what was never taken.
func (w *writer) close(err error, left int) error {
	if err == nil && w.ring != nil {
		err = w.unroll()
	}
	if err == nil {
		err = w.place(func(dst []byte) []byte { return w.format.end(dst, w.dropped.Load()) }, func() {})
	}
	if err == nil {
		err = w.commit()
	}
	if s, ok := w.sink.(*stream); ok && err == nil {
		w.tail = w.enc.tail(w.tail[:0])
		err = s.finish(w.tail)
	}
	err = errors.Join(err, w.sink.close())
	if err == nil {
		return nil
	}
	lost := left + w.unseen + len(w.reading.entries) - w.at.entry
	if w.ring != nil {
		lost = left + w.ring.operations()
		if _, once := w.sink.(*stream); once {
			lost += w.unseen
		}
	}
	w.dropped.Add(uint64(lost))
	return fmt.Errorf("timeline: rank %d: closing %s, %d operations are not written: %w", w.cfg.Rank, w.cfg.Path, lost, err)
}

// report tells the log, seldom, how writing goes.
func (w *writer) report(err error) {
	dropped := w.dropped.Load()
	if err == nil && w.failed {
		w.cfg.Log.Info("the timeline is written again", zap.String("file", w.cfg.Path), zap.Uint64("dropped", dropped))
		w.failed, w.told = false, dropped
		return
	}
	if dropped == w.told && (err == nil || w.failed) {
		return
	}
	text, last := "the timeline has gaps: more happens than can be written", &w.warnedSlow
	if err != nil {
		text, last = "the timeline cannot be written, and will have gaps", &w.warnedBroken
	}
	if !last.IsZero() && time.Since(*last) < warnEvery {
		return
	}
	*last, w.told, w.failed = time.Now(), dropped, err != nil
	w.cfg.Log.Warn(text, zap.String("file", w.cfg.Path), zap.Uint64("dropped", dropped), zap.Error(err))
}
