package rank

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// WatchConfig has the parameters of NewWatch.
type WatchConfig struct {
	Settings  *config.Config
	Rank      int
	Size      int
	LocalRank int
	Host      string
	Epoch     uint64
	// Launcher is the link to the launcher, or nil if there is none. The caller owns it.
	Launcher joblink.Link
	// Sets returns the members of each process set that exists now, by ID. It omits the global set.
	Sets func() map[topo.ProcessSetID][]topo.Rank
	Log  *zap.Logger
}

// Watch connects a rank's engine to the flight recorder, the timeline, the metrics and the requests of the
// launcher. If one of these fails, Watch logs a warning, but no operation fails because of it.
type Watch struct {
	cfg      WatchConfig
	recorder *recorder.Recorder // nil if the flight recorder is off
	timeline timelines
	// switching is locked while the timeline is started or stopped because the launcher asks for it.
	switching sync.Mutex

	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	stalls  chan recorder.Stall // the engine's stall reports, read by forwardStalls
	watched atomic.Bool         // whether the launcher prints a report for each stall

	mu       sync.Mutex
	engine   *engine.Engine // nil before Attach
	metrics  *metrics.Server
	reported []reportedStall // the last stalls, oldest first
	// live records for a reader that asks again and again, or is nil. forget is the timer that ends it.
	live   *live.Recorder
	forget *time.Timer
}

// reportedStall is a stall with the time of its last report.
type reportedStall struct {
	recorder.Stall
	at time.Time
}

const (
	// verdictTimeout and reportTimeout are the maximum times for which a failed job delays the end of its
	// operations until the launcher has received the verdict, and this rank's dump. The launcher may be on a
	// host that this rank cannot reach any more.
	verdictTimeout = joblink.VerdictTimeout
	reportTimeout  = 500 * time.Millisecond
	// diskTimeout is how long the launcher waits until a timeline is started or stopped. It is more than
	// Timeline.Close takes at most, and less than the launcher waits for the answer.
	diskTimeout = 7 * time.Second
	// readerTime is how long operations are recorded after a reader has asked for them.
	readerTime = 10 * time.Second
	// maxStalls is the maximum number of stall reports that wait for forwardStalls. It is also the maximum
	// number of stalls in a dump.
	maxStalls = 16
)

// NewWatch returns the Watch for an engine that is about to start. The caller closes the Watch after the
// engine has ended.
func NewWatch(cfg WatchConfig) *Watch {
	r := &Watch{cfg: cfg, stalls: make(chan recorder.Stall, maxStalls)}
	if cfg.Settings.FlightRecorder {
		r.recorder = recorder.New(recorder.DefaultOperations)
	}
	r.timeline.rank = r
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Configure sets the callbacks and the recorder in the configuration of an engine.
func (r *Watch) Configure(cfg *engine.Config) {
	if r.recorder != nil {
		cfg.Recorder = r.recorder
	}
	stall := cfg.OnStall
	cfg.OnVerdict = func(p *engine.PeerError) { r.failed(p) }
	cfg.OnStallShutdown = func(s *engine.StallError) { r.failed(s) }
	cfg.StallsExplained = r.watched.Load
	cfg.OnStall = func(s *controller.Stall) {
		if stall != nil {
			stall(s)
		}
		r.stalled(s)
	}
}

// Attach starts the metrics server and the timeline for engine e, and begins to answer requests of the
// launcher. It returns an error only if a setting is invalid.
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
		if err := r.StartTimeline(pathOfEpoch(set.Timeline, r.cfg.Epoch),
			set.TimelineMarkCycles); err != nil {
			r.cfg.Log.Warn("starting the timeline failed", zap.Error(err))
		}
	}
	if r.cfg.Launcher != nil {
		r.running.Go(r.answer)
	}
	if r.cfg.Rank == 0 {
		r.running.Go(r.forwardStalls)
		r.running.Go(r.begun)
	}
	return nil
}

