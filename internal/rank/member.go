package rank

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/store"
)

// ErrRemoved is returned by Start if this process was a rank of an elastic job and is none any more.
var ErrRemoved = errors.New("the launcher has removed this process from the elastic job")

// ErrBuilding is returned by Start with Options.Building if the job trains without this process.
var ErrBuilding = errors.New("this process is not a rank of the elastic job yet: it becomes one when the training begins " +
	"in it (hvd.elastic.run, hvd_elastic_join), and has no operations before")

// errLeft is returned by Start if this process has left its elastic job for good.
var errLeft = errors.New("this process has left the elastic job by Shutdown, so it does not become a rank again: call Shutdown " +
	"only after the last training (elastic.Run, hvd.elastic.run)")

// errSuperseded ends an attempt to join a generation of an elastic job when there is a later one.
var errSuperseded = errors.New("the launcher has changed the ranks meanwhile")

// process is the Membership of this process.
var process atomic.Pointer[Membership]

// ProcessMembership returns the part of this process in an elastic job, or nil if the job is not elastic or
// the process has not called Init yet.
func ProcessMembership() *Membership { return process.Load() }

// Membership is the part of a process in an elastic job. It lasts from the first Start to the end of the
// process.
type Membership struct {
	me     elastic.Member
	client *store.Client
	link   *joblink.Member
	cancel context.CancelFunc
	ended  chan struct{} // closed when follow has returned; lost is the reason

	mu     sync.Mutex
	joined uint64          // the generation of the newest Start
	ranked bool            // a Start has succeeded
	async  bool            // Rank.AsyncCompletion of the newest successful Start
	synced func()          // what Synced does, or nil
	goesOn bool            // the training goes on in the next generation (GoOn)
	left   bool            // a Shutdown has left the job for good (errLeft)
	done   bool            // the training has returned, and no other one has begun
	past   int             // how many trainings have returned
	newest *elastic.Roster // the newest roster, or nil
	news   chan struct{}   // closed when newest changes
	lost   error
}

// openMembership connects to the launcher.
func openMembership(ctx context.Context, cfg *config.Config) (*Membership, error) {
	me, err := elastic.ParseMember(cfg.Member)
	if err != nil {
		return nil, fmt.Errorf("HVD_MEMBER: %w", err)
	}
	key, err := secret.Parse(cfg.Secret)
	if err != nil {
		return nil, fmt.Errorf("HVD_SECRET: %w", err)
	}
	client, err := store.Dial(ctx, net.JoinHostPort(cfg.RendezvousAddr, strconv.Itoa(cfg.RendezvousPort)),
		store.Config{Secret: key})
	if err != nil {
		return nil, err
	}
	m := &Membership{me: me, client: client, link: joblink.NewMember(client, me), ended: make(chan struct{}),
		news: make(chan struct{})}
	following, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	go m.follow(following)
	return m, nil
}

// Close ends the connection to the launcher.
func (m *Membership) Close() error {
	m.cancel()
	<-m.ended
	return m.client.Close()
}

// follow keeps m.newest up to date until ctx ends or the connection to the launcher is lost.
func (m *Membership) follow(ctx context.Context) {
	defer close(m.ended)
	for generation := uint64(0); ; {
		r, err := m.link.Roster(ctx, generation)
		m.mu.Lock()
		if err == nil {
			generation, m.newest = r.Generation, r
		} else {
			m.lost = err
		}
		close(m.news)
		m.news = make(chan struct{})
		m.mu.Unlock()
		if err != nil {
			return
		}
		if r.Generation > 1 && r.Rank(m.me) >= 0 {
			// Without the answer the launcher takes this process for dead. If the connection is lost, the
			// next call of Roster fails too.
			_ = m.checkIn(ctx, false)
		}
	}
}

// Pending returns the newest roster if it is later than the generation of which this process is a rank, or
// else nil.
func (m *Membership) Pending() *elastic.Roster {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.newest == nil || m.newest.Generation <= m.joined {
		return nil
	}
	return m.newest
}

// Generation returns the generation of which this process is a rank, or 0.
func (m *Membership) Generation() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.joined
}

// Tell tells the launcher an event.
func (m *Membership) Tell(ctx context.Context, e joblink.MemberEvent) error {
	_, err := m.link.Tell(ctx, e)
	return err
}

// EndTraining tells the launcher that the training has returned in this process.
func (m *Membership) EndTraining(ctx context.Context) error {
	m.done = true
	m.past++
	return m.Tell(ctx, joblink.MemberEvent{Kind: joblink.Done})
}

// GoOn tells that the training has ended in this generation only, so that a Start follows the Shutdown.
func (m *Membership) GoOn() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.goesOn = true
}

// endedShutdown records that a Shutdown has ended with err.
func (m *Membership) endedShutdown(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left = err == nil && !m.goesOn
}

