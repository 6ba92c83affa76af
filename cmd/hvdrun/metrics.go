package main

import (
	"context"
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/metrics"
)

// serveMetrics serves the metrics of all ranks until stop is called. It requests them from the ranks when it
// is scraped.
func (r *runner) serveMetrics(hosts []launch.Host, np int, ranks *joblink.Launcher) (stop func(), err error) {
	if r.metricsAddr == "" {
		return func() {}, nil
	}
	if _, err := metrics.Address(r.metricsAddr, 0); err != nil {
		return nil, usagef("--metrics-addr: %w", err)
	}
	names, err := hostNames(hosts, np)
	if err != nil {
		return nil, err
	}
	job := metrics.NewJob(metrics.JobConfig{
		Hosts: names, Log: r.logger(),
		Ask: func(ctx context.Context) (map[int][]byte, error) {
			answers, _, err := ranks.Ask(ctx, joblink.Metrics)
			return answers, err
		},
	})
	server, err := metrics.Serve(r.metricsAddr, job.Handler(), r.logger())
	if err != nil {
		_ = job.Close() // nothing has been requested yet
		return nil, fmt.Errorf("--metrics-addr: %w", err)
	}
	fmt.Fprintf(r.stderr, "hvdrun: metrics at http://%s/metrics\n", server.Addr())
	return func() {
		// Requests to ranks are cancelled first, so that scrapes that wait for them end at once. The errors
		// do not matter.
		_ = job.Close()
		_ = server.Close()
	}, nil
}

// hostNames returns for each rank the name of its host.
func hostNames(hosts []launch.Host, np int) ([]string, error) {
	if hosts == nil {
		name, err := os.Hostname()
		if err != nil {
			return nil, err
		}
		hosts = []launch.Host{{Name: name, Slots: np}}
	}
	places, err := launch.Assign(hosts, np)
	if err != nil {
		return nil, usageError{err}
	}
	names := make([]string, np)
	for rank, p := range places {
		names[rank] = hosts[p.Host].Name
	}
	return names, nil
}
