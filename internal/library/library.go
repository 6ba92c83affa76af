// Package library has what libgohvd, the library for programs in other languages than Go, does. cmd/libgohvd
// converts its types to those of C.
//
// A process has one Library, and that has at most one rank and one node of a parameter server at a time. The
// program refers to what is pending by a Handle.
package library

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/ops/nccl"
)

// maxStalls is the maximum number of stall reports that are kept for the program.
const maxStalls = 1024

// Library is the state of this process. Its methods are safe for concurrent use.
type Library struct {
	memory     Memory
	handles    table
	operations operations
	calls      freeCalls
	// running is the rank of this process in its job. It is nil outside of a job.
	running atomic.Pointer[rank.Rank]
	// newcomer is set, and running is nil, from an Init in an elastic job that trains already until
	// JoinTraining makes this process a rank.
	newcomer atomic.Pointer[newcomer]
	joining  joining
	// changing is held by a call that joins or leaves a job.
	changing sync.Mutex
	// Only the holder of changing may use met and last.
	met  *bootstrap.Meeting
	last uint64 // epoch of the last job of this process

	// made is the last id of NewUniqueID. It is guarded by madeMu.
	made     uniqueID
	madeMu   sync.Mutex
	lateTime time.Duration // how long it is served after the Init by it has failed

	nodeChanging sync.Mutex // held by a call that starts or ends the node
	node         atomic.Pointer[Node]
	nodeSettings map[string]string // with which node was started; guarded by nodeChanging

	sidecars sidecars

	training training

	stallsMu sync.Mutex
	stalls   [][]byte
}

// Memory provides memory for results for which an Op has none. Any goroutine may call its functions.
type Memory struct {
	Alloc func(numBytes int) ([]byte, error)
	Free  func([]byte)
}

// New returns the Library of this process. near returns the folders in which hvdd is looked for before PATH.
func New(near func() []string, memory Memory) *Library {
	return &Library{memory: memory, sidecars: sidecars{near: near}, lateTime: 30 * time.Second}
}

// start runs f in a goroutine. f may set the result.
func (l *Library) start(f func(into *Result) error) Handle {
	t := new(task)
	h := l.handles.add(t)
	go func() { t.complete(f(&t.result)) }()
	return h
}

// InitOptions are the options of Init. The keys of Settings are the names of settings.
type InitOptions struct {
	Settings map[string]string
	Sets     [][]int
	MPIComm  *int32
}

func (o *InitOptions) rank() rank.Options {
	return rank.Options{Settings: o.Settings, Sets: o.Sets, MPIComm: o.MPIComm}
}

// Init joins this process to its job, and waits until all ranks have joined. In a job it does nothing. In an
// elastic job that trains already, it does not wait, and JoinTraining makes this process a rank.
func (l *Library) Init(o InitOptions) Handle {
	return l.start(func(*Result) (err error) {
		l.changing.Lock()
		defer l.changing.Unlock()
		if l.Rank() != nil {
			return nil
		}
		ctx, end := l.joining.begin()
		defer end()
		c, err := l.sidecars.open("init", o.Settings)
		if err != nil {
			return err
		}
		if c != nil {
			r, err := l.sidecars.join(ctx, c, &o)
			if err == nil {
				l.running.Store(r)
			}
			return err
		}
		defer func() {
			if err != nil {
				l.endID(o.Settings["HVD_UNIQUE_ID"])
			}
		}()
		err = l.join(ctx, &o, true)
		if errors.Is(err, rank.ErrBuilding) {
			return l.expect(&o)
		}
		return err
	})
}

// joining is the Init in progress.
type joining struct {
	mu       sync.Mutex
	cancel   context.CancelFunc // nil without an Init in progress
	stopping int                // failed Shutdowns that have not returned yet
}