// hasLeft reports whether a Shutdown has left the job for good and there is no later roster.
func (m *Membership) hasLeft() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.left && (m.newest == nil || m.newest.Generation <= m.joined)
}

// PastTrainings returns how many trainings have returned in this process.
func (m *Membership) PastTrainings() int { return m.past }

// BeginTraining tells the launcher, after EndTraining, that another training begins in this process.
func (m *Membership) BeginTraining(ctx context.Context) error {
	if !m.done {
		return nil
	}
	m.done = false
	return m.Tell(ctx, joblink.MemberEvent{Kind: joblink.Again})
}

// checkIn tells the launcher that this process can become a rank or, if building is set, that it can when its
// program has made the model. Then checkIn returns ErrBuilding if there are ranks already.
func (m *Membership) checkIn(ctx context.Context, building bool) error {
	kind := joblink.Ready
	if building {
		kind = joblink.Building
	}
	a, err := m.link.Tell(ctx, joblink.MemberEvent{Kind: kind})
	if err == nil && a.Later {
		return ErrBuilding
	}
	return err
}

// Expected returns the place that this process will have if it becomes a rank now. There must be ranks
// already.
func (m *Membership) Expected(ctx context.Context) (topo.Topology, error) {
	r, err := m.link.Roster(ctx, 0)
	if err != nil {
		return topo.Topology{}, err
	}
	next := elastic.Roster{Members: append(r.Members, m.me)}
	return next.Topology()[len(r.Members)], nil
}

