// Package testcluster runs whole jobs in one process, for tests. Each rank has an engine. The ranks are
// connected within the process, over TCP on loopback, or by shared memory.
//
// A test passes Run a function. Run calls it for all ranks at the same time, and the function submits
// operations through its Rank:
//
//	testcluster.Run(t, testcluster.Options{Ranks: 3}, func(r *testcluster.Rank) {
//		op := testcluster.Allreduce("x", tensor.Int64, tensor.Shape{1}, tensor.Sum, input)
//		r.Do(op)
//		... op.Output ...
//	})
//
// With the transport Mem a job does no I/O. So it also runs in a testing/synctest bubble, where time is
// virtual and exact. No job hangs forever: after Options.Deadline, Run logs the stacks of all goroutines,
// every wait ends, and the test fails. When Run returns, no goroutine of the job is left.
package testcluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/internal/transport/shm"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/hier"
	opsshm "github.com/gohvd/gohvd/ops/shm"
	opstcp "github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/store"
)

// Transport selects how the ranks are connected.
type Transport uint8

// These are the transports.
const (
	// Mem connects the ranks with transport/mem.
	Mem Transport = iota
	// TCP connects the ranks with transport/tcp on the loopback interface.
	TCP
	// SHM connects the ranks with TCP and shared memory, like processes on one host.
	SHM
)

func (t Transport) String() string { return [...]string{"mem", "tcp", "shm"}[t] }

// Options holds the settings of a job.
type Options struct {
	// Ranks is the number of ranks, at least 1.
	Ranks     int
	Transport Transport
	// Hosts, if not nil, has the name of each rank's host. The ranks of a host share memory, and Transport,
	// which is Mem or TCP, connects the hosts. If Hosts is nil, the ranks share memory only with SHM, and are
	// then on one host.
	Hosts []string
	// Latency is the time that a byte takes from one rank to another. It applies only to Mem. By default it
	// is 0.
	Latency time.Duration
	// Sets holds the members of the process sets 1, 2, ... that exist from the start. The members of a set
	// are in ascending order.
	Sets [][]topo.Rank
	// Config, if not nil, changes the configuration of the engine of rank Config.Rank. It is called for all
	// ranks at the same time, and must choose the same settings of the negotiation for all of them. With Mem,
	// Spin is preset to -1, because in a bubble no time passes while a loop polls.
	Config func(*engine.Config)
	// OnFrame, if not nil, is called with every frame of the negotiation before one rank sends it to another.
	// The ranks may call it at the same time. It must not keep or change the frame.
	OnFrame func(from, to topo.Rank, frame []byte)
	// SegmentBytes is the size of the segments in which the backends transfer data. If it is 0, the defaults
	// of the backends apply.
	SegmentBytes int
	// Table chooses the algorithms of operations over ops/tcp. If it is nil, the default table applies.
	Table opstcp.Table
	// Process, if not nil, is the rank that runs in this process. Each other rank runs in a process of its
	// own, with the same Options, and Transport, Latency and Hosts have no effect.
	Process *Process
	// Fails says that the job is to fail, so that Run does not report the errors of the shutdown.
	Fails bool
	// Deadline is the time limit for the job. The default is 60 s.
	Deadline time.Duration
}

// Process is the only rank in this process.
type Process struct {
	Rank topo.Rank
	Mesh transport.Mesh
}

const (
	defaultDeadline = 10 * time.Minute
	// shutdownTime is the time limit for all ranks to shut down at the end of the job.
	shutdownTime = 20 * time.Second
	// chunkBytes is the size of the chunks of an allreduce on two levels. It is so small that the larger
	// tensors of tests have several chunks.
	chunkBytes = 32 << 10
)

// cluster is a running job.
type cluster struct {
	t      testing.TB
	o      Options
	ctx    context.Context // cancelled when the job ends
	fail   context.CancelCauseFunc
	meshes []transport.Mesh
	memory []shm.Sharer // memory of each rank; nil if no ranks share memory
	ranks  []*Rank
}

// Run starts the engines of a job and calls f for each rank. When f has returned for all ranks, Run shuts the
// job down. If the job cannot be started, Run ends the test. If the job fails later, Run makes the test fail.
func Run(t testing.TB, o Options, f func(r *Rank)) {
	t.Helper()
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	c := &cluster{t: t, o: o, ranks: make([]*Rank, o.Ranks)}
	c.ctx, c.fail = context.WithCancelCause(context.Background())
	defer c.fail(nil)
	defer c.watch()()
	if err := c.connect(); err != nil {
		t.Fatal(err)
	}
	if err := c.start(); err != nil {
		t.Fatal(err)
	}
	c.each(func(r *Rank) { f(r) })
	c.shutdown()
}

