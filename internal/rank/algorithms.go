package rank

import (
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/ops/tcp"
)

// TCPConfig returns the configuration of the TCP backend for the given settings. At rank 0 it reads the table
// of algorithms, which the other ranks learn from rank 0 when they join.
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

// tableText returns the table of algorithms for the check-in record. The text is empty if there is no table.
func tableText(t tcp.Table) string {
	if t == nil {
		return ""
	}
	return string(t.Encode())
}

// tableOf returns the table of algorithms in rank 0's check-in record. It is nil if rank 0 has only the
// default table.
func tableOf(text string) (tcp.Table, error) {
	if text == "" {
		return nil, nil
	}
	t, err := tcp.ParseTable([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("rank 0 sent a malformed table of algorithms: %w", err)
	}
	return t, nil
}
