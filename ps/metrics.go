package ps

import (
	"fmt"
	"net/http"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/metrics"
)

// MetricsHandler returns a handler for /metrics that serves the counters of this node (docs/metrics.md), for
// a program with an HTTP server of its own. A program without one can set HVD_METRICS_ADDR.
func (p *Postoffice) MetricsHandler() http.Handler { return metrics.NodeHandler(p.van.Stats) }

// serveMetrics serves the metrics of this node if HVD_METRICS_ADDR says so. If the address is in use, it logs
// a warning.
func (p *Postoffice) serveMetrics() error {
	if p.set.MetricsAddr == "" {
		return nil
	}
	at, err := metrics.Address(p.set.MetricsAddr, p.process(p.ID()))
	if err != nil {
		return fmt.Errorf("HVD_METRICS_ADDR: %w", err)
	}
	server, err := metrics.Serve(at, p.MetricsHandler(), p.log)
	if err != nil {
		p.log.Warn("ps: serving metrics failed (HVD_METRICS_ADDR)", zap.Error(err))
		return nil
	}
	p.metrics = server
	p.log.Info("ps: serving metrics", zap.String("addr", server.Addr()))
	return nil
}
