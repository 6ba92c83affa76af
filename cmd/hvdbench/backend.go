package main

import (
	"context"
	"errors"
	"runtime"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/meeting"
	"github.com/gohvd/gohvd/internal/session"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/shm"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
)

// rawBackend is a backend of all ranks of the job with nothing above it: no names, no negotiation. It owns what the backend
// runs on.
type rawBackend struct {
	ops.Backend
	rank, size int
	mesh       transport.Mesh
	at         *meeting.Meeting
	session    *session.Session // nil in a job of one
}

// Close ends it for all ranks, which must have finished their operations.
func (b *rawBackend) Close() error {
	var errs []error
	if b.mesh != nil {
		errs = append(errs, b.mesh.Close())
	}
	if b.session != nil {
		errs = append(errs, b.session.Close())
	}
	return errors.Join(append(errs, b.at.Close())...)
}

// openRaw meets the other ranks under a job name of its own, so that an engine of this process can be in the job too. The
// backend is the one that the engine would choose: shared memory if the ranks have it, else TCP.
func openRaw(ctx context.Context, at place) (b *rawBackend, err error) {
	cfg, err := config.FromEnvironment(at.settings, at.store != nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.StartTimeout)
	defer cancel()
	met, err := meeting.Open(ctx, meeting.Config{Settings: cfg, Store: at.store})
	if err != nil {
		return nil, err
	}
	b = &rawBackend{at: met}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	cfg = met.Settings
	b.rank, b.size = int(cfg.Rank), cfg.Size
	var memory shm.Memory
	crowded := false
	if cfg.Size == 1 {
		b.mesh = mem.New(1).Mesh(0)
	} else {
		met.Settings.JobID += "/raw"
		if b.session, err = session.Open(ctx, session.Config{At: met}); err != nil {
			return nil, err
		}
		b.mesh, memory = b.session.Mesh, b.session.Memory
		crowded = b.session.LocalSize > min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
	}
	ranks := make([]topo.Rank, cfg.Size)
	for i := range ranks {
		ranks[i] = topo.Rank(i)
	}
	lane := transport.DataLane(topo.Global)
	if memory == nil {
		b.Backend = tcp.New(b.mesh, lane, ranks, cfg.Rank, tcp.Config{Deterministic: cfg.Deterministic})
		return b, nil
	}
	shared := shm.New(memory, lane, ranks, cfg.Rank, shm.Config{Crowded: crowded})
	if err := shared.Open(); err != nil {
		return nil, err
	}
	b.Backend = shared
	return b, nil
}
