package main

import (
	"context"
	"errors"
	"time"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// rawBackend has the backends that an engine of the job would have. Its operations have no names and are not
// negotiated. It owns the mesh and the session that the backends use.
type rawBackend struct {
	registry   ops.Registry
	manager    *ops.Manager
	rank, size int
	mesh       transport.Mesh
	mpi        *rank.MPI // nil without MPI
	at         *bootstrap.Meeting
	session    *rank.Session // nil in a job with one rank
}

// leaveTime is the time limit for all ranks to finalize MPI.
const leaveTime = 10 * time.Second

// close closes the backends, their mesh and its session. All ranks must have finished their operations.
func (b *rawBackend) close() error {
	var errs []error
	if b.manager != nil {
		b.manager.Close()
	}
	if b.mesh != nil {
		errs = append(errs, b.mesh.Close())
	}
	if b.session != nil {
		errs = append(errs, b.session.Close())
	}
	if b.at != nil {
		errs = append(errs, b.at.Close())
	}
	if b.mpi != nil {
		b.mpi.Close()
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		defer cancel()
		errs = append(errs, b.mpi.Leave(ctx))
	}
	return errors.Join(errs...)
}

// openRaw meets the other ranks and opens the backends with them. It uses a job name of its own, so that this
// process can also have an engine in the job. The caller must close b unless it is nil, even if there is an
// error.
func openRaw(ctx context.Context, at jobPlace) (b *rawBackend, err error) {
	cfg, err := config.FromEnvironment(at.settings, at.store != nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.StartTimeout)
	defer cancel()
	b = new(rawBackend)
	if b.mpi, err = rank.JoinMPI(ctx, &cfg, nil, at.store != nil, nil); err != nil {
		return b, err
	}
	where := bootstrap.Config{Settings: cfg, Store: at.store}
	if b.mpi != nil {
		where.ID = b.mpi.ID
	}
	met, err := bootstrap.Open(ctx, where)
	if err != nil {
		return b, err
	}
	b.at = met
	cfg = met.Settings
	b.rank, b.size = int(cfg.Rank), cfg.Size
	if cfg.Size == 1 {
		b.mesh = transport.Alone{}
	} else {
		met.Settings.JobID += "/raw"
		if b.session, err = rank.OpenSession(ctx, rank.SessionConfig{At: met}); err != nil {
			return b, err
		}
		b.mesh = b.session.Mesh
	}
	overTCP, err := rank.TCPConfig(&cfg)
	if err != nil {
		return b, err
	}
	oversubscribed := b.session != nil && ops.Oversubscribed(b.session.LocalSize, b.session.Processors)
	b.registry = rank.Backends(b.mpi, b.session, b.mesh, &cfg, overTCP, oversubscribed)
	b.manager, err = ops.NewManager(b.registry, topo.Global, topo.UpTo(cfg.Size), cfg.Rank)
	return b, err
}