// watch starts a timer. At the deadline of the job, the timer logs the stacks of all goroutines and ends the
// job. The function end stops the timer. If the timer has already fired, end waits until the job has ended.
func (c *cluster) watch() (end func()) {
	over := make(chan struct{})
	timer := time.AfterFunc(c.o.Deadline, func() {
		defer close(over)
		stacks := make([]byte, 4<<20)
		c.t.Errorf("the job has not ended after %v; all goroutines:\n%s", c.o.Deadline,
			stacks[:runtime.Stack(stacks, true)])
		c.fail(fmt.Errorf("the job has not ended after %v", c.o.Deadline))
	})
	return func() {
		if !timer.Stop() {
			<-over
		}
	}
}

// connect makes the meshes of all ranks.
func (c *cluster) connect() error {
	if p := c.o.Process; p != nil {
		c.meshes = make([]transport.Mesh, c.o.Ranks)
		c.meshes[p.Rank] = p.Mesh
		return nil
	}
	if c.o.Transport == Mem {
		c.meshes = meshesOf(mem.NewWithLatency(c.o.Ranks, c.o.Latency), c.o.Ranks)
	} else {
		c.meshes = TCPMeshes(c.t, c.o.Ranks)
	}
	hosts := c.o.Hosts
	if c.o.Transport == SHM && hosts == nil {
		hosts = slices.Repeat([]string{"host"}, c.o.Ranks)
	}
	if hosts == nil {
		return nil
	}
	var err error
	c.memory, err = ShareMemory(c.ctx, c.meshes, hosts)
	for r, m := range c.memory {
		c.meshes[r] = m
	}
	return err
}

