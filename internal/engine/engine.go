// Package engine runs a rank: it joins the pure controller to the queue of submitted tensors, the transport,
// the backends and the clock.
//
// One goroutine, BackgroundThreadLoop, owns the controller. It sleeps until something rings: a submission, a
// frame, a finished grant, the controller's next deadline. It never executes an operation and never waits for a
// peer. Each process set has a lane, a goroutine that executes its grants in order; each control connection
// has a receiver. All of them end in Shutdown or Close.
package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// Config is what an engine needs.
type Config struct {
	Rank topo.Rank
	Size int
	// Mesh connects the ranks of this epoch. The engine owns and closes it. A job of one needs none.
	Mesh transport.Mesh

	CacheCapacity        int
	FusionThresholdBytes int64
	CycleTime            time.Duration
	LivenessTimeout      time.Duration
	// MaxResultBytes bounds the result of an allgather, whose size other ranks decide; 0 is the memory of the
	// host.
	MaxResultBytes int64
	// Lockstep makes all ranks enter every cycle of the negotiation.
	Lockstep bool

	// Log hears of failures; nil is silence.
	Log *zap.Logger
	// OnVerdict, if not nil, is called once when the epoch has failed, before any operation is answered with
	// it. It delays the answers, so it must bound what it does.
	OnVerdict func(*PeerError)
}

// Engine is one rank of one epoch.
type Engine struct {
	cfg   Config
	log   *zap.Logger
	start time.Time

	queue *tensorqueue.Queue // of the global set
	lanes []*lane
	links []*link // to rank 0; at rank 0, to every other rank
	inbox inbox

	member      *controller.Member
	coordinator *controller.Coordinator // rank 0 only

	bell     chan struct{}
	shutdown atomic.Bool
	stop     chan struct{} // closed: give up without ceremony
	stopOnce sync.Once
	ended    chan struct{} // closed: the epoch is over and every operation is answered
	released chan struct{} // closed: connections and goroutines are gone too
	failure  error         // why the epoch ended other than by an orderly shutdown; read after ended

	mu       sync.Mutex
	finished []finishedWork // from the lanes

	// Owned by the loop.
	granted int  // grants given to lanes and not finished
	stopped bool // STOP is applied
	scratch struct {
		entries  []*tensorqueue.Entry
		events   []event
		failed   []event
		finished []finishedWork
		frame    []byte
		up       message.Up
		down     message.Down
	}
	works []*work // free
}

type finishedWork struct {
	w   *work
	err error
}

// Start connects the control channels and starts the engine. It waits for the other ranks until ctx ends. On
// error the mesh is closed.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.Mesh == nil {
		cfg.Mesh = alone{}
	}
	e := &Engine{
		cfg: cfg, log: cfg.Log, start: time.Now(),
		queue:    tensorqueue.New(),
		bell:     make(chan struct{}, 1),
		stop:     make(chan struct{}),
		ended:    make(chan struct{}),
		released: make(chan struct{}),
	}
	e.inbox.ring = e.ring
	if err := e.connect(ctx); err != nil {
		return nil, e.abandon(err)
	}
	if cfg.MaxResultBytes == 0 {
		var host unix.Sysinfo_t
		if err := unix.Sysinfo(&host); err != nil {
			return nil, e.abandon(fmt.Errorf("engine: memory of the host: %w", err))
		}
		cfg.MaxResultBytes = int64(host.Totalram) * int64(host.Unit)
	}
	set := controller.Global(cfg.Size)
	l := &lane{
		set: set, me: int(cfg.Rank), queue: e.queue, maxResultBytes: cfg.MaxResultBytes,
		manager: new(ops.Manager),
		bell:    make(chan struct{}, 1),
	}
	backend := tcp.New(cfg.Mesh, transport.DataLane(set.ID), set.Ranks, int(cfg.Rank), tcp.Config{})
	if err := l.manager.Add(backend, message.Allreduce, message.Allgather, message.Broadcast); err != nil {
		return nil, e.abandon(err)
	}
	e.lanes = []*lane{l}
	sets := []controller.Set{set}
	e.member = controller.NewMember(controller.MemberConfig{
		Rank: cfg.Rank, Sets: sets, LivenessTimeout: cfg.LivenessTimeout,
	}, 0)
	if cfg.Rank == 0 {
		e.coordinator = controller.NewCoordinator(controller.CoordinatorConfig{
			Sets: sets, CacheCapacity: cfg.CacheCapacity, FusionThresholdBytes: cfg.FusionThresholdBytes,
			CycleTime: cfg.CycleTime, LivenessTimeout: cfg.LivenessTimeout,
			Plan: l.plan,
		}, 0)
	}
	go e.BackgroundThreadLoop()
	return e, nil
}

