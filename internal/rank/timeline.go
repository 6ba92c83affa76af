package rank

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/timeline"
)

// timelines is the timeline of a rank, which is started and stopped.
type timelines struct {
	rank *Watch

	mu      sync.Mutex
	now     *timeline.Timeline // nil while there is none
	path    string             // of it, as rank 0 has it
	started int                // by signals

	counting sync.Mutex         // of what follows; nobody waits while he has it
	current  *timeline.Timeline // now
	past     uint64             // operations that earlier ones have dropped
}

// dropped returns how many operations are in no timeline that should be.
func (t *timelines) dropped() uint64 {
	t.counting.Lock()
	defer t.counting.Unlock()
	if t.current == nil {
		return t.past
	}
	return t.past + t.current.Dropped()
}

// count has dropped follow another timeline, which may be nil.
func (t *timelines) count(next *timeline.Timeline) {
	t.counting.Lock()
	defer t.counting.Unlock()
	if t.current != nil {
		t.past += t.current.Dropped()
	}
	t.current = next
}

// StartTimeline writes what this rank does from now on to a file: rank 0 to path, others beside it (timeline.PathOf). A timeline
// that goes to another path ends; if it goes to this one already nothing changes.
func (r *Watch) StartTimeline(path string, markCycles bool) error {
	t := &r.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.start(path, markCycles)
}

// StopTimeline ends the timeline, and returns when its file is complete. Without one it does nothing.
func (r *Watch) StopTimeline() error {
	t := &r.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stop()
}

var errNoEngine = errors.New("timeline: the engine of this rank has not started")

func (t *timelines) start(path string, markCycles bool) error {
	e := t.engine()
	switch {
	case path == "":
		return errors.New("timeline: got an empty file name")
	case e == nil:
		return errNoEngine
	case t.now != nil && t.path == path:
		return nil
	}
	cfg := &t.rank.cfg
	next, err := timeline.Start(timeline.Config{
		Path: timeline.PathOf(path, cfg.Rank), Rank: cfg.Rank, Size: cfg.Size, Host: cfg.Host, Epoch: cfg.Epoch,
		Clock: e.Clock(), MarkCycles: markCycles, MaxBytes: int64(cfg.Settings.TimelineMaxMiB) << 20, Last: cfg.Settings.TimelineLast,
		Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	if err := t.stop(); err != nil {
		cfg.Log.Warn("closing the timeline failed", zap.Error(err))
	}
	e.Watch(next)
	t.now, t.path = next, path
	t.count(next)
	return nil
}

func (t *timelines) stop() error {
	if t.now == nil {
		return nil
	}
	old := t.now
	t.now, t.path = nil, ""
	t.engine().Watch(nil)
	err := old.Close()
	t.count(nil) // with what was dropped in the end
	return err
}

// write brings what the timeline has to the disk.
func (t *timelines) write() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now == nil {
		return
	}
	if err := t.now.Write(); err != nil {
		t.rank.cfg.Log.Warn("writing the timeline failed", zap.Error(err))
	}
}

func (t *timelines) engine() *engine.Engine {
	t.rank.mu.Lock()
	defer t.rank.mu.Unlock()
	return t.rank.engine
}

// pathOfEpoch returns where the timeline of an epoch goes: not to where that of the one before is, which may be what somebody wants to see.
func pathOfEpoch(path string, epoch uint64) string {
	if epoch <= 1 {
		return path
	}
	return beforeExt(path, fmt.Sprintf(".epoch%d", epoch))
}

// beforeExt puts text before the extension of a path. A device is the same for all.
func beforeExt(path, text string) string {
	if timeline.PathOf(path, 1) == path {
		return path
	}
	ext := filepath.Ext(strings.TrimSuffix(path, ".gz"))
	if strings.HasSuffix(path, ".gz") {
		ext += ".gz"
	}
	return strings.TrimSuffix(path, ext) + text + ext
}

var signals = map[string]os.Signal{"SIGUSR1": unix.SIGUSR1, "SIGUSR2": unix.SIGUSR2}

// followSignal starts and stops the timeline as the process gets the signal for it. A signal that comes after
// followSignal has returned is not lost.
func (t *timelines) followSignal() {
	got := make(chan os.Signal, 1)
	signal.Notify(got, signals[t.rank.cfg.Settings.TimelineSignal])
	t.rank.running.Go(func() {
		defer signal.Stop(got)
		t.toggleAt(got)
	})
}

func (t *timelines) toggleAt(got <-chan os.Signal) {
	for {
		select {
		case <-t.rank.ctx.Done():
			return
		case <-got:
		}
		if err := t.toggle(); err != nil {
			t.rank.cfg.Log.Warn("starting or stopping the timeline by a signal failed", zap.Error(err))
		}
	}
}

// toggle stops the timeline, or starts it in a file that no signal has started it in before.
func (t *timelines) toggle() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now != nil {
		return t.stop()
	}
	set := t.rank.cfg.Settings
	path := set.Timeline
	if path == "" || path == config.TimelineDynamic {
		path = "hvd-timeline.json"
	}
	taken := path == set.Timeline // by the one that was there from the start
	path = pathOfEpoch(path, t.rank.cfg.Epoch)
	if t.started++; t.started > 1 || taken {
		path = beforeExt(path, fmt.Sprintf("-%d", t.started))
	}
	t.rank.cfg.Log.Info("a signal starts the timeline", zap.String("file", path))
	return t.start(path, set.TimelineMarkCycles)
}