// ShareMemory lets the ranks of a job share memory. under has the meshes of all ranks, which belong to the
// result. hosts[r] is the host of rank r. If ShareMemory fails, it closes all meshes.
func ShareMemory(ctx context.Context, under []transport.Mesh, hosts []string) ([]shm.Sharer, error) {
	n := len(under)
	endpoints, offers := make([]*shm.Endpoint, n), make([]shm.Offer, n)
	for r := range n {
		e, err := shm.Listen(shm.Config{})
		if err != nil {
			e = shm.Unavailable(err)
		}
		endpoints[r], offers[r] = e, e.Offer()
	}
	meshes, memory := slices.Clone(under), make([]shm.Sharer, n)
	errs := make([]error, n)
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	sessions := make([]*rendezvous.Session, n) // session of each rank; shm.Epoch.Agree calls it
	defer func() {
		for _, s := range sessions {
			if s != nil {
				s.Close()
			}
		}
	}()
	var wg sync.WaitGroup
	for r, e := range endpoints {
		wg.Go(func() {
			var err error
			if sessions[r], err = rendezvous.Join(ctx, rendezvous.JoinConfig{
				Store: kv, Job: "test", Rank: topo.Rank(r), Size: n,
				Self: rendezvous.Record{HostID: hosts[r]},
			}); err != nil {
				errs[r] = errors.Join(err, e.Close())
				return
			}
			mesh, err := e.Connect(ctx, shm.Epoch{
				Job: "test", Epoch: 1, Rank: topo.Rank(r), Hosts: hosts, Offers: offers, Under: under[r],
				Agree: sessions[r].Agree,
			})
			if err == nil && mesh.UnsharedReason() != "" {
				err = errors.Join(fmt.Errorf("rank %d shares no memory: %s", r, mesh.UnsharedReason()),
					mesh.Close())
			}
			errs[r] = err
			if err == nil {
				meshes[r], memory[r] = mesh, mesh
			}
		})
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err == nil {
		return memory, nil
	}
	for _, m := range meshes {
		err = errors.Join(err, m.Close())
	}
	return nil, err
}

// start starts the engines of all ranks. If an engine cannot be started, start closes the other engines and
// returns the error.
func (c *cluster) start() error {
	sets := []controller.Set{controller.Global(c.o.Ranks)}
	for i, ranks := range c.o.Sets {
		sets = append(sets, controller.Set{ID: topo.ProcessSetID(i + 1), Ranks: ranks})
	}
	errs := make([]error, c.o.Ranks)
	var wg sync.WaitGroup
	for i, mesh := range c.meshes {
		if mesh == nil {
			continue // the rank runs in another process
		}
		wg.Go(func() {
			cfg := engine.Config{
				Rank: topo.Rank(i), Size: c.o.Ranks, Mesh: mesh, Sets: sets[1:],
				CacheCapacity: 1024, FusionThresholdBytes: 64 << 20, LivenessTimeout: time.Minute,
			}
			if c.o.Transport == Mem && c.o.Process == nil {
				cfg.Spin = -1
			}
			if c.o.OnFrame != nil {
				cfg.Mesh = &tapped{Mesh: cfg.Mesh, rank: cfg.Rank, onFrame: c.o.OnFrame}
			}
			if c.o.Config != nil {
				c.o.Config(&cfg)
			}
			if c.memory != nil {
				cfg.Memory, cfg.Groups = c.memory[i], c.memory[i].Groups()
			}
			crowded := ops.Oversubscribed(cmp.Or(cfg.LocalProcesses, c.o.Ranks), runtime.NumCPU())
			overTCP := opstcp.Config{SegmentBytes: c.o.SegmentBytes, Deterministic: cfg.Deterministic,
				Table: c.o.Table}
			if c.memory != nil {
				inMemory := opsshm.Register(c.memory[i], opsshm.Config{StageBytes: int64(c.o.SegmentBytes),
					Oversubscribed: crowded, Groups: cfg.Groups, Deterministic: cfg.Deterministic})
				cfg.Backends = append(cfg.Backends, inMemory, hier.Register(hier.Config{
					Groups: cfg.Groups, Inner: inMemory,
					Outer: opstcp.Within(cfg.Mesh, transport.OuterLane, overTCP),
					Kinds: [message.NumKinds]bool{message.Allreduce: true, message.Reducescatter: true,
						message.Allgather: true, message.Broadcast: true},
					Deterministic: cfg.Deterministic,
					ChunkBytes:    chunkBytes,
				}))
			}
			cfg.Backends = append(cfg.Backends, opstcp.Register(cfg.Mesh, overTCP))
			e, err := engine.Start(c.ctx, cfg)
			if err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", i, err)
				c.fail(errs[i]) // end the job, so that the other ranks do not wait for this rank
				return
			}
			c.ranks[i] = newRank(c, topo.Rank(i), e, sets)
		})
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err != nil {
		for _, r := range c.ranks {
			if r != nil {
				r.Engine.Close()
			}
		}
	}
	return err
}

// each calls f for all ranks of this process at the same time, and waits until all calls have returned.
func (c *cluster) each(f func(r *Rank)) {
	var wg sync.WaitGroup
	for _, r := range c.ranks {
		if r != nil {
			wg.Go(func() { f(r) })
		}
	}
	wg.Wait()
}

// shutdown shuts down all engines. If this fails, the test fails, unless the job has failed before.
func (c *cluster) shutdown() {
	failed := c.o.Fails || c.ctx.Err() != nil
	ctx, cancel := context.WithTimeout(c.ctx, shutdownTime)
	defer cancel()
	c.each(func(r *Rank) {
		if err := r.Engine.Shutdown(ctx, engine.Departure{}); err != nil && !failed {
			c.t.Errorf("rank %d: %v", r.Rank, err)
		}
	})
}

// tapped is a mesh that passes each frame of the negotiation to onFrame before it sends the frame.
type tapped struct {
	transport.Mesh
	rank    topo.Rank
	onFrame func(from, to topo.Rank, frame []byte)
}

// Conn implements transport.Mesh.
func (m *tapped) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, lane, peer)
	if err != nil || lane != transport.Control {
		return c, err
	}
	return &tap{Conn: c, mesh: m, peer: peer}, nil
}

// tap is a control connection that passes each frame to onFrame of its mesh. The engine sends each frame with
// one call of Send. The bytes in this call begin with the length and the number of the frame.
type tap struct {
	transport.Conn
	mesh *tapped
	peer topo.Rank
}

const frameHeaderBytes = 8

// Send implements transport.Conn.
func (c *tap) Send(p []byte) error {
	c.mesh.onFrame(c.mesh.rank, c.peer, p[frameHeaderBytes:])
	return c.Conn.Send(p)
}
