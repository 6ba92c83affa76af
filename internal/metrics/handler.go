package metrics

import (
	"bytes"
	"fmt"
	"io"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"

	"github.com/gohvd/gohvd/internal/trace"
)

// registry returns a registry with the metrics of a rank or a node, which c collects. It is separate from the
// default registry, in which the program may register metrics of its own.
func registry(c prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(c, buildInfo("hvd_build_info"),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Handler returns a handler that serves /metrics and /healthz. /metrics returns the metrics of a rank, of the
// Go runtime and of the process. /healthz returns status 200. As for NewCollector, get must be safe for
// concurrent use.
func Handler(get func() trace.Stats) http.Handler { return handler(NewCollector(get)) }

// NodeHandler is like Handler, for a node of a parameter server.
func NodeHandler(get func() trace.Node) http.Handler { return handler(nodeCollector(get)) }

func handler(c prometheus.Collector) http.Handler {
	// The response is not compressed, because it has only about 20 KiB and the job needs the processor.
	return paths(promhttp.HandlerFor(registry(c), promhttp.HandlerOpts{EnableOpenMetrics: true,
		DisableCompression: true}))
}

// paths returns a handler that serves /metrics with the given handler, and /healthz with status 200.
func paths(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		// The error is ignored, because it means that the client has closed the connection.
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}

// Text returns the text that Handler serves at /metrics, in Prometheus's text format. A rank sends this text
// to the launcher when a Job asks for it.
func Text(get func() trace.Stats) ([]byte, error) { return text(NewCollector(get)) }

// NodeText is like Text, for a node of a parameter server.
func NodeText(get func() trace.Node) ([]byte, error) { return text(nodeCollector(get)) }

func text(c prometheus.Collector) ([]byte, error) {
	families, err := registry(c).Gather()
	if err != nil {
		return nil, fmt.Errorf("metrics: gather: %w", err)
	}
	var b bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&b, f); err != nil {
			return nil, fmt.Errorf("metrics: write %s as text: %w", f.GetName(), err)
		}
	}
	return b.Bytes(), nil
}