// begin returns the context of an Init that begins, and a function that the Init calls at its end. The caller
// holds Library.changing, so a failed Shutdown in progress waits for this Init, and cancels it.
func (j *joining) begin() (ctx context.Context, end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	j.mu.Lock()
	defer j.mu.Unlock()
	j.cancel = cancel
	if j.stopping > 0 {
		cancel()
	}
	return ctx, func() {
		cancel()
		j.mu.Lock()
		defer j.mu.Unlock()
		j.cancel = nil
	}
}

// stop cancels the Init in progress, and those that begin until the returned function is called.
func (j *joining) stop() (end func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stopping++
	if j.cancel != nil {
		j.cancel()
	}
	return func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.stopping--
	}
}

// join joins this process to its job. The caller holds l.changing.
func (l *Library) join(ctx context.Context, o *InitOptions, building bool) error {
	options := o.rank()
	options.Kept, options.LastEpoch, options.OnStall = &l.met, l.last, l.stalled
	options.Member, options.Building = &l.training.member, building
	r := new(rank.Rank)
	if err := r.Start(ctx, options); err != nil {
		removed := errors.Is(err, rank.ErrRemoved)
		l.training.note(func(p *Progress) { p.Removed = removed })
		l.training.stopNotice()
		return err
	}
	l.last = r.Epoch
	l.running.Store(r)
	return nil
}

// Shutdown takes this rank out of the job. reason may be empty. failed says that the program has failed. This
// also ends a Shutdown or an Init in progress, which may wait long for the other ranks. Outside of a job,
// Shutdown does nothing else.
func (l *Library) Shutdown(reason string, failed bool) Handle {
	why := engine.Departure{Reason: reason, Failed: failed}
	return l.start(func(*Result) (err error) {
		if r := l.running.Load(); r != nil && failed {
			err = r.Fail(why)
		}
		if failed {
			defer l.joining.stop()()
		}
		if n := l.newcomer.Swap(nil); n != nil {
			n.cancel()
		}
		l.changing.Lock()
		defer l.changing.Unlock()
		r := l.running.Load()
		if r == nil {
			return err
		}
		// After Fail, a sidecar has no job any more, and so no error.
		if again := r.Shutdown(context.Background(), why); err == nil || again != nil {
			err = again
		}
		l.running.Store(nil)
		l.calls.clear()
		l.operations.clear()
		l.training.left()
		return err
	})
}

// Rank returns the rank of this process, or nil outside of a job. If this process is to become a rank only
// when it joins the training, the result has only the place that it expects.
func (l *Library) Rank() *rank.Rank {
	if n := l.newcomer.Load(); n != nil {
		return &n.rank
	}
	return l.running.Load()
}

// current returns the rank of this process. Outside of a job it returns an error that names the function op.
func (l *Library) current(op string) (*rank.Rank, error) {
	r := l.running.Load()
	if r == nil {
		return nil, &engine.UsageError{Op: op, Err: l.absence()}
	}
	return r, nil
}

// absence returns why this process is not a rank.
func (l *Library) absence() error {
	if l.newcomer.Load() != nil {
		return rank.ErrBuilding
	}
	return rank.ErrNotInitialized
}

// WhyNoDevices returns why operations on CUDA devices are not possible, or "" if they are.
func (l *Library) WhyNoDevices() (string, error) {
	r, err := l.current("why no devices")
	if err != nil {
		return "", err
	}
	return r.NoDevices, nil
}

// Check returns why the job is over, or nil while it runs.
func (l *Library) Check() error {
	r, err := l.current("check")
	if err != nil {
		return err
	}
	return r.Check()
}

// NewUniqueID makes an id by which the ranks of a job can meet. This process or its sidecar serves them.
func (l *Library) NewUniqueID(o InitOptions) (string, error) {
	c, err := l.sidecars.open("new unique id", o.Settings)
	if err != nil {
		return "", err
	}
	if c != nil {
		return c.NewUniqueID(context.Background(), config.Environ(), o.Settings)
	}
	options := o.rank()
	ctx, cancel := context.WithCancel(context.Background())
	id, served, err := options.NewID(ctx)
	if err != nil {
		cancel()
		return "", err
	}
	l.madeMu.Lock()
	defer l.madeMu.Unlock()
	l.made = uniqueID{id.String(), cancel, served}
	return l.made.text, nil
}

