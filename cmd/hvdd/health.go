package main

import (
	"encoding/json"
	"fmt"
	"net/http"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/sidecar"
)

// serveHealth serves /healthz at addr until the caller closes the server. metrics.Address describes the forms
// of addr.
func serveHealth(addr string, s *sidecar.Server, log *zap.Logger) (*metrics.Server, error) {
	if _, err := metrics.Address(addr, 0); err != nil {
		return nil, usagef("--health: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		r := s.Report()
		w.Header().Set("Content-Type", "application/json")
		if s.Death() != nil || r.State == sidecar.StateEnded {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		// Encode fails only if the client has disconnected.
		_ = json.NewEncoder(w).Encode(r)
	})
	server, err := metrics.Serve(addr, mux, log)
	if err != nil {
		return nil, fmt.Errorf("--health: %w", err)
	}
	return server, nil
}
