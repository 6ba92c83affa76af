package rank

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline"
)

// timelines starts and stops the timeline of a rank.
type timelines struct {
	rank *Watch

	mu     sync.Mutex
	active *timeline.Timeline // nil if no timeline is active
	path   string             // the path of the active timeline's file at rank 0
	closed bool               // whether the rank has shut down, so that nothing would end another timeline

	countMu sync.Mutex         // guards the fields below; its holder never blocks
	current *timeline.Timeline // the timeline whose dropped operations are not counted in past yet
	writes  string             // the absolute path of the file of current
	past    uint64             // number of operations that earlier timelines have dropped
}

// dropped returns how many operations the timelines of the rank have dropped in total.
func (t *timelines) dropped() uint64 {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	if t.current == nil {
		return t.past
	}
	return t.past + t.current.Dropped()
}

// file returns the absolute path of the file to which this rank writes a timeline, or "".
func (t *timelines) file() string {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	return t.writes
}

// follow makes next the current timeline, which writes a file. next was started with the process sets in
// known, and learns which sets were added or removed since.
func (t *timelines) follow(next *timeline.Timeline, file string, known map[topo.ProcessSetID][]topo.Rank) {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	t.current, t.writes = next, file
	now := t.rank.cfg.Sets() // what changes from here on, added and removed record after this
	for _, id := range slices.Sorted(maps.Keys(now)) {
		if _, ok := known[id]; !ok {
			next.Set(id, now[id])
		}
	}
	for id := range known {
		if _, ok := now[id]; !ok {
			next.RemoveSet(id)
		}
	}
}

// unfollow adds the number of operations that the current timeline has dropped to t.past. The timeline is not
// the current one any more.
func (t *timelines) unfollow() {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	t.past += t.current.Dropped()
	t.current, t.writes = nil, ""
}

// StartTimeline begins to write the operations of this rank to a file. Rank 0 writes to path, and other ranks
// write to files beside it (timeline.PathOf). If a timeline with another path is active, StartTimeline ends
// that timeline. If a timeline with the same path is active, nothing changes. After Close the error matches
// engine.ErrShutDown.
func (r *Watch) StartTimeline(path string, markCycles bool) error {
	t := &r.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.start(path, markCycles, false)
}

// StopTimeline ends the active timeline and returns when its file is complete. If no timeline is active, it
// does nothing.
func (r *Watch) StopTimeline() error {
	t := &r.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stop()
}

// closeTimeline ends the active timeline, and makes later calls of StartTimeline fail.
func (r *Watch) closeTimeline() error {
	t := &r.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	return t.stop()
}

var errNoEngine = errors.New("timeline: the engine of this rank has not started")

// closedError reports that a timeline cannot start because the rank has shut down. It matches
// engine.ErrShutDown, whose text is about operations.
type closedError struct{}

func (closedError) Error() string { return "timeline: this rank has shut down" }

func (closedError) Is(target error) bool { return target == engine.ErrShutDown }

