package hvd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/sidecar/client"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

// sidecarGrace is how much longer than the ranks have to meet a client waits for what its sidecar says about that. Who gives up
// first ends the sidecar.
const sidecarGrace = 5 * time.Second

// runner is who runs the operations: the engine, or a sidecar that has one. It is no interface, through which all that a call
// passes would escape to the heap.
type runner struct {
	in   *engine.Engine
	over *client.Engine // if there is no engine in this process

	abandoned abandonedWaits
}

// Queue is as the engine's.
func (r *runner) Queue(entries ...*tensorqueue.Entry) error {
	if r.over != nil {
		return r.over.Queue(slices.Clone(entries)...)
	}
	return r.in.Queue(entries...)
}

// RingSoon is as the engine's.
func (r *runner) RingSoon() {
	if r.over != nil {
		r.over.Ring()
		return
	}
	r.in.RingSoon()
}

// Hurry is as the engine's.
func (r *runner) Hurry() {
	if r.over == nil {
		r.in.Hurry()
	}
}

// Help is as the engine's.
func (r *runner) Help(ctx context.Context, done func() bool) {
	if r.over != nil {
		r.over.Help(ctx, done)
		return
	}
	r.in.Help(ctx, done)
}

// Shutdown is as the engine's.
func (r *runner) Shutdown(ctx context.Context, why engine.Departure) error {
	if r.over != nil {
		return r.over.Shutdown(ctx, why)
	}
	return r.in.Shutdown(ctx, why)
}

// Ended is as the engine's.
func (r *runner) Ended() <-chan struct{} {
	if r.over != nil {
		return r.over.Ended()
	}
	return r.in.Ended()
}

// Err is as the engine's.
func (r *runner) Err() error {
	if r.over != nil {
		return r.over.Err()
	}
	return r.in.Err()
}

// startOver joins the job that a sidecar joins, or is in.
func (e *Engine) startOver(ctx context.Context, cfg config.Config, o *initOptions) error {
	if o.store != nil || o.method != "" || o.id != nil {
		return fmt.Errorf("WithStore, WithInitMethod and WithID do not apply over a sidecar (%s), which meets the other ranks by itself",
			config.SidecarVariable)
	}
	if o.onStall != nil {
		o.log.Warn("hvd: OnStall hears of nothing over a sidecar (HVD_SIDECAR), whose log has the stalls")
	}
	// It encrypts nothing: what is said does not leave the host, and descriptors cannot travel with what is encrypted.
	known, err := cfg.JobSecret()
	if err != nil {
		return err
	}
	settings := maps.Clone(o.settings)
	delete(settings, config.SidecarVariable)
	over, err := client.Start(ctx, client.Config{
		Path: cfg.Sidecar, Secret: known, ConnectTimeout: cfg.StartTimeout, Settings: settings, Sets: o.sets,
		Log: o.log,
	})
	if err != nil {
		return err
	}
	e.engine, e.place, e.homogeneous, e.epoch = &runner{over: over}, over.Place, over.Homogeneous, over.Epoch
	if err := errors.Join(samePlace(&cfg, &over.Place), givenSets(o.sets, over)); err != nil {
		return errors.Join(err, over.Leave())
	}
	e.global = e.newSet(topo.Global, controller.Global(e.place.Size).Ranks)
	for _, s := range over.Sets {
		e.newSet(s.ID, s.Ranks)
	}
	return nil
}

// samePlace checks that the sidecar is the rank that the environment of this process says, if it does.
func samePlace(cfg *config.Config, at *topo.Topology) error {
	if cfg.Size != config.Unset && (cfg.Rank != at.Rank || cfg.Size != at.Size) {
		return fmt.Errorf("this is rank %d of %d by HOROVOD_RANK and HOROVOD_SIZE, and the sidecar is rank %d of %d",
			cfg.Rank, cfg.Size, at.Rank, at.Size)
	}
	return nil
}

// givenSets checks that a job which the sidecar was in before has the process sets that this program was given.
func givenSets(given [][]int, over *client.Engine) error {
	sets, err := staticSets(given, over.Place.Size)
	if err != nil {
		return err
	}
	for _, want := range sets {
		if !slices.ContainsFunc(over.Sets, func(s controller.Set) bool { return s.ID == want.ID && slices.Equal(s.Ranks, want.Ranks) }) {
			return fmt.Errorf("mismatched process sets: the sidecar is in a job that has no process set %d of ranks %v", want.ID, want.Ranks)
		}
	}
	return nil
}
