package rank

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/ops/tcp"
)

// TCPConfig returns the configuration of the TCP backend for the given settings.
func TCPConfig(set *config.Config) (cfg tcp.Config, err error) {
	cfg.Deterministic = set.Deterministic
	if cfg.Forced, err = tcp.ParseForced(set.Algorithm); err != nil {
		return cfg, fmt.Errorf("HVD_ALGORITHM: %w", err)
	}
	return cfg, nil
}
