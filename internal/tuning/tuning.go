// Package tuning tunes the settings of a running job. It connects package autotune, which searches for good
// settings, to the engine at rank 0, which measures and applies them.
//
// The engine's loop tells a Tuner which tensors were granted, and asks in each turn whether settings change.
// Both calls take less than a microsecond and never wait. The search runs in a goroutine of its own, because
// it takes milliseconds at the end of a round. The goroutine also writes the files.
package tuning

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/autotune"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/trace"
)

// Config configures a Tuner.
type Config struct {
	// Start has the values with which the job begins. Switches that are off in it stay off.
	Start message.Tuning
	// Given reports whether the user has set the setting with the given name. Its value is never changed.
	Given func(setting string) bool
	// OverTCP is set if the job's operations use Tuning.SegmentBytes and Tuning.Allreduce.
	OverTCP bool
	// Search turns the search on. Without it, only the settings in File are applied.
	Search  bool
	Options autotune.Options
	// LogPath is the file for the table of the rounds (autotune.Tuner.WriteLog), or empty.
	LogPath string
	// File is the file with tuned settings, or empty. New reads the file. If Search is set, the file need not
	// exist, and the Tuner replaces it when the search has ended, or at Close. Then File and LogPath must not
	// be links of other users, and the files are those to which the links lead when New is called.
	File string
	Log  *zap.Logger
}

// Tuner tunes the settings of a job. Granted and Changed must be called from one goroutine.
type Tuner struct {
	cfg    Config
	search *autotune.Tuner
	notify func()
	first  int // the number of the point with which the search begins

	// The engine's loop uses these fields.
	meter meter
	point int // the number of the point that is in force

	active    atomic.Bool // whether the search goes on
	published atomic.Pointer[trace.Tuning]
	steps     chan step   // from the loop
	changes   chan change // to the loop
	stop      chan struct{}
	once      sync.Once
	ended     sync.WaitGroup
}

// step is a step of the program. point is the number of the point that was in force when the step ended. The
// Tuner numbers the points so that the search ignores steps that ended before a change was applied.
type step struct {
	point  int
	bytes  int64
	micros float64
}

type change struct {
	point  int
	values message.Tuning
}

// New returns a Tuner, which does nothing before Start. It reads cfg.File and creates cfg.LogPath. An error
// names the setting and the file.
func New(cfg Config) (*Tuner, error) {
	if err := cfg.resolve(); err != nil {
		return nil, err
	}
	t := &Tuner{cfg: cfg, steps: make(chan step, 16), changes: make(chan change, 1),
		stop: make(chan struct{})}
	start, err := cfg.load()
	if err != nil {
		return nil, err
	}
	o := cfg.Options
	if !cfg.Search {
		o = autotune.DefaultOptions()
		o.MaxRounds = 0
	}
	if t.search, err = autotune.New(cfg.space(start), o); err != nil {
		return nil, err
	}
	if start != cfg.Start {
		t.first = 1
		t.changes <- change{t.first, start}
	}
	t.active.Store(!t.search.Done())
	if cfg.Search && t.search.Done() {
		cfg.Log.Warn("HOROVOD_AUTOTUNE is on, but there is nothing to tune: every parameter was set, or " +
			"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES is less than 2")
	}
	if err := t.writeLog(); err != nil {
		return nil, err
	}
	t.publish()
	return t, nil
}

// resolve makes the paths absolute, because the program may change its working directory. If the files are
// written, it follows the links at the paths.
func (cfg *Config) resolve() error {
	folder, err := os.Getwd()
	for _, path := range []*string{&cfg.File, &cfg.LogPath} {
		if err == nil && *path != "" && !filepath.IsAbs(*path) {
			*path = folder + "/" + *path // Join would remove "name/.." even if name is a link
		}
	}
	if !cfg.Search {
		return nil
	}
	file, err := outfile.Resolve(cfg.File)
	if err != nil {
		return fmt.Errorf("HVD_AUTOTUNE_FILE is %s: %w", cfg.File, err)
	}
	log, err := outfile.Resolve(cfg.LogPath)
	if err != nil {
		return fmt.Errorf("HOROVOD_AUTOTUNE_LOG is %s: %w", cfg.LogPath, err)
	}
	cfg.File, cfg.LogPath = file, log
	return nil
}

// load returns the values in the file, or cfg.Start if there is no file.
func (cfg *Config) load() (message.Tuning, error) {
	if cfg.File == "" {
		return cfg.Start, nil
	}
	fail := func(err error) (message.Tuning, error) {
		return message.Tuning{}, fmt.Errorf("HVD_AUTOTUNE_FILE is %s: %w", cfg.File, err)
	}
	f, err := os.Open(cfg.File)
	switch {
	case errors.Is(err, fs.ErrNotExist) && cfg.Search:
		return cfg.Start, nil
	case err != nil:
		return fail(err)
	}
	defer f.Close()
	p, _, err := autotune.Load(f, cfg.space(cfg.Start))
	if err != nil {
		return fail(err)
	}
	return cfg.valuesOf(p), nil
}

