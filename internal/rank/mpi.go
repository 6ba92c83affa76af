package rank

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/ops/mpi"
)

// MPI is the MPI job to which this process belongs, and the unique id by which its ranks meet.
type MPI struct {
	mpi.World
	// ID is nil if the program or the settings choose another place to meet.
	ID *bootstrap.ByID

	stop   context.CancelFunc // ends the store of the id, at rank 0
	served <-chan struct{}    // closed when that store has ended
}

// JoinMPI initializes MPI if the settings choose it, and makes an id by which the ranks of the MPI job meet.
// It makes no id if elsewhere is set, or if hvdrun has started mpirun, because the ranks then meet at the
// store of hvdrun. comm is the Options.Comm of ops/mpi. All ranks of the job must call JoinMPI. It returns
// nil if the settings do not choose MPI. If MPI was initialized, it returns an MPI, together with any error.
func JoinMPI(ctx context.Context, cfg *config.Config, comm *int32, elsewhere bool,
	log *zap.Logger) (*MPI, error) {
	if !cfg.MPIController && !cfg.MPIOperations {
		if comm != nil {
			return nil, fmt.Errorf("got an MPI communicator, but HOROVOD_CONTROLLER is %s: unset it, or set it to mpi",
				cfg.Variable("HOROVOD_CONTROLLER"))
		}
		return nil, nil
	}
	world, err := mpi.Join(ctx, mpi.Options{SingleThread: cfg.MPIThreadsDisable,
		KeepThreads: cfg.Variable("GOMAXPROCS") != "", Comm: comm})
	if err != nil {
		return nil, err
	}
	m := &MPI{World: world, stop: func() {}}
	byHvdrun := false
	if comm == nil { // otherwise the job may have only some of the launcher's processes
		byHvdrun, err = m.checkLauncher(cfg)
	}
	if err != nil || elsewhere || byHvdrun || world.Size() == 1 {
		return m, err
	}
	var id bootstrap.ID
	if world.Rank() == 0 {
		if id, err = m.serve(cfg, log); err != nil {
			// The other ranks get an id that is not valid, so they need not wait for this one.
			return m, errors.Join(err, world.Broadcast(ctx, make([]byte, len(id))))
		}
	}
	if err := world.Broadcast(ctx, id[:]); err != nil {
		return m, err
	}
	if id == (bootstrap.ID{}) {
		return m, errors.New("rank 0 could not serve the store at which the ranks meet")
	}
	m.ID = &bootstrap.ByID{IDs: []bootstrap.ID{id}, Rank: world.Rank(), Size: world.Size()}
	return m, nil
}

// enterMPI tells the other ranks, at the store of hvdrun, that this one is about to initialize MPI. MPI does
// not say for which processes it waits. If the time limit of Init passes meanwhile, the function that
// enterMPI returns adds the ranks that have not come so far to the error, and reports them to hvdrun. It must
// be called with the result of JoinMPI.
func enterMPI(ctx context.Context, cfg *config.Config, o *Options) (explain func(error) error) {
	explain = func(err error) error { return err }
	if !cfg.MPIController && !cfg.MPIOperations || o.MPIComm != nil || cfg.Size <= 1 {
		return explain
	}
	kv, err := bootstrap.DialLauncher(ctx, cfg)
	if err != nil || kv == nil {
		return explain // without hvdrun, nothing can be said about the other ranks
	}
	key := fmt.Sprintf("mpi/%d", o.LastEpoch+1) // has the ranks that have come
	enterCtx, cancel := context.WithTimeout(ctx, bootstrap.LinkTimeout)
	defer cancel()
	_ = kv.Append(enterCtx, key, fmt.Appendln(nil, cfg.Rank)) // an error means that the store is lost
	return func(err error) error {
		defer kv.Close()
		if err == nil || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), verdictTimeout)
		defer cancel()
		came, _, lost := kv.TryGet(ctx, key)
		if lost != nil {
			return err
		}
		late := &engine.PeerError{
			// It may also have begun without a connection to hvdrun.
			Reason: fmt.Sprintf("it had not told hvdrun that it had begun Init when the time limit of Init passed at "+
				"rank %d", cfg.Rank)}
		there := strings.Fields(string(came))
		for r := range cfg.Size {
			if !slices.Contains(there, strconv.Itoa(r)) {
				late.Ranks = append(late.Ranks, r)
			}
		}
		if late.Ranks == nil {
			return err
		}
		reportVerdict(context.Background(), joblink.New(kv, cfg.Rank),
			joblink.Verdict{Epoch: o.LastEpoch + 1, Starting: true}, late)
		return fmt.Errorf("%w: %w", late, err)
	}
}

// checkLauncher returns an error if the launcher has started another number of processes than MPI sees. It
// reports whether the launcher is hvdrun.
func (m *MPI) checkLauncher(cfg *config.Config) (byHvdrun bool, err error) {
	env, _, err := bootstrap.Detect(cfg.Variable)
	if err != nil && m.Size() > 1 {
		// Some launchers tell only MPI how many processes there are, so their variables are incomplete.
		return false, nil
	}
	if err != nil || env == nil || env.Size == m.Size() {
		return env != nil && env.Kind == bootstrap.Hvdrun, err
	}
	return false, fmt.Errorf("%s has started a job of %d, but MPI sees a job of %d: this program was built with %s: "+
		"start it with the mpirun of this library, or build it with the library of the launcher (docs/mpi.md)",
		env.Kind, env.Size, m.Size(), m.Library())
}

// serve serves the store of an id at rank 0. If all ranks are on one host, it listens on loopback.
func (m *MPI) serve(cfg *config.Config, log *zap.Logger) (bootstrap.ID, error) {
	listen := "127.0.0.1"
	for _, lowest := range m.Groups() {
		if lowest == 0 {
			continue
		}
		choice, err := netif.Parse(cfg.NetworkInterfaces)
		if err != nil {
			return bootstrap.ID{}, err
		}
		addr, err := choice.Any()
		if err != nil {
			return bootstrap.ID{}, err
		}
		listen = addr.String()
		break
	}
	ctx, stop := context.WithCancel(context.Background())
	id, served, err := bootstrap.NewID(ctx, listen, cfg.TLS, log)
	if err != nil {
		stop()
		return id, err
	}
	m.stop, m.served = stop, served
	return id, nil
}

// check returns an error if this rank has another number in the job than in MPI.
func (m *MPI) check(rank, size int) error {
	if m == nil || rank == m.Rank() && size == m.Size() {
		return nil
	}
	return fmt.Errorf("this process is rank %d of %d in the job, but rank %d of %d in MPI: the ranks must be the same",
		rank, size, m.Rank(), m.Size())
}

// fail records that the job has failed, so that this process uses MPI no more. It does nothing if m or err is
// nil.
func (m *MPI) fail(err error) {
	if m != nil && err != nil {
		m.Fail(err)
	}
}

// Close ends the store of the id. It does not finalize MPI. m may be nil.
func (m *MPI) Close() {
	if m == nil {
		return
	}
	m.stop()
	if m.served != nil {
		<-m.served
	}
}
