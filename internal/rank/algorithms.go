package rank

import (
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/ops/tcp"
)

// TCPConfig returns the configuration of the TCP backend for the given settings. At rank 0 it reads the table
// of algorithms, because only rank 0 chooses algorithms.
func TCPConfig(set *config.Config) (cfg tcp.Config, err error) {
	cfg.Deterministic = set.Deterministic
	if cfg.Forced, err = tcp.ParseForced(set.Algorithm); err != nil {
		return cfg, fmt.Errorf("HVD_ALGORITHM: %w", err)
	}
	if set.AlgorithmTable == "" || set.Rank > 0 {
		return cfg, nil
	}
	text, err := os.ReadFile(set.AlgorithmTable)
	if err == nil {
		cfg.Table, err = tcp.ParseTable(text)
	}
	if err != nil {
		return cfg, fmt.Errorf("HVD_ALGORITHM_TABLE: read %s: %w", set.AlgorithmTable, err)
	}
	return cfg, nil
}
