package timeline

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// chunk is the number of bytes of text that are encoded and written at once.
	chunk = 256 << 10
	// warnEvery is the minimum time between two warnings of the same kind.
	warnEvery = time.Minute
)

// writer writes records to files. Each step can be repeated after it failed: unfinished work stays in the
// buffers, and nothing is written twice. A writer is not safe for concurrent use.
type writer struct {
	cfg     Config
	dropped *atomic.Uint64
	sink    sink
	enc     encoder
	format  formatter

	reading *batch // the batch being written
	// at is the index of the first entry that is not completely formatted. inside is the index of the first
	// record of this entry that is not formatted.
	at, inside int
	pending    []byte // text that is not encoded yet
	out        []byte // encoded bytes that are not written yet
	unwritten  int    // the number of entries that are completely formatted, but not completely written
	tail       []byte

	segment int
	stale   bool  // set if a new file must be begun before the next write
	body    int64 // the number of bytes written to the segment, including the header
	header  int64 // the size of the header in bytes
	limit   int64 // the limit for the bytes of a segment; 0 means no limit

	// warnedSlow and warnedBroken are the times of the last warnings about slow writes and about errors.
	// reported is the number of drops that have been logged. failed is set from a logged error until a write
	// succeeds.
	warnedSlow, warnedBroken time.Time
	reported                 uint64
	failed                   bool
}

// newWriter returns a writer for the file that cfg names. The method open opens the file.
func newWriter(cfg Config, k knobs, dropped *atomic.Uint64) *writer {
	w := &writer{cfg: cfg, dropped: dropped, enc: plain{}, reading: newBatch(k.tensors), stale: true}
	if strings.HasSuffix(cfg.Path, ".gz") {
		w.enc = &gzipped{}
	}
	w.format.cfg = &w.cfg
	for _, id := range slices.Sorted(maps.Keys(cfg.About.Sets)) {
		w.format.sets = append(w.format.sets, set{id, cfg.About.Sets[id]})
	}
	if cfg.Rank == 0 {
		// Rank 0's clock is the reference for the other ranks, so its offset is always 0.
		w.format.offset = &trace.Offset{Job: cfg.Clock.Job()}
	}
	return w
}

// open opens the sink for the path, a stream or regular files, and begins the file.
func (w *writer) open() error {
	// The path becomes absolute, because the program may change its working directory. If the path is a
	// symbolic link, the file that it points to is replaced, not the link.
	if whole, err := filepath.Abs(w.cfg.Path); err == nil && !outfile.Device(w.cfg.Path) {
		w.cfg.Path = whole
	}
	path, err := outfile.Resolve(w.cfg.Path)
	if err != nil {
		return err
	}
	w.cfg.Path = path
	at, err := os.Stat(path)
	switch {
	case err == nil && at.IsDir():
		return fmt.Errorf("%s is a folder, want a file", w.cfg.Path)
	case err == nil && (!at.Mode().IsRegular() || outfile.Device(path)):
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
	if err := w.begin(); err != nil {
		return errors.Join(err, w.sink.close())
	}
	return nil
}

// openDisk makes a sink for regular files.
func (w *writer) openDisk() error {
	d, err := newDisk(w.cfg.Path, w.cfg.MaxBytes, w.cfg.New)
	if err != nil {
		return err
	}
	w.sink, w.limit = d, d.limit
	return nil
}

// begin starts a new segment if w.stale is set.
func (w *writer) begin() error {
	if !w.stale {
		return nil
	}
	w.enc.reset()
	first, _ := w.enc.encode(nil, w.format.header(nil, w.segment+1, w.dropped.Load()))
	whole := w.enc.tail(first)
	if err := w.sink.begin(w.segment, whole, len(whole)-len(first)); err != nil {
		return w.lose(err)
	}
	w.segment++
	w.stale, w.body, w.header = false, int64(len(first)), int64(len(first))
	return nil
}

// lose returns err. If err says that the file is lost, lose also makes the writer begin a new file with the
// records that are not in the lost file.
func (w *writer) lose(err error) error {
	if errors.Is(err, errLost) {
		w.at, w.inside = w.at-w.unwritten, 0
		w.unwritten, w.pending, w.out, w.stale = 0, w.pending[:0], w.out[:0], true
		err = errors.Join(err, w.sink.close())
	}
	return err
}

// flush writes the entries of the batch and empties the batch.
func (w *writer) flush() error {
	if err := w.write(w.reading.entries); err != nil {
		return err
	}
	w.at = 0
	w.reading.reset()
	return nil
}

// write formats the entries from index w.at on and writes them to the sink. After an error the next call
// continues with the entry that failed.
func (w *writer) write(entries []entry) error {
	for w.at < len(entries) {
		e := &entries[w.at]
		mark := func(dst []byte) []byte {
			switch {
			case e.offset != nil:
				return w.format.clock(dst, e.offset)
			case e.tuning != nil:
				return w.format.tuned(dst, e.at, e.tuning)
			case e.span.End > 0:
				return w.format.span(dst, &e.span)
			case e.rare != nil:
				return e.rare(&w.format, dst)
			case e.step:
				return w.format.step(dst, e.at, e.number)
			}
			return w.format.cycle(dst, e.at)
		}
		if len(e.Records) == 0 {
			if err := w.place(mark); err != nil {
				return err
			}
		}
		for ; w.inside < len(e.Records); w.inside++ {
			if stoodIn(&e.Records[w.inside]) {
				continue
			}
			if err := w.place(func(dst []byte) []byte {
				return w.format.tensor(dst, e, w.inside)
			}); err != nil {
				return err
			}
		}
		w.at++
		w.inside = 0
		w.unwritten++
	}
	return w.push()
}

// place calls format to get a text, and appends the text to the segment. If the text does not fit, place
// begins the next segment. If place fails, the text is not used. A text that is too large for any segment is
// dropped and counted.
func (w *writer) place(format func([]byte) []byte) error {
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
		// The earlier text must be written in any case, and may compress better than the function fits
		// assumes. So place writes the earlier text and tries the new text once more, before it begins the
		// next segment.
		text := w.pending[before:]
		w.pending = w.pending[:before]
		if err := w.push(); err != nil {
			w.format.undo()
			return err
		}
		w.pending = append(w.pending, text...)
		if w.fits() {
			return nil
		}
		w.pending = w.pending[:0]
		w.format.undo()
		if w.body == w.header {
			w.dropped.Add(1)
			return nil
		}
		w.stale = true
	}
}