// start begins a timeline. If fresh is set, it replaces no file.
func (t *timelines) start(path string, markCycles, fresh bool) error {
	e := t.engine()
	switch {
	case path == "":
		return errors.New("timeline: got an empty file name")
	case e == nil:
		return errNoEngine
	case t.closed:
		return closedError{}
	case t.active != nil && t.path == path:
		return nil
	}
	cfg := &t.rank.cfg
	sets := cfg.Sets()
	next, err := timeline.Start(timeline.Config{
		Path: timeline.PathOf(path, cfg.Rank), Rank: cfg.Rank, Size: cfg.Size, Host: cfg.Host,
		Epoch: cfg.Epoch,
		About: timeline.About{Version: config.Version(), Command: os.Args, Settings: cfg.Settings.Chosen(),
			Sets: sets},
		Clock: e.Clock(), MarkCycles: markCycles, MaxBytes: int64(cfg.Settings.TimelineMaxMiB) << 20,
		New: fresh, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	if err := t.stop(); err != nil {
		cfg.Log.Warn("closing the timeline failed", zap.Error(err))
	}
	e.Observer().Watch(next)
	t.active, t.path = next, path
	t.follow(next, absolute(timeline.PathOf(path, cfg.Rank)), sets)
	return nil
}

func (t *timelines) stop() error {
	if t.active == nil {
		return nil
	}
	old := t.active
	t.active, t.path = nil, ""
	e := t.engine()
	e.Observer().Unwatch(old) // so that no operation is pending in the file and ends in it later
	old.Pending(time.Since(e.Clock().Start), e.Pending())
	err := old.Close()
	t.unfollow() // after Close, which may drop operations
	return err
}

// added records a process set that was added. It does not block.
func (t *timelines) added(s *Set) {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	if t.current != nil {
		t.current.Set(s.ID, s.Ranks)
	}
}

// removed records that a process set was removed. It does not block.
func (t *timelines) removed(s *Set) {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	if t.current != nil {
		t.current.RemoveSet(s.ID)
	}
}

// pending records the operations that are pending at the given time, because the job has failed.
func (t *timelines) pending(at time.Duration, all []trace.Record) {
	t.countMu.Lock()
	defer t.countMu.Unlock()
	if t.current != nil {
		t.current.Pending(at, all)
	}
}

// write writes the buffered part of the active timeline to its file.
func (t *timelines) write() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.active == nil {
		return
	}
	if err := t.active.Write(); err != nil {
		t.rank.cfg.Log.Warn("writing the timeline failed", zap.Error(err))
	}
}

func (t *timelines) engine() *engine.Engine {
	t.rank.mu.Lock()
	defer t.rank.mu.Unlock()
	return t.rank.engine
}

// defaultPath is the path of timelines that the launcher asks for, if the settings have none.
const defaultPath = "hvd-timeline.json"

// startAsked starts a timeline because the launcher asks for it, and returns the file of this rank. question
// has a text and the path, as joblink.StartTimeline describes. No file is overwritten, because the user may
// have mistyped the path.
func (t *timelines) startAsked(question string) (file string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	cfg := &t.rank.cfg
	unique, path, _ := strings.Cut(question, " ")
	if path == "" {
		if path = cfg.Settings.Timeline; path == "" || path == config.TimelineDynamic {
			path = defaultPath
		}
		path = beforeExt(pathOfEpoch(path, cfg.Epoch), "-"+unique)
	}
	file = absolute(timeline.PathOf(path, cfg.Rank))
	switch {
	case t.active != nil && t.path == path: // this question is a repetition
		return file, nil
	case t.active != nil:
		return "", fmt.Errorf("timeline: this rank already writes one to %s: stop it first", t.file())
	}
	return file, t.start(path, cfg.Settings.TimelineMarkCycles, true)
}

// stopAsked ends the timeline because the launcher asks for it, and returns the file of this rank, or "" if
// there was no timeline.
func (t *timelines) stopAsked() (file string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	file = t.file()
	return file, t.stop()
}

// absolute returns the absolute form of a path, or the path itself if the working directory is not known.
func absolute(path string) string {
	if whole, err := filepath.Abs(path); err == nil {
		return whole
	}
	return path
}

// pathOfEpoch returns the path of the timeline of an epoch. The path differs from epoch to epoch, so that no
// epoch overwrites the timeline of an earlier one.
func pathOfEpoch(path string, epoch uint64) string {
	if epoch <= 1 {
		return path
	}
	return beforeExt(path, fmt.Sprintf(".epoch%d", epoch))
}

// beforeExt inserts text before the extension of path. If path is a device, beforeExt returns path unchanged.
func beforeExt(path, text string) string {
	if timeline.PathOf(path, 1) == path {
		return path
	}
	stem, ext := outfile.Split(path)
	return stem + text + ext
}
