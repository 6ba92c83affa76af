package rank

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/store"
)

// Options override settings that Start otherwise reads from the environment.
type Options struct {
	// Settings overrides environment variables. The keys are the names of the variables.
	Settings map[string]string
	// Store, Method or ID says where the ranks meet. If none of the three is set, the settings or the
	// launcher determine the place. Methods has further URL schemes that Method may have.
	Store   store.Store
	Method  string
	Methods bootstrap.Methods
	ID      *bootstrap.ByID
	// MPIComm points to the Fortran handle of the MPI communicator with the processes of the job. If it is
	// nil, all processes that mpirun has started belong to the job.
	MPIComm *int32
	// Device is the name of this rank's accelerator. SharesDevice allows other ranks of the host to use the
	// same accelerator.
	Device       string
	SharesDevice bool
	// Kept points to a variable in which Start keeps a meeting that can be opened only once, so that later
	// epochs of this process can use the meeting.
	Kept **bootstrap.Meeting
	// Member points to a variable in which Start keeps the part of this process in an elastic job.
	Member **Membership
	// Building says that the program makes its model only after Start. If other ranks train already in the
	// elastic job, Start does not wait to become one of them, and returns ErrBuilding. The program makes the
	// model and calls Start again, without Building.
	Building bool
	// ForClient says that the training program runs in another process.
	ForClient bool
	// Log is the logger. If it is nil, the settings describe the logger.
	Log *zap.Logger
	// LastEpoch is the last epoch in which this rank took part.
	LastEpoch uint64
	// Sets has the process sets that exist from the start, besides the set of all ranks.
	Sets [][]int
	// If OnStall is not nil, it is called at rank 0 for each stall.
	OnStall func(*controller.Stall)
}

// Read reads the settings from the environment and from o.Settings. If o.Log is nil, Read sets it to the
// logger that the settings describe. An MPI communicator makes mpi the default of HOROVOD_CONTROLLER.
func (o *Options) Read() (config.Config, error) {
	cfg, err := config.FromEnvironment(o.Settings, o.Store != nil || o.Method != "" || o.ID != nil)
	if o.MPIComm != nil && !cfg.Given("HOROVOD_CONTROLLER") && !cfg.MPIOperations {
		cfg.MPIController = true
	}
	if err == nil && o.Log == nil {
		o.Log = cfg.Logger(logs.Stderr{})
	}
	return cfg, err
}

// NewID makes a unique id by which the ranks of a job can meet. This process serves them until ctx ends or
// until 30 s after all ranks have met. Then the channel served is closed. It listens on the interface that
// the settings choose, or else on the interface of the default route.
func (o *Options) NewID(ctx context.Context) (id bootstrap.ID, served <-chan struct{}, err error) {
	cfg, err := o.Read()
	if err != nil {
		return id, nil, fmt.Errorf("hvd: new unique id: %w", err)
	}
	choice, err := netif.Parse(cfg.NetworkInterfaces)
	if err != nil {
		return id, nil, fmt.Errorf("hvd: new unique id: %w", err)
	}
	listen, err := choice.Any()
	if err != nil {
		return id, nil, fmt.Errorf("hvd: new unique id: %w", err)
	}
	if id, served, err = bootstrap.NewID(ctx, listen.String(), cfg.TLS, o.Log); err != nil {
		err = fmt.Errorf("hvd: new unique id: %w", err)
	}
	return id, served, err
}

// chosen reports whether the program or the settings choose where the ranks meet.
func (o *Options) chosen(cfg config.Config) bool {
	return o.Store != nil || o.Method != "" || o.ID != nil || cfg.InitMethod != "" || cfg.UniqueID != ""
}

// meet opens the place where the ranks meet, and returns it.
func (o *Options) meet(ctx context.Context, cfg config.Config) (*bootstrap.Meeting, error) {
	byLauncher := !o.chosen(cfg) && cfg.Size == config.Unset
	if byLauncher && o.Kept != nil && *o.Kept != nil {
		return (*o.Kept).Again(cfg), nil
	}
	m, err := bootstrap.Open(ctx, bootstrap.Config{
		Settings: cfg, Store: o.Store, Method: o.Method, Methods: o.Methods, ID: o.ID, Log: o.Log,
	})
	if err == nil && m.Once && o.Kept != nil {
		*o.Kept = m
		m = m.Again(cfg)
	}
	return m, err
}

// processes returns how many processes of the job need a processor on a host with the given number of ranks.
// It assumes that ForClient is the same at all ranks. If it is not, only the way in which processes wait is
// affected.
func (o *Options) processes(ranks int) int {
	if o.ForClient {
		return 2 * ranks
	}
	return ranks
}