// fits reports whether the segment would stay within its limit with all pending text and bytes.
func (w *writer) fits() bool {
	return w.limit <= 0 || w.body+int64(len(w.out))+w.enc.most(len(w.pending)) <= w.limit
}

// push encodes all pending text and writes it to the sink.
func (w *writer) push() error {
	for len(w.out)+len(w.pending) > 0 {
		if len(w.out) == 0 {
			w.out, w.pending = w.enc.encode(w.out, w.pending)
		}
		w.tail = w.enc.tail(w.tail[:0])
		n, err := w.sink.write(w.out, w.tail)
		w.body += int64(n)
		w.out = w.out[:copy(w.out, w.out[n:])]
		if err != nil {
			return w.lose(err)
		}
	}
	w.unwritten = 0
	return nil
}

// close ends the file. err is the result of the last flush. left is the number of entries in the other batch
// that were not written.
func (w *writer) close(err error, left int) error {
	if err == nil {
		err = w.place(func(dst []byte) []byte { return w.format.end(dst, w.dropped.Load()) })
	}
	if err == nil {
		err = w.push()
	}
	if err == nil {
		w.tail = w.enc.tail(w.tail[:0])
		err = w.sink.end(w.tail)
	}
	err = errors.Join(err, w.sink.close())
	if err == nil {
		return nil
	}
	lost := left + w.unwritten + len(w.reading.entries) - w.at
	w.dropped.Add(uint64(lost))
	return fmt.Errorf("timeline: rank %d: close %s: %d operations were not written: %w", w.cfg.Rank,
		w.cfg.Path, lost, err)
}

// report logs errors, new drops, and recovery after an error. It logs at most one warning of each kind per
// period of warnEvery.
func (w *writer) report(err error) {
	dropped := w.dropped.Load()
	if err == nil && w.failed {
		w.cfg.Log.Info("writing the timeline works again", zap.String("file", w.cfg.Path),
			zap.Uint64("dropped", dropped))
		w.failed, w.reported = false, dropped
		return
	}
	if dropped == w.reported && (err == nil || w.failed) {
		return
	}
	text, last := "operations are dropped from the timeline: the disk is too slow for the rate of operations",
		&w.warnedSlow
	if err != nil {
		text, last = "cannot write the timeline: later operations may be dropped from it", &w.warnedBroken
	}
	if !last.IsZero() && time.Since(*last) < warnEvery {
		return
	}
	*last, w.reported, w.failed = time.Now(), dropped, err != nil
	w.cfg.Log.Warn(text, zap.String("file", w.cfg.Path), zap.Uint64("dropped", dropped), zap.Error(err))
}
