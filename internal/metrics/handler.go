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

// registry returns that of a rank. It is our own: what the program around us registers elsewhere is not shown here.
func registry(get func() trace.Stats) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(NewCollector(get), buildInfo("hvd_build_info"),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Handler answers /metrics with the metrics of a rank, of the Go runtime and of the process, and /healthz with 200. get is as for
// NewCollector.
func Handler(get func() trace.Stats) http.Handler {
	// Not compressed: the rank's cores have better to do, and it is some 20 KiB.
	return paths(promhttp.HandlerFor(registry(get), promhttp.HandlerOpts{EnableOpenMetrics: true, DisableCompression: true}))
}

// paths returns those of a server of metrics.
func paths(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		// Who has asked and gone needs no answer.
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}

// Text returns what Handler shows at /metrics, in Prometheus's text format: what a rank answers Job.
func Text(get func() trace.Stats) ([]byte, error) {
	families, err := registry(get).Gather()
	if err != nil {
		return nil, fmt.Errorf("metrics: gather: %w", err)
	}
	var text bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			return nil, fmt.Errorf("metrics: %s as text: %w", f.GetName(), err)
		}
	}
	return text.Bytes(), nil
}