// Close stops everything that Attach has started. The engine must have ended before.
func (r *Watch) Close() error {
	r.cancel()
	r.running.Wait()
	err := r.closeTimeline()
	if err != nil {
		r.cfg.Log.Warn("closing the timeline failed", zap.Error(err))
	}
	r.mu.Lock()
	server := r.metrics
	if r.forget != nil {
		r.forget.Stop()
	}
	r.mu.Unlock()
	if server == nil {
		return nil
	}
	return server.Close() // mu is not locked here, because Close waits for running requests, which need mu
}

// Stats returns the counters of the rank. Before Attach they are 0.
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

// answer answers requests of the launcher until Close is called.
func (r *Watch) answer() {
	err := r.cfg.Launcher.Answer(r.ctx, func(what string) []byte {
		what, rest, _ := strings.Cut(what, " ")
		switch what {
		case joblink.Metrics:
			text, err := metrics.Text(r.Stats)
			if err != nil {
				r.cfg.Log.Warn("collecting metrics for the launcher failed", zap.Error(err))
				return nil
			}
			return text
		case joblink.Dump:
			return r.encode(r.Dump("requested by the launcher"))
		case joblink.State:
			since, _ := strconv.ParseUint(rest, 10, 64) // without a number, all steps are asked for
			return r.state(since)
		case joblink.Records:
			return r.records(rest)
		case joblink.StartTimeline:
			return r.switchTimeline(func() (string, error) { return r.timeline.startAsked(rest) })
		case joblink.StopTimeline:
			return r.switchTimeline(r.timeline.stopAsked)
		}
		return nil
	})
	if err != nil {
		r.cfg.Log.Debug("receiving requests from the launcher failed", zap.Error(err))
	}
}

// state returns the state of the rank in the encoding for the launcher, at rank 0 with the steps since the
// one with the given sequence number.
func (r *Watch) state(since uint64) []byte {
	about := r.about("requested by the launcher")
	live.Limit(&about)
	stats := r.Stats()
	s := live.NewRank(r.recorder.Dump(about), &stats)
	s.Timeline = r.timeline.file()
	r.mu.Lock()
	if r.cfg.Rank == 0 && r.engine != nil {
		s.Steps = r.engine.Observer().Steps(since)
	}
	for _, w := range r.reported {
		s.Stalls = append(s.Stalls, live.Stall{Stall: w.Cut(), Ago: time.Since(w.at)})
	}
	r.mu.Unlock()
	text, err := s.Encode()
	if err != nil {
		r.cfg.Log.Warn("encoding the state for the launcher failed", zap.Error(err))
	}
	return text
}

// records returns what the rank has recorded, in the encoding for the launcher. question has the number of
// the first entry that is wanted (joblink.Records). From the first call on the rank records, until there is
// no call for readerTime.
func (r *Watch) records(question string) []byte {
	from, asked := uint64(0), false
	for _, part := range strings.Fields(question) {
		if of, number, _ := strings.Cut(part, ":"); of == strconv.Itoa(r.cfg.Rank) {
			var err error
			from, err = strconv.ParseUint(number, 10, 64)
			asked = err == nil
		}
	}
	r.mu.Lock()
	e := r.engine
	if !asked || e == nil || r.ctx.Err() != nil {
		r.mu.Unlock()
		return nil
	}
	if r.live == nil {
		recorder := live.NewRecorder()
		r.live = recorder
		e.Observer().Watch(recorder)
		r.forget = time.AfterFunc(readerTime, func() { r.endRecording(e, recorder) })
	}
	r.forget.Reset(readerTime)
	recorded := r.live.Since(from)
	r.mu.Unlock()
	recorded.Rank, recorded.Size, recorded.Epoch = r.cfg.Rank, r.cfg.Size, r.cfg.Epoch
	recorded.Host, recorded.Clock = r.cfg.Host, e.Clock()
	for id, ranks := range r.cfg.Sets() {
		recorded.Sets = append(recorded.Sets, live.Set{ID: id, Ranks: ranks})
	}
	return recorded.Encode()
}

// endRecording ends the recording into a recorder. Its timer may call this again while a later recorder is in
// use, because records may have reset the timer while the first call waited for mu.
func (r *Watch) endRecording(e *engine.Engine, recorder *live.Recorder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live == recorder {
		r.live = nil
	}
	e.Observer().Unwatch(recorder)
}

