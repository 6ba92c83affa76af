package main

import (
	"context"
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/metrics"
)

// serveMetrics serves the metrics of all ranks until stop is called. At each scrape it requests the metrics
// from the ranks. counts is for an elastic job.
func (r *runner) serveMetrics(j *job, ranks *joblink.Launcher,
	counts *elasticCounts) (stop func(), err error) {
	if r.metricsAddr == "" {
		return func() {}, nil
	}
	if _, err := metrics.Address(r.metricsAddr, 0); err != nil {
		return nil, usagef("--metrics-addr: %w", err)
	}
	hosts := counts.get
	if j.elastic == nil {
		names := make([]string, j.np) // with --mpi, mpirun places the ranks
		if !r.mpi.on {
			if names, err = hostNames(j.hosts, j.nodes, j.np); err != nil {
				return nil, err
			}
		}
		hosts = func() ([]string, *metrics.Elastic) { return names, nil }
	}
	job := metrics.NewJob(metrics.JobConfig{
		Ranks: hosts, Log: r.logger(),
		Ask: func(ctx context.Context) (map[int][]byte, error) {
			answers, _, err := ranks.Ask(ctx, joblink.Metrics)
			return answers, err
		},
	})
	server, err := metrics.Serve(r.metricsAddr, job.Handler(), r.logger())
	if err != nil {
		_ = job.Close() // no error to report, because nothing has been requested yet
		return nil, fmt.Errorf("--metrics-addr: %w", err)
	}
	fmt.Fprintf(r.stderr, "hvdrun: metrics at http://%s/metrics\n", server.Addr())
	return func() {
		// First cancel the requests to ranks, so that scrapes that wait for them end at once. Errors do not
		// matter at the end of a job.
		_ = job.Close()
		_ = server.Close()
	}, nil
}

// hostNames returns the host name of each rank or, in a job with a parameter server, of each node. nodes is
// nil in a job of ranks.
func hostNames(hosts []launch.Host, nodes *launch.Nodes, np int) ([]string, error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	if hosts == nil {
		hosts = []launch.Host{{Name: name, Slots: np}}
	}
	var places []launch.Assignment
	if nodes != nil {
		hosts, places, err = launch.AssignNodes(hosts, nodes, name)
	} else {
		places, err = launch.Assign(hosts, np)
	}
	if err != nil {
		return nil, usageError{err}
	}
	names := make([]string, np)
	for rank, p := range places {
		names[rank] = hosts[p.Host].Name
	}
	return names, nil
}