// LeaveOnSIGTERM makes this process leave its elastic job if it gets SIGTERM, until stop is called. The other
// ranks lose nothing: the process stays a rank until all of them begin the next generation, after their next
// commit. Handlers of the program for SIGTERM come back into effect when stop is called. In Go, they also get
// the signal before that. If the job is not elastic, or ends anyway, SIGTERM has the effect that it has
// without LeaveOnSIGTERM.
func LeaveOnSIGTERM() (stop func()) {
	if !config.InElasticJob() || signal.Ignored(unix.SIGTERM) {
		return func() {}
	}
	signals, over, ended := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(signals, unix.SIGTERM)
	go func() {
		defer close(ended)
		for {
			select {
			case <-signals:
			case <-over:
				return
			}
			if err := leave(); err != nil {
				signal.Stop(signals)
				_ = unix.Kill(os.Getpid(), unix.SIGTERM)
				return
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		close(over)
		<-ended
		if len(signals) > 0 {
			_ = unix.Kill(os.Getpid(), unix.SIGTERM) // it has arrived too late for a notice
		}
	}
}

// leaveLimit is how long the launcher may take to learn that this process leaves.
const leaveLimit = 5 * time.Second

// leave tells the launcher that this process leaves because of SIGTERM.
func leave() error {
	m := ProcessMembership()
	if m == nil {
		return errors.New("this process has not joined an elastic job yet")
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveLimit)
	defer cancel()
	return m.Tell(ctx, joblink.MemberEvent{Kind: joblink.Leave, Why: unix.SignalName(unix.SIGTERM)})
}

// next waits for a roster that is later than the one of the newest Start, and in which this process is a
// rank. If this process was in an earlier roster, and is not in the newest one, next returns ErrRemoved at
// once, also in later calls, because such a process does not become a rank again.
func (m *Membership) next(ctx context.Context) (*elastic.Roster, error) {
	for {
		m.mu.Lock()
		r, news, lost, joined := m.newest, m.news, m.lost, m.joined
		isIn := r != nil && r.Rank(m.me) >= 0
		isNew := isIn && r.Generation > joined
		if isNew {
			m.joined = r.Generation
		}
		m.mu.Unlock()
		switch {
		case isNew:
			return r, nil
		case r != nil && !isIn && joined > 0:
			return nil, ErrRemoved
		case lost != nil:
			return nil, lost
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting to become a rank of the elastic job: %w", ctx.Err())
		}
	}
}

// until returns a context that ends with errSuperseded when there is a later roster than generation.
func (m *Membership) until(ctx context.Context, generation uint64) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for {
			m.mu.Lock()
			later, news := m.newest.Generation > generation, m.news
			m.mu.Unlock()
			if later {
				cancel(errSuperseded)
				return
			}
			select {
			case <-news:
			case <-m.ended:
				cancel(m.lost)
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// startMember joins r to the newest generation of an elastic job. If other ranks fail meanwhile, or the
// launcher changes the ranks, it joins the next generation.
func (r *Rank) startMember(ctx context.Context, cfg config.Config, o *Options) error {
	m, err := o.membership(ctx, &cfg)
	if err != nil {
		return err
	}
	if m.hasLeft() {
		return errLeft
	}
	if m.Generation() == 0 {
		if err := m.checkIn(ctx, o.Building); err != nil {
			return err
		}
	}
	for {
		// The launcher ends the job if it pauses for longer than ElasticTimeout. The wait of a process that
		// was never a rank has no limit, because it may wait as a spare.
		limit := time.Duration(math.MaxInt64)
		if m.Generation() > 0 {
			limit = cfg.ElasticTimeout + cfg.StartTimeout
		}
		waiting, stop := context.WithTimeout(ctx, limit)
		roster, err := m.next(waiting)
		stop()
		if err != nil {
			return err
		}
		o.Log.Debug("init: joining the ranks of an elastic job", zap.Uint64("generation", roster.Generation))
		r.member, r.generation = m, roster.Generation
		err = r.tryMember(ctx, m.at(cfg, roster), o)
		if err == nil {
			m.begin(r, roster)
		}
		if err == nil || !isOfOthers(err) || ctx.Err() != nil {
			return err
		}
		o.Log.Debug("init: waiting for the next ranks of the elastic job", zap.Error(err))
		if err := r.reset(); err != nil {
			o.Log.Debug("init: closing what a generation has left", zap.Error(err))
		}
	}
}

// membership returns the part of this process in its job. It opens it at the first Start.
func (o *Options) membership(ctx context.Context, cfg *config.Config) (*Membership, error) {
	if o.Member == nil {
		return nil, errors.New("hvdrun has started an elastic job, which a sidecar cannot join: unset HVD_SIDECAR, or omit " +
			"--min-np and --host-discovery-script")
	}
	if *o.Member == nil {
		m, err := openMembership(ctx, cfg)
		if err != nil {
			return nil, err
		}
		*o.Member = m
		process.Store(m)
	}
	return *o.Member, nil
}

// at returns the settings of this process as a rank of roster.
func (m *Membership) at(cfg config.Config, roster *elastic.Roster) config.Config {
	cfg.Rank, cfg.Size = roster.Rank(m.me), len(roster.Members)
	place := roster.Topology()[cfg.Rank]
	cfg.LocalRank, cfg.LocalSize = place.LocalRank, place.LocalSize
	cfg.CrossRank, cfg.CrossSize = place.CrossRank, place.CrossSize
	return cfg
}

// begin makes Synced show in the timeline of r why the ranks have changed, and how long they have exchanged
// the state.
func (m *Membership) begin(r *Rank, roster *elastic.Roster) {
	m.ranked, m.async, m.synced = true, r.AsyncCompletion, nil
	m.mu.Lock()
	m.goesOn, m.left = false, false
	m.mu.Unlock()
	if roster.Generation > 1 {
		begun, name := r.Engine.Observer().BeginSpan(), fmt.Sprintf("generation %d: %s", roster.Generation, roster.Reason)
		m.synced = func() { r.Engine.Observer().EndSpan(trace.Range, name, begun) }
	}
}

// CompletesAsync reports whether operations on CUDA devices complete when they have been launched.
func (m *Membership) CompletesAsync() bool { return m.async }

// Synced tells that this process has the state with which its generation trains.
func (m *Membership) Synced() {
	if m.synced != nil {
		m.synced()
	}
	m.synced = nil
}

// limit gives ctx the time limit within which all ranks of a generation must have met. A process that was
// never a rank has none: the others train until they commit, and when they meet, they wait for it with a
// limit.
func (m *Membership) limit(ctx context.Context, cfg *config.Config, generation uint64) (context.Context,
	context.CancelFunc) {
	if !m.ranked && generation > 1 {
		return ctx, func() {}
	}
	return withStartTimeout(ctx, cfg)
}

// tryMember joins r to one generation.
func (r *Rank) tryMember(ctx context.Context, cfg config.Config, o *Options) error {
	ctx, stop := r.member.limit(ctx, &cfg, r.generation)
	defer stop()
	ctx, cancel := r.member.until(ctx, r.generation)
	defer cancel()
	err := r.start(ctx, cfg, o)
	if err != nil && errors.Is(context.Cause(ctx), errSuperseded) {
		return errSuperseded
	}
	return err
}

// isOfOthers reports whether Init has failed because of other ranks, so that the launcher will change the
// ranks.
func isOfOthers(err error) bool {
	_, died := errors.AsType[*engine.PeerError](err)
	// Rank 0 gives up without having waited until its time limit if it already knows the next ranks.
	refused, _ := errors.AsType[*rendezvous.RefusedError](err)
	return died || errors.Is(err, errSuperseded) || rendezvous.Awaited(err) != nil ||
		refused != nil && refused.Reason == rendezvous.GaveUp
}

// reset closes what a failed attempt has opened, so that r can start again.
func (r *Rank) reset() error {
	log := r.log
	r.log = nil
	err := r.release()
	r.Engine, r.Watch, r.Global, r.Devices = nil, nil, nil, nil
	r.nccl, r.mpi, r.meeting, r.session, r.sets, r.log = nil, nil, nil, nil, setTable{}, log
	return err
}