// switchTimeline starts or stops the timeline by the function do, and returns the answer to the launcher. If
// the disk does not answer, the rank answers nevertheless, and goes on to answer other questions.
func (r *Watch) switchTimeline(do func() (file string, err error)) []byte {
	if !r.switching.TryLock() {
		return r.switched("", errors.New("timeline: the disk has not answered to an earlier request"))
	}
	answer := make(chan []byte, 1)
	r.running.Go(func() {
		text := r.switched(do())
		r.switching.Unlock()
		answer <- text
	})
	select {
	case text := <-answer:
		return text
	case <-time.After(diskTimeout):
		return r.switched("", fmt.Errorf("timeline: the disk has not answered for %v", diskTimeout))
	case <-r.ctx.Done():
		return nil
	}
}

// switched returns the answer to a question about the timeline, in the encoding for the launcher.
func (r *Watch) switched(file string, err error) []byte {
	s := live.Switched{File: file}
	if err != nil {
		s.Error = err.Error()
	}
	text, err := json.Marshal(&s)
	if err != nil {
		r.cfg.Log.Warn("encoding an answer for the launcher failed", zap.Error(err))
	}
	return text
}

// Dump returns the operations for which the rank waits. If the flight recorder is on, it also returns the
// rank's last operations. why is the reason for the dump.
func (r *Watch) Dump(why string) *analysis.Snapshot {
	about := r.about(why)
	r.mu.Lock()
	for _, s := range r.reported {
		// While a tensor waits, the engine repeats its report within this time. So a tensor with an older
		// report does not wait anymore.
		if time.Since(s.at) < 2*r.cfg.Settings.StallWarning {
			about.Stalls = append(about.Stalls, s.Text)
		}
	}
	r.mu.Unlock()
	return r.recorder.Dump(about)
}

// about returns what a dump has in addition to the recorded operations, without the stalls.
func (r *Watch) about(why string) recorder.About {
	r.mu.Lock()
	e := r.engine
	r.mu.Unlock()
	about := recorder.About{
		Rank: r.cfg.Rank, Size: r.cfg.Size, Host: r.cfg.Host, PID: os.Getpid(), Epoch: r.cfg.Epoch,
		Version: config.Version(),
		Why:     why, Now: time.Now(), Sets: r.cfg.Sets(),
	}
	if e != nil {
		about.Clock, about.Pending = e.Clock(), e.Pending()
		about.At = time.Since(about.Clock.Start)
		about.Offset, _ = e.Observer().Offset()
	}
	return about
}

// encode returns a dump in the encoding for the launcher. If the encoding fails, it returns nil.
func (r *Watch) encode(dump *analysis.Snapshot) []byte {
	text, err := recorder.Encode(dump, recorder.OperationsOf(r.cfg.Size))
	if err != nil {
		r.cfg.Log.Warn("encoding the dump of the flight recorder failed", zap.Error(err))
		return nil
	}
	return text
}

// writeDump writes a dump to the folder that HVD_DUMP_DIR names. If HVD_DUMP_DIR is not set, it does nothing.
func (r *Watch) writeDump(dump *analysis.Snapshot) {
	dir := r.cfg.Settings.DumpDir
	if dir == "" {
		return
	}
	path, err := recorder.WriteFile(dir, dump)
	if err != nil {
		r.cfg.Log.Warn("writing the dump of the flight recorder failed", zap.Error(err))
		return
	}
	r.cfg.Log.Warn("wrote a dump of the flight recorder", zap.String("file", path))
}

// logState logs what the rank was doing when it made a dump. The launcher's report says the same.
func (r *Watch) logState(dump *analysis.Snapshot) {
	for _, rank := range analysis.Analyse([]*analysis.Snapshot{dump}, r.cfg.Size, nil).Ranks {
		r.cfg.Log.Warn("what this rank did when the job failed", zap.String("state", rank.Describe()))
	}
}

