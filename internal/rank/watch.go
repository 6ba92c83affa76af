package rank

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// WatchConfig says which rank is watched.
type WatchConfig struct {
	Settings  *config.Config
	Rank      int
	Size      int
	LocalRank int
	Host      string
	Epoch     uint64
	// Launcher is the link to the launcher; nil if there is none. It stays the caller's.
	Launcher joblink.Link
	// Sets are the members of the process sets that there are at the moment, other than the global one.
	Sets func() map[topo.ProcessSetID][]topo.Rank
	Log  *zap.Logger
}

// Watch connects a rank's engine to the flight recorder, the timeline, the metrics and the launcher's questions. A failure in one of
// them costs a warning, never an operation.
type Watch struct {
	cfg      WatchConfig
	recorder *recorder.Recorder // nil if it is off
	timeline timelines

	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	stalls  chan recorder.Stall // the engine's reports that are to be passed on
	watched atomic.Bool         // the launcher makes a report of them

	mu      sync.Mutex
	engine  *engine.Engine // nil before Attach
	metrics *metrics.Server
	waiting []waiting // the last stalls
}

// waiting is a stall that was reported, and when it was last.
type waiting struct {
	recorder.Stall
	at time.Time
}

const (
	// reportTimeout is how long the answers of a failed job wait for the launcher to have what this rank knows.
	reportTimeout = 500 * time.Millisecond
	// maxStalls is how many reports of the engine may wait to be passed on, and how many a dump has.
	maxStalls = 16
)

