package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/store"
)

// jobPlace says how this rank finds its job. With the zero value, the rank finds its job by the environment.
type jobPlace struct {
	settings map[string]string // values of settings by name; they override the environment
	store    store.Store       // where the ranks meet; nil means the launcher's store
}

// leaveTimeout is the time limit for the shutdown of a rank that was interrupted. It must be shorter than the
// 5 s after which hvdrun kills the rank, which prints the end of its table after the shutdown.
const leaveTimeout = 2 * time.Second

// job is a job that this rank has joined.
type job struct {
	team    *team
	engine  *hvd.Engine // nil if only the backend is measured
	backend *rawBackend // nil if there is an engine
	// closeDevice closes the CUDA device that the team uses. It is nil if the team uses none.
	closeDevice func() error
	memory      memory
}

// join joins the job. If raw is set, the rank has only a backend, otherwise it has an engine. If gpu is set,
// it uses a CUDA device. All ranks must pass the same values of raw and gpu.
func join(ctx context.Context, at jobPlace, raw, gpu bool) (*job, error) {
	j := &job{}
	err := j.open(ctx, at, raw, gpu)
	if err != nil {
		return nil, errors.Join(err, j.leave(ctx))
	}
	return j, nil
}

// open opens either the backend or an engine, and makes a team that uses it.
func (j *job) open(ctx context.Context, at jobPlace, raw, gpu bool) (err error) {
	cfg, err := config.FromEnvironment(at.settings, at.store != nil)
	if err != nil {
		return err
	}
	if !raw {
		var opts []hvd.InitOption
		if at.store != nil {
			opts = append(opts, hvd.WithStore(at.store))
		}
		for name, value := range at.settings {
			opts = append(opts, hvd.WithSetting(name, value))
		}
		if j.engine, err = hvd.New(ctx, opts...); err != nil {
			return err
		}
		var p path = negotiated{j.engine}
		if gpu {
			if p, j.closeDevice, err = openDevice(negotiated{j.engine}, cfg.CUDALibrary); err != nil {
				return fmt.Errorf("--gpu: %w", err)
			}
		}
		j.team, err = newTeam(p)
		return err
	}
	if j.backend, err = openRaw(ctx, at); err != nil {
		return fmt.Errorf("open the backend: %w", err)
	}
	j.team, err = newTeam(&rawPath{backend: j.backend, fusionBytes: cfg.FusionThresholdBytes})
	return err
}

// leave leaves the job. Ranks that have finished leave together. A rank that was interrupted waits at most
// leaveTimeout for the others.
func (j *job) leave(ctx context.Context) error {
	var errs []error
	if j.closeDevice != nil {
		errs = append(errs, j.closeDevice())
	}
	if j.backend != nil {
		errs = append(errs, j.backend.close())
	}
	if j.engine != nil {
		if ctx.Err() != nil {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
			defer cancel()
		}
		errs = append(errs, j.engine.Shutdown(ctx))
	}
	return errors.Join(errs...)
}