// failed reports a verdict to the launcher and at the same time sends a dump to the launcher. If this fails,
// for example because there is no launcher, it logs the state of the rank and writes the dump to a file. It
// also writes the timeline. It is called before the operations of this rank end, because the program may exit
// when they end. It returns within a bounded time.
func (r *Watch) failed(failure error) {
	why := "the job failed: " + failure.Error()
	ctx, cancel := context.WithTimeout(r.ctx, reportTimeout)
	defer cancel()
	var verdict sync.WaitGroup
	if p, ok := errors.AsType[*engine.PeerError](failure); ok {
		verdict.Go(func() { reportVerdict(r.ctx, r.cfg.Launcher, joblink.Verdict{Epoch: r.cfg.Epoch}, p) })
	}
	dump := r.Dump(why)
	r.timeline.pending(dump.At, dump.Pending)
	sent := r.sendReport(ctx, joblink.Failure, r.encode(dump))
	verdict.Wait()
	if !sent {
		r.logState(dump)
	}
	written := make(chan struct{})
	r.running.Go(func() {
		defer close(written)
		if !sent {
			r.writeDump(dump)
		}
		r.timeline.write()
	})
	select {
	case <-written:
	case <-time.After(reportTimeout):
	}
}

// begun tells the launcher that all ranks have joined this epoch. Close waits for it, because the launcher
// must also know of an epoch that the ranks leave at once.
func (r *Watch) begun() {
	ctx, cancel := context.WithTimeout(context.Background(), verdictTimeout)
	defer cancel()
	r.sendReport(ctx, joblink.Begun, strconv.AppendUint(nil, r.cfg.Epoch, 10))
}

// sendReport sends a report to the launcher, which writes the report to a file. It returns true if the
// launcher has received the report.
func (r *Watch) sendReport(ctx context.Context, what string, body []byte) bool {
	if r.cfg.Launcher == nil || body == nil {
		return false
	}
	err := r.cfg.Launcher.Report(ctx, what, body)
	if err != nil && !errors.Is(err, joblink.ErrNoLauncher) {
		r.cfg.Log.Debug("sending a report to the launcher failed", zap.String("report", what), zap.Error(err))
	}
	return err == nil
}

// stalled queues a stall report. It does not block, because the loop of the engine calls it.
func (r *Watch) stalled(s *controller.Stall) {
	select {
	case r.stalls <- recorder.Stall{Set: s.Set, Name: s.Name, Text: s.String()}:
	default: // drop the report here; the engine has logged it
	}
}

// forwardStalls sends stall reports to the launcher. The launcher then requests a dump from every rank.
func (r *Watch) forwardStalls() {
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
		r.reported = slices.DeleteFunc(r.reported, func(w reportedStall) bool {
			return w.Set == stall.Set &&
				w.Name == stall.Name
		})
		if len(r.reported) == maxStalls {
			r.reported = slices.Delete(r.reported, 0, 1)
		}
		r.reported = append(r.reported, reportedStall{stall, time.Now()})
		r.mu.Unlock()
		text, err := recorder.EncodeStall(stall)
		if err != nil {
			r.cfg.Log.Warn("encoding a stall report failed", zap.Error(err))
		}
		ctx, cancel := context.WithTimeout(r.ctx, reportTimeout)
		if !r.sendReport(ctx, joblink.Stall, text) {
			r.writeDump(r.Dump("stalled: " + stall.Text))
		}
		cancel()
	}
}

// reportVerdict reports to the launcher which ranks failed. The launcher then does not blame ranks that ended
// only because of this failure. v is the verdict without the ranks and the reason. launcher may be nil. It
// returns within verdictTimeout.
func reportVerdict(ctx context.Context, launcher joblink.Link, v joblink.Verdict, p *engine.PeerError) {
	if launcher == nil {
		return
	}
	v.Reason = p.Reason
	for _, failed := range p.Ranks {
		v.Ranks = append(v.Ranks, topo.Rank(failed))
	}
	ctx, cancel := context.WithTimeout(ctx, verdictTimeout)
	defer cancel()
	// Ignore the error, because the program receives the verdict as the error of its operations.
	_ = launcher.ReportVerdict(ctx, v)
}