// abandon is the error of a Start that failed.
func (e *Engine) abandon(err error) error { return errors.Join(err, e.cfg.Mesh.Close()) }

// alone is the mesh of a job of one: there is nobody to talk to.
type alone struct{}

func (alone) Conn(_ context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	return nil, fmt.Errorf("engine: lane %d to rank %d in a job of one", lane, peer)
}
func (alone) Abort(transport.Lane, error) {}
func (alone) Close() error                { return nil }

// connect makes the control channels: a star with rank 0 in the middle.
func (e *Engine) connect(ctx context.Context) error {
	var peers []topo.Rank
	if e.cfg.Rank == 0 {
		for r := 1; r < e.cfg.Size; r++ {
			peers = append(peers, topo.Rank(r))
		}
	} else {
		peers = []topo.Rank{0}
	}
	e.links = make([]*link, len(peers))
	errs := make([]error, len(peers))
	var wg sync.WaitGroup
	for i, p := range peers {
		wg.Go(func() {
			conn, err := e.cfg.Mesh.Conn(ctx, transport.Control, p)
			e.links[i], errs[i] = &link{peer: p, conn: conn}, err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("engine: rank %d: control channel: %w", e.cfg.Rank, err)
	}
	return nil
}

// Submit hands a tensor to the engine. The buffers of e are the engine's until Done is called, which happens
// exactly once if Submit returns nil and never otherwise.
func (e *Engine) Submit(entry *tensorqueue.Entry) error {
	if err := entry.Request.Check(); err != nil {
		return &OpError{Op: entry.Request.Kind.String(), Tensor: entry.Request.Name, Err: err}
	}
	if err := e.queue.Add(entry); err != nil {
		return opError(&entry.Request, err)
	}
	e.ring()
	return nil
}

// Shutdown ends the job at every rank: what is granted is finished, everything else gets ErrShutDown. It returns
// when this rank has let go of everything, or after ctx has cut it short. The error is why the epoch had
// failed before, or ctx's.
func (e *Engine) Shutdown(ctx context.Context) error {
	e.queue.Close(ErrShutDown)
	e.shutdown.Store(true)
	e.ring()
	select {
	case <-e.ended:
		e.Close()
		return e.failure
	case <-ctx.Done():
		e.Close()
		return fmt.Errorf("engine: rank %d: shutdown: %w", e.cfg.Rank, ctx.Err())
	}
}

// Close ends this rank at once and lets go of everything. To the other ranks it is a death, unless the epoch is
// over. It may be called more than once.
func (e *Engine) Close() {
	e.stopOnce.Do(func() {
		close(e.stop)
		if e.cfg.Lockstep {
			e.interruptLanes() // the loop may be executing
		}
	})
	<-e.released
}

// Ended is closed when the epoch is over for this rank and every operation is answered. Err then says why.
func (e *Engine) Ended() <-chan struct{} { return e.ended }

// Err is why the epoch ended: nil after an orderly shutdown. It must not be called before Ended is closed.
func (e *Engine) Err() error { return e.failure }

func (e *Engine) ring() {
	select {
	case e.bell <- struct{}{}:
	default:
	}
}