// uniqueID is an id whose store this process serves.
type uniqueID struct {
	text   string
	end    context.CancelFunc
	served <-chan struct{} // closed when the store has ended
}

// endID ends the store of an id by which an Init has failed, when the other ranks have had time to fail too.
// It does so only for the last id of NewUniqueID.
func (l *Library) endID(text string) {
	l.madeMu.Lock()
	defer l.madeMu.Unlock()
	if text != "" && text == l.made.text {
		time.AfterFunc(l.lateTime, l.made.end)
	}
}

// GPULibraries returns a cuda.Found as JSON. It counts devices only if asked.
func GPULibraries(countDevices bool) ([]byte, error) {
	// HVD_SIDECAR may be set, because it concerns Init.
	cfg, err := config.Load(config.Sources{Environ: config.Environ(), HaveStore: true})
	if err != nil {
		return nil, asUsage("GPU libraries", err)
	}
	return json.Marshal(nccl.Find(cfg.NCCLLibrary, cfg.CUDALibrary, countDevices))
}

// AddSet adds a process set. The Result has its ID.
func (l *Library) AddSet(ranks []int, membersOnly bool, name string, timeoutSeconds float64) Handle {
	return l.start(func(into *Result) error {
		r, err := l.current(message.AddProcessSet.String())
		if err != nil {
			return err
		}
		set, err := r.AddSetNow(ranks, membersOnly, name, timeoutSeconds)
		if err == nil {
			into.Set = int(set.ID)
		}
		return err
	})
}

// RemoveSet removes a process set.
func (l *Library) RemoveSet(id int, timeoutSeconds float64) Handle {
	return l.start(func(*Result) error {
		r, err := l.current(message.RemoveProcessSet.String())
		if err != nil {
			return err
		}
		return r.RemoveSetNow(id, timeoutSeconds)
	})
}

// Sets returns the IDs of the process sets that this rank knows.
func (l *Library) Sets() (ids []topo.ProcessSetID, err error) {
	r, err := l.current("process sets")
	if err != nil {
		return nil, err
	}
	for _, s := range r.Sets() {
		ids = append(ids, s.ID)
	}
	return ids, nil
}

// SetRanks returns the ranks of a process set, in ascending order.
func (l *Library) SetRanks(id int) ([]topo.Rank, error) {
	const op = "process set ranks"
	r, err := l.current(op)
	if err != nil {
		return nil, err
	}
	set := r.FindSet(id)
	if set == nil {
		return nil, &engine.UsageError{Op: op, Err: fmt.Errorf("process set %d: %w", id, engine.ErrNoProcessSet)}
	}
	return set.Ranks, nil
}

// StartTimeline begins to write the timeline of this rank (rank.Watch).
func (l *Library) StartTimeline(path string, markCycles bool) error {
	const op = "start timeline"
	r, err := l.current(op)
	if err != nil {
		return err
	}
	if c := sidecarOf(r); c != nil {
		if path, err = filepath.Abs(path); err != nil {
			return asUsage(op, err)
		}
		return c.StartTimeline(context.Background(), path, markCycles)
	}
	return asUsage(op, r.Watch.StartTimeline(path, markCycles))
}

// StopTimeline ends the timeline and returns when its file is complete.
func (l *Library) StopTimeline() error {
	const op = "stop timeline"
	r, err := l.current(op)
	if err != nil {
		return err
	}
	if c := sidecarOf(r); c != nil {
		return c.StopTimeline(context.Background())
	}
	return asUsage(op, r.Watch.StopTimeline())
}

// MarkStep records that the program begins the training step with the given number. Outside of a job, and
// with a sidecar, it does nothing.
func (l *Library) MarkStep(number uint64) {
	if r := l.running.Load(); r != nil && r.Engine != nil {
		r.Engine.Observer().MarkStep(number)
	}
}

