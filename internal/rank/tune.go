package rank

import (
	"slices"

	"github.com/gohvd/gohvd/autotune"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/tuning"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
)

// configureTuner sets the tuner of rank 0 if the settings ask for a search or for a file with tuned settings.
// session is nil in a job of one rank.
func configureTuner(ecfg *engine.Config, cfg *config.Config, session *Session) error {
	if ecfg.Rank != 0 || !cfg.Autotune && cfg.AutotuneFile == "" {
		return nil
	}
	// In a job on one host with shared memory, hardly any operation runs over TCP.
	overTCP := ecfg.Backends[0].ID == message.TCP || session != nil && session.LocalSize < ecfg.Size
	allreduce, allgather := twoLevels(ecfg, cfg, session)
	o := autotune.DefaultOptions()
	o.WarmupSamples, o.StepsPerSample, o.MaxRounds, o.Noise = cfg.AutotuneWarmupSamples,
		cfg.AutotuneStepsPerSample, cfg.AutotuneMaxSamples, cfg.AutotuneNoise
	t, err := tuning.New(tuning.Config{
		Start: message.Tuning{
			FusionThresholdBytes: cfg.FusionThresholdBytes, CycleTime: cfg.CycleTime,
			SegmentBytes: tcp.DefaultSegmentBytes, CacheOff: cfg.CacheCapacity == 0,
			OneLevelAllreduce: !allreduce, OneLevelAllgather: !allgather,
		},
		Given: cfg.Given,
		// In deterministic mode the segment size is fixed, because the last bits of an Adasum depend on it.
		// The algorithm is fixed too, because no algorithm that is tried can serve a sum.
		OverTCP: overTCP && !cfg.Deterministic,
		Search:  cfg.Autotune, Options: o, LogPath: cfg.AutotuneLog, File: cfg.AutotuneFile, Log: ecfg.Log,
	})
	if err != nil {
		return err
	}
	ecfg.Tuner = t
	return nil
}

// twoLevels reports whether allreduces and allgathers of the global set run on two levels unless they are
// tuned. allreduce is false in deterministic mode, because reductions then run on one level.
func twoLevels(ecfg *engine.Config, cfg *config.Config, session *Session) (allreduce, allgather bool) {
	if session == nil || !slices.ContainsFunc(ecfg.Backends, func(r ops.Registration) bool {
		return r.ID == message.Hier
	}) {
		return false, false
	}
	hosts := make(map[topo.Rank]bool)
	for _, g := range session.Groups {
		hosts[g] = true
	}
	possible := len(hosts) > 1 && len(hosts) < ecfg.Size
	return possible && cfg.HierarchicalAllreduce && !cfg.Deterministic, possible && cfg.HierarchicalAllgather
}
