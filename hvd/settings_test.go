package hvd_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// initAll starts a job in this process, with a rank for each element of ranks. Each rank has the settings in
// its element and the common settings in the first map. initAll returns the error of Init for each rank. It
// shuts down the ranks whose Init returned no error.
func initAll(t *testing.T, all map[string]string, ranks ...map[string]string) []error {
	t.Helper()
	return initLogged(t, zap.NewNop(), all, ranks...)
}

// initLogged is like initAll. All ranks use the given logger.
func initLogged(t *testing.T, log *zap.Logger, all map[string]string, ranks ...map[string]string) []error {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	ctx := testnet.Context(t)
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for r, own := range ranks {
		opts := []hvd.InitOption{hvd.WithStore(kv), hvd.WithLogger(writesTo(log.Core())),
			hvd.WithSetting("HOROVOD_RANK", fmt.Sprint(r)),
			hvd.WithSetting("HOROVOD_SIZE", fmt.Sprint(len(ranks)))}
		for _, settings := range []map[string]string{all, own} {
			for name, value := range settings {
				opts = append(opts, hvd.WithSetting(name, value))
			}
		}
		wg.Go(func() {
			e, err := hvd.New(ctx, opts...)
			errs[r] = err
			if err == nil {
				if err := e.Shutdown(ctx); err != nil {
					t.Errorf("rank %d: %v", r, err)
				}
			}
		})
	}
	wg.Wait()
	return errs
}

// If all ranks share memory, rank 0 warns that an algorithm over TCP has no effect.
func TestAlgorithmInSharedMemory(t *testing.T) {
	for operations, warn := range map[string]int{"gloo": 1, "shm": 2, "tcp": 0} {
		core, logged := observer.New(zapcore.WarnLevel)
		settings := map[string]string{"HVD_ALGORITHM": "allreduce=ring", "HOROVOD_CPU_OPERATIONS": operations}
		for r, err := range initLogged(t, zap.New(core), nil, settings, settings) {
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		}
		if got := logged.FilterMessageSnippet("HVD_ALGORITHM has no effect: ").Len(); got != warn {
			t.Errorf("%s: got %d warnings, want %d: %v", operations, got, warn, logged.All())
		}
	}
}

// If a forced algorithm cannot serve an operation, the operation fails at all ranks with an error that names
// the algorithms that can, and later operations succeed.
func TestForcedAlgorithmCannotServe(t *testing.T) {
	run(t, 3, func(ctx context.Context, e *hvd.Engine) {
		_, err := hvd.Allreduce(ctx, make([]hvd.Float16, 1), hvd.Name("half"), hvd.Op(hvd.Sum), hvd.On(e))
		if err == nil || !strings.Contains(err.Error(), `"half"`) ||
			!strings.HasSuffix(err.Error(), "direct or exchange can") {
			t.Errorf("rank %d: got %v, want an error that names direct and exchange", e.Rank(), err)
		}
		if _, err := hvd.Allreduce(ctx, make([]float32, 1), hvd.Name("single"), hvd.On(e)); err != nil {
			t.Errorf("rank %d: %v", e.Rank(), err)
		}
	}, "HOROVOD_CPU_OPERATIONS", "tcp", "HVD_ALGORITHM", "allreduce=ring")
}

// otherValue returns a valid value of the setting s that differs from the value given.
func otherValue(t *testing.T, s config.Setting, given string) string {
	if s.Scope == config.PathPerJob {
		path := filepath.Join(t.TempDir(), "other")
		testnet.WriteFile(t, path, "params: {}")
		return path
	}
	if s.Name == "HVD_ALGORITHM" {
		return "allreduce=ring" // package config accepts any text, because it does not know the algorithms
	}
	for _, text := range []string{"lo", "event", "lockstep", "tcp", "nccl", "1", "0", "7"} {
		_, err := config.Load(config.Sources{API: map[string]string{s.Name: text}})
		if err == nil && text != given {
			return text
		}
	}
	t.Fatalf("this test knows no other value of %s: want %s", s.Name, s.Want())
	return ""
}

// TestSettingsThatDiffer starts three ranks. Rank 1 has a different value of one setting than the other
// ranks. If that setting must be the same at all ranks, Init must fail at all ranks with an error that names
// the setting, the ranks and the values. The test runs for each setting in the table of package config, in
// both modes of negotiation.
func TestSettingsThatDiffer(t *testing.T) {
	_, key := secret.New()
	// noEffect lists the settings that have no effect on ranks that meet in a store of the program, as they
	// do in this test, or only on nodes of a parameter server.
	noEffect := []string{"HVD_RENDEZVOUS_HOST", "HVD_RENDEZVOUS_PORT", "HVD_SIZE", "HVD_STALENESS",
		"HVD_PS_REPLICAS", "HVD_SUBDOMAIN"}
	for _, mode := range []string{"event", "lockstep"} {
		all := map[string]string{"HVD_NEGOTIATION": mode, "HVD_SECRET": key,
			"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
		for _, s := range config.Settings() {
			if s.Scope == config.PerProcess || s.Scope == config.ByLauncher {
				continue
			}
			t.Run(mode+"/"+s.Name, func(t *testing.T) {
				given := all[s.Name]
				if given == "" {
					given = s.Default
				}
				other := otherValue(t, s, given)
				var want []string // one error for each rank; nil if Init must succeed
				switch s.Scope {
				case config.PerJob:
					before := given
					if before == "" {
						before = "not set"
					}
					says := fmt.Sprintf(
						"settings that must be the same at all ranks differ: %s is %s at ranks 0 and 2, %s at rank 1", s.Name, before, other)
					want = []string{says, says, says}
				case config.ToMeet:
					if !slices.Contains(noEffect, s.Name) {
						t.Fatalf("add which errors ranks get that differ in %s", s.Name)
					}
				}
				for r, err := range initAll(t, all, nil, map[string]string{s.Name: other}, nil) {
					switch {
					case want == nil && err != nil:
						t.Errorf("rank %d: got %v, want no error", r, err)
					case want != nil && (err == nil || !strings.Contains(err.Error(), want[r])):
						t.Errorf("rank %d: got %v, want %q", r, err, want[r])
					case err != nil && strings.Contains(err.Error(), key):
						t.Errorf("rank %d shows the secret: %v", r, err)
					}
				}
			})
		}
	}
}