// loaded is the moment from which BeginRange counts its times. It is not the start of an engine, so that
// EndRange can tell whether a range began in an earlier epoch.
var loaded = time.Now()

// BeginRange returns the time at which the program begins a range, for EndRange. If no timeline of this
// process shows it, the time is 0.
func (l *Library) BeginRange() time.Duration {
	if r := l.running.Load(); r != nil && r.Engine != nil && r.Engine.Observer().Watched() {
		return max(time.Since(loaded), 1)
	}
	return 0
}

// EndRange shows in the timeline that the program was in the range with the given name from begun until now.
// If begun is 0, or in an earlier epoch, it does nothing.
func (l *Library) EndRange(name string, begun time.Duration) {
	r := l.running.Load()
	if begun == 0 || r == nil || r.Engine == nil {
		return
	}
	o := r.Engine.Observer()
	if at := o.Since() - (time.Since(loaded) - begun); at > 0 {
		o.EndSpan(trace.Range, name, at)
	}
}

// asUsage returns err as a usage error of the function op. If err is nil, asUsage returns nil.
func asUsage(op string, err error) error {
	if err == nil {
		return nil
	}
	return &engine.UsageError{Op: op, Err: err}
}

// watch returns what observes the engine, for the function op. It fails if the engine is in a sidecar.
func (l *Library) watch(op string) (*rank.Watch, error) {
	r, err := l.current(op)
	if err == nil && r.Watch == nil {
		err = asUsage(op, errInSidecar)
	}
	if err != nil {
		return nil, err
	}
	return r.Watch, nil
}

// Metrics returns the counters of this rank in the text format of Prometheus.
func (l *Library) Metrics() ([]byte, error) {
	w, err := l.watch("metrics")
	if err != nil {
		return nil, err
	}
	return metrics.Text(w.Stats)
}

// Dump returns a JSON object with the pending and the last operations of this rank.
func (l *Library) Dump() ([]byte, error) {
	w, err := l.watch("dump")
	if err != nil {
		return nil, err
	}
	return w.Dump("requested by the program").JSON()
}

// stall is a stall report as a JSON object.
type stall struct {
	Operation     string      `json:"operation"` // empty if it is not known
	Tensor        string      `json:"tensor"`
	ProcessSet    int         `json:"process_set"`
	Group         string      `json:"group"`   // not empty if the tensor waits only for the rest of this group
	Missing       []topo.Rank `json:"missing"` // the ranks for which the tensor waits
	WaitedSeconds float64     `json:"waited_seconds"`
	Executing     bool        `json:"executing"` // all ranks have submitted the tensor
}

// stalled keeps a stall report for the program.
func (l *Library) stalled(s *controller.Stall) {
	report := stall{Tensor: s.Name, ProcessSet: int(s.Set), Group: s.Group, Missing: s.Missing,
		WaitedSeconds: s.Waited.Seconds(), Executing: s.Executing}
	if s.Kind != message.NoKind {
		report.Operation = s.Kind.String()
	}
	text, err := json.Marshal(report)
	if err != nil {
		return // a report consists of numbers and texts, which can always be encoded
	}
	l.stallsMu.Lock()
	defer l.stallsMu.Unlock()
	if len(l.stalls) == maxStalls {
		l.stalls = l.stalls[1:]
	}
	l.stalls = append(l.stalls, text)
}

// NextStall takes the oldest stall report that has not been taken. It returns nil if there is none.
func (l *Library) NextStall() ([]byte, error) {
	if r := l.running.Load(); r != nil && r.Watch == nil {
		return nil, asUsage("next stall", errInSidecar)
	}
	l.stallsMu.Lock()
	defer l.stallsMu.Unlock()
	if len(l.stalls) == 0 {
		return nil, nil
	}
	text := l.stalls[0]
	l.stalls = l.stalls[1:]
	return text, nil
}