// Start starts the search. After a change of settings it calls notify, which must not block.
func (t *Tuner) Start(notify func()) {
	t.notify = notify
	if t.active.Load() {
		t.ended.Go(func() {
			if t.run(); t.active.Load() {
				t.abandon()
			}
		})
	}
}

// Close ends the search and returns when its goroutine has ended. If the search has not ended before, the
// best settings so far are saved.
func (t *Tuner) Close() {
	t.once.Do(func() { close(t.stop) })
	t.ended.Wait()
}

// Granted adds a tensor that was granted at the given time. bytes is its size.
func (t *Tuner) Granted(name string, bytes int64, at time.Duration) {
	if !t.active.Load() {
		return
	}
	total, took, ended := t.meter.add(name, bytes, at)
	if !ended {
		return
	}
	select {
	case t.steps <- step{t.point, total, float64(took) / float64(time.Microsecond)}:
	default: // the search is busy, so the step is not measured
	}
}

// Changed returns the values that must hold from now on, and whether they have changed.
func (t *Tuner) Changed() (values message.Tuning, changed bool) {
	select {
	case c := <-t.changes:
		t.point = c.point
		return c.values, true
	default:
		return message.Tuning{}, false
	}
}

// Stats returns the state of the search. Any goroutine may call it. The result must not be changed.
func (t *Tuner) Stats() *trace.Tuning { return t.published.Load() }

// run searches until the search or the job ends.
func (t *Tuner) run() {
	at, rounds, number := t.search.Next(), 0, t.first
	for t.active.Load() {
		var s step
		select {
		case s = <-t.steps:
		case <-t.stop:
			return
		}
		if s.point != number || !t.search.Step(s.bytes, s.micros) {
			continue
		}
		if n := len(t.search.Rounds()); n > rounds {
			rounds = n
			if err := t.writeLog(); err != nil {
				t.cfg.Log.Warn("autotuning could not write its log", zap.Error(err))
			}
		}
		if next := t.search.Next(); !next.Equal(at) {
			at = next
			number++
			select {
			case t.changes <- change{number, t.cfg.valuesOf(at)}:
				t.notify()
			case <-t.stop:
				return
			}
		}
		if t.search.Done() {
			t.finish()
		}
		t.publish()
	}
}

// finish saves and logs the result.
func (t *Tuner) finish() {
	t.active.Store(false)
	t.keep("autotune has ended")
}

// abandon publishes the rounds, the last of which may have ended with the job. It saves and logs the best
// settings so far, unless only the first settings were measured.
func (t *Tuner) abandon() {
	t.publish()
	if len(t.search.Rounds()) > 1 {
		t.keep("autotune has not ended; these are the best settings so far")
	}
}

// keep saves the best settings and logs them with the given message.
func (t *Tuner) keep(message string) {
	if err := t.save(); err != nil {
		t.cfg.Log.Warn("the tuned settings were not saved", zap.Error(err))
	}
	t.cfg.Log.Info(message, zap.Stringer("settings", t.search.Best()),
		zap.Float64("bytes_per_us", t.search.BestScore()), zap.Int("rounds", len(t.search.Rounds())))
}

func (t *Tuner) publish() {
	s := &trace.Tuning{Active: t.active.Load(), Rounds: len(t.search.Rounds()),
		BytesPerSecond: 1e6 * t.search.BestScore()}
	s.Values = t.cfg.valuesOf(t.search.Next())
	t.published.Store(s)
}

// writeLog replaces the table of the rounds.
func (t *Tuner) writeLog() error {
	if t.cfg.LogPath == "" || !t.cfg.Search {
		return nil
	}
	f, err := outfile.Create(t.cfg.LogPath, 0o666)
	if err == nil {
		err = errors.Join(t.search.WriteLog(f), f.Close())
	}
	if err != nil {
		return fmt.Errorf("HOROVOD_AUTOTUNE_LOG is %s: %w", t.cfg.LogPath, err)
	}
	return nil
}

// save replaces the file with tuned settings. If it fails, the old file is unchanged.
func (t *Tuner) save() (err error) {
	if t.cfg.File == "" {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(t.cfg.File), ".autotune-*")
	if err != nil {
		return fmt.Errorf("HVD_AUTOTUNE_FILE is %s: %w", t.cfg.File, err)
	}
	err = errors.Join(autotune.Save(f, t.search.Best(), t.search.BestScore()), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), t.cfg.File)
	}
	if err != nil {
		return fmt.Errorf("HVD_AUTOTUNE_FILE is %s: %w", t.cfg.File, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}