// NewWatch makes what an engine is to be started with. The caller closes it when the engine has ended.
func NewWatch(cfg WatchConfig) *Watch {
	r := &Watch{cfg: cfg, stalls: make(chan recorder.Stall, maxStalls)}
	if cfg.Settings.FlightRecorder {
		r.recorder = recorder.New(recorder.DefaultOperations)
	}
	r.timeline.rank = r
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Configure tells an engine that is about to be started of r.
func (r *Watch) Configure(cfg *engine.Config) {
	if r.recorder != nil {
		cfg.Recorder = r.recorder
	}
	verdict, stall := cfg.OnVerdict, cfg.OnStall
	cfg.OnVerdict = func(p *engine.PeerError) {
		if verdict != nil {
			verdict(p)
		}
		r.failed(p)
	}
	cfg.OnStallShutdown = func(s *engine.StallError) { r.failed(s) }
	cfg.StallsExplained = r.watched.Load
	cfg.OnStall = func(s *controller.Stall) {
		if stall != nil {
			stall(s)
		}
		r.stalled(s)
	}
}

// Attach begins to show what e does. An error is one of the settings.
func (r *Watch) Attach(e *engine.Engine) error {
	r.mu.Lock()
	r.engine = e
	r.mu.Unlock()
	set := r.cfg.Settings
	if set.MetricsAddr != "" {
		if err := r.serveMetrics(set.MetricsAddr); err != nil {
			return err
		}
	}
	if set.Timeline != "" && set.Timeline != config.TimelineDynamic {
		if err := r.StartTimeline(pathOfEpoch(set.Timeline, r.cfg.Epoch), set.TimelineMarkCycles); err != nil {
			r.cfg.Log.Warn("starting the timeline failed", zap.Error(err))
		}
	}
	if set.TimelineSignal != "" {
		r.timeline.followSignal()
	}
	if r.cfg.Launcher != nil {
		r.running.Go(r.answer)
	}
	if r.cfg.Rank == 0 {
		r.running.Go(r.passStallsOn)
	}
	return nil
}

// Close ends all of it. The engine must have ended.
func (r *Watch) Close() error {
	r.cancel()
	r.running.Wait()
	err := r.StopTimeline()
	if err != nil {
		r.cfg.Log.Warn("closing the timeline failed", zap.Error(err))
	}
	r.mu.Lock()
	server := r.metrics
	r.mu.Unlock()
	if server == nil {
		return nil
	}
	return server.Close() // it waits for answers, which want the lock
}

// Stats returns the counters of the rank. They are 0 before Attach.
func (r *Watch) Stats() trace.Stats {
	r.mu.Lock()
	e := r.engine
	r.mu.Unlock()
	var s trace.Stats
	if e != nil {
		s = e.Stats()
	}
	s.TimelineDropped = r.timeline.dropped()
	s.Rank, s.Size, s.Host, s.Epoch = r.cfg.Rank, r.cfg.Size, r.cfg.Host, r.cfg.Epoch
	return s
}

func (r *Watch) serveMetrics(addr string) error {
	at, err := metrics.Address(addr, r.cfg.LocalRank)
	if err != nil {
		return fmt.Errorf("HVD_METRICS_ADDR: %w", err)
	}
	server, err := metrics.Serve(at, metrics.Handler(r.Stats), r.cfg.Log)
	if err != nil {
		r.cfg.Log.Warn("serving metrics failed (HVD_METRICS_ADDR)", zap.Error(err))
		return nil
	}
	r.mu.Lock()
	r.metrics = server
	r.mu.Unlock()
	r.cfg.Log.Info("serving metrics", zap.String("addr", server.Addr()))
	return nil
}

// answer answers what the launcher asks.
func (r *Watch) answer() {
	err := r.cfg.Launcher.Answer(r.ctx, func(what string) []byte {
		switch what {
		case joblink.Metrics:
			text, err := metrics.Text(r.Stats)
			if err != nil {
				r.cfg.Log.Warn("collecting metrics for the launcher failed", zap.Error(err))
				return nil
			}
			return text
		case joblink.Dump:
			return r.encodedDump("asked for")
		}
		return nil
	})
	if err != nil {
		r.cfg.Log.Debug("receiving requests of the launcher failed", zap.Error(err))
	}
}

// Dump returns what the rank waits for, and what the flight recorder has if it is on.
func (r *Watch) Dump(why string) *analysis.Snapshot {
	r.mu.Lock()
	e := r.engine
	var stalls []string
	for _, s := range r.waiting {
		// What still waits is reported again before that.
		if time.Since(s.at) < 2*r.cfg.Settings.StallWarning {
			stalls = append(stalls, s.Text)
		}
	}
	r.mu.Unlock()
	about := recorder.About{
		Rank: r.cfg.Rank, Size: r.cfg.Size, Host: r.cfg.Host, PID: os.Getpid(), Epoch: r.cfg.Epoch, Version: config.Version(),
		Why: why, Now: time.Now(), Sets: r.cfg.Sets(), Stalls: stalls,
	}
	if e != nil {
		about.Clock, about.Pending = e.Clock(), e.Pending()
		about.At = time.Since(about.Clock.Start)
		about.Offset, _ = e.Offset()
	}
	return r.recorder.Dump(about)
}

// encodedDump is Dump for the launcher; nil if that cannot be had.
func (r *Watch) encodedDump(why string) []byte {
	text, err := recorder.Encode(r.Dump(why), recorder.OperationsOf(r.cfg.Size))
	if err != nil {
		r.cfg.Log.Warn("encoding the dump of the flight recorder failed", zap.Error(err))
		return nil
	}
	return text
}

// leave writes a dump to the folder for them, if there is one.
func (r *Watch) leave(why string) {
	dir := r.cfg.Settings.DumpDir
	if dir == "" {
		return
	}
	path, err := recorder.WriteFile(dir, r.Dump(why))
	if err != nil {
		r.cfg.Log.Warn("writing the dump of the flight recorder failed", zap.Error(err))
		return
	}
	r.cfg.Log.Warn("wrote a dump of the flight recorder", zap.String("file", path))
}

// failed leaves what this rank knows to people, before its operations are answered: then the program may exit. It bounds how long they
// wait.
func (r *Watch) failed(failure error) {
	why := "the job failed: " + failure.Error()
	told := r.volunteer(joblink.Failure, r.encodedDump(why))
	written := make(chan struct{})
	r.running.Go(func() {
		defer close(written)
		if !told {
			r.leave(why)
		}
		r.timeline.write()
	})
	select {
	case <-written:
	case <-time.After(reportTimeout):
	}
}

// volunteer tells the launcher something, and reports whether it has heard. It then writes the files.
func (r *Watch) volunteer(what string, body []byte) bool {
	if r.cfg.Launcher == nil || body == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(r.ctx, reportTimeout)
	defer cancel()
	err := r.cfg.Launcher.Report(ctx, what, body)
	if err != nil && !errors.Is(err, joblink.ErrNoLauncher) {
		r.cfg.Log.Debug("sending a report to the launcher failed", zap.String("report", what), zap.Error(err))
	}
	return err == nil
}

// stalled takes a report of the engine's loop, which it does not delay.
func (r *Watch) stalled(s *controller.Stall) {
	select {
	case r.stalls <- recorder.Stall{Set: uint32(s.Set), Name: s.Name, Text: s.String()}:
	default: // it was logged
	}
}

// passStallsOn tells the launcher of stalls, which then asks all ranks what they wait for.
func (r *Watch) passStallsOn() {
	if r.cfg.Launcher != nil {
		watched, err := r.cfg.Launcher.HasListener(r.ctx)
		r.watched.Store(watched && err == nil)
	}
	for {
		var stall recorder.Stall
		select {
		case <-r.ctx.Done():
			return
		case stall = <-r.stalls:
		}
		r.mu.Lock()
		r.waiting = slices.DeleteFunc(r.waiting, func(w waiting) bool { return w.Set == stall.Set && w.Name == stall.Name })
		if len(r.waiting) == maxStalls {
			r.waiting = slices.Delete(r.waiting, 0, 1)
		}
		r.waiting = append(r.waiting, waiting{stall, time.Now()})
		r.mu.Unlock()
		text, err := recorder.EncodeStall(stall)
		if err != nil {
			r.cfg.Log.Warn("encoding a stall report failed", zap.Error(err))
		}
		if !r.volunteer(joblink.Stall, text) {
			r.leave("stalled: " + stall.Text)
		}
	}
}
