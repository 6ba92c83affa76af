//go:build mpi

package conformance

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// TestRankOfMPI runs one rank of the pairwise trials. mpirun starts a process for each rank
// (TestConformanceMPI).
func TestRankOfMPI(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), clusterTime)
	defer cancel()
	cfg := config.Defaults()
	cfg.MPIController, cfg.MPIOperations, cfg.SharedMemory = true, true, config.SharedNever
	m, err := rank.JoinMPI(ctx, &cfg, nil, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, lockstep := range []bool{false, true} {
		runRank(ctx, t, &cfg, lockstep)
	}
	if err := m.Leave(ctx); err != nil {
		t.Error(err)
	}
}

// runRank runs the trials of this process in a job of all processes.
func runRank(ctx context.Context, t *testing.T, cfg *config.Config, lockstep bool) {
	m, err := rank.JoinMPI(ctx, cfg, nil, false, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	at, err := bootstrap.Open(ctx, bootstrap.Config{Settings: *cfg, ID: m.ID})
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	session, err := rank.OpenSession(ctx, rank.SessionConfig{At: at})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	runProcess(t, fmt.Sprint("in lock-step ", lockstep), testcluster.Options{
		Ranks: m.Size(), Deadline: clusterTime,
		Process: &testcluster.Process{Rank: topo.Rank(m.Rank()), Mesh: session.Mesh},
		Config: func(cfg *engine.Config) {
			cfg.Ready = session.Ready
			cfg.Backends = append(cfg.Backends, m.Register(false, true))
			cfg.Lockstep = lockstep
			if lockstep {
				cfg.Collectives = m.Collectives()
			}
		},
	}, trialsOfMPI(m.Size(), lockstep), nil)
	if err := m.Leave(ctx); err != nil {
		t.Error(err)
	}
}

// trialsOfMPI returns the pairwise trials of all links that have the given number of ranks. Without -full, it
// returns every sixth of them, which differ between the kinds of negotiation.
func trialsOfMPI(ranks int, lockstep bool) (scripts []*script) {
	var all []trial
	for _, trials := range pairwise() {
		all = append(all, trials...)
	}
	slices.SortFunc(all, func(a, b trial) int { return cmp.Compare(a.number, b.number) })
	first := 0
	if lockstep {
		first = 1
	}
	for i, c := range slices.DeleteFunc(all, func(c trial) bool { return c.ranks != ranks }) {
		if *full || i%6 == first {
			scripts = append(scripts, c.script(nil))
		}
	}
	return scripts
}
