package ps

import (
	"fmt"
	"net/http"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/ps/van"
)

// MetricsHandler returns a handler for /metrics that serves the counters of this node (docs/metrics.md), for
// a program with an HTTP server of its own. A program without one can set HVD_METRICS_ADDR.
func (p *postoffice) MetricsHandler() http.Handler { return metrics.NodeHandler(p.stats) }

// metricsAddress returns the address at which a node serves its metrics.
func (p *postoffice) metricsAddress(id int) (string, error) {
	at, err := metrics.Address(p.set.MetricsAddr, max(p.process(id), 0))
	if err != nil {
		return "", fmt.Errorf("HVD_METRICS_ADDR: %w", err)
	}
	return at, nil
}

// checkMetrics checks HVD_METRICS_ADDR before this node has its id. It assumes that the node gets the rank
// that it wants, or otherwise rank 0.
func (p *postoffice) checkMetrics() error {
	if p.set.MetricsAddr == "" {
		return nil
	}
	id := van.SchedulerID
	switch rank := max(p.cfg.Rank, 0); p.cfg.Role {
	case van.Server:
		id = van.ServerID(rank)
	case van.Worker:
		id = van.WorkerID(rank)
	}
	_, err := p.metricsAddress(id)
	return err
}

// serveMetrics serves the metrics of this node if HVD_METRICS_ADDR says so. If the address is in use, it logs
// a warning.
func (p *postoffice) serveMetrics() error {
	if p.set.MetricsAddr == "" {
		return nil
	}
	at, err := p.metricsAddress(p.van.ID())
	if err != nil {
		return err
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
