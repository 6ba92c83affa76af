package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/sidecar"
)

// healthTimeout is the time limit for reading a request, and for writing its response.
const healthTimeout = 5 * time.Second

// health is the response of /healthz. It has the same fields as StatusReport in the sidecar's protocol.
type health struct {
	Version    string `json:"version"`
	PID        uint32 `json:"pid"`
	State      string `json:"state"`
	Clients    uint32 `json:"clients"`
	Operations uint64 `json:"operations"`
	InFlight   uint64 `json:"in_flight"`
}

// serveHealth serves /healthz at addr until stop is called. addr has the form PORT or HOST:PORT. The default
// host is 127.0.0.1.
func serveHealth(addr string, s *sidecar.Server, log *zap.Logger) (stop func(), err error) {
	if !strings.Contains(addr, ":") {
		addr = ":" + addr
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, usagef("--health %s: %w", addr, err)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("--health: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		r := s.Report()
		w.Header().Set("Content-Type", "application/json")
		if s.Death() != nil || r.State == sidecar.StateEnded {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		// Encode fails only if the client has disconnected.
		_ = json.NewEncoder(w).Encode(health{r.Version, r.Pid, r.State, r.Clients, r.Operations, r.InFlight})
	})
	server := &http.Server{
		Handler: mux, ReadTimeout: healthTimeout, WriteTimeout: healthTimeout, IdleTimeout: healthTimeout,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       zap.NewStdLog(log),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("/healthz is no longer served", zap.Error(err))
		}
	}()
	return func() {
		_ = server.Close() // errors of connections do not matter at the end
		<-done
	}, nil
}
