package metrics_test

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func histogramOf(durations ...time.Duration) (h trace.Histogram) {
	for _, d := range durations {
		h.Add(d)
	}
	return h
}

// full returns statistics of rank 0 in which every metric of a rank and of the coordinator has a value.
func full() trace.Stats {
	return trace.Stats{
		Rank: 0, Size: 4, Host: "h1", Epoch: 2,
		Operations: []trace.Operations{
			{Kind: message.Allreduce, Backend: message.SHM, Durations: histogramOf(time.Millisecond,
				2*time.Millisecond, 3*time.Hour), Tensors: 161},
			{Kind: message.Broadcast, Backend: message.TCP, Durations: histogramOf(time.Second), Tensors: 1},
		},
		Moved: []trace.Moved{
			{Kind: message.Allreduce, Backend: message.SHM, DType: tensor.Float32, Bytes: 102 << 20},
			{Kind: message.Allreduce, Backend: message.SHM, DType: tensor.Float16, Bytes: 5},
		},
		Negotiation: histogramOf(0, 5*time.Microsecond), Queued: histogramOf(7 * time.Microsecond),
		FusedTensors: 161, FusedBytes: 64 << 20, FusionResponses: 2, FusionRoomBytes: 256 << 20, Steps: 6,
		Phases: [...]time.Duration{5 * time.Second, time.Second, time.Second / 2,
			3 * time.Second},
		FusionThresholdBytes: 128 << 20,
		CacheHits:            300, CacheMisses: 161, Refused: 3, Failed: 4, InFlight: 5,
		ClockOffset: -1500 * time.Millisecond, ClockError: 50 * time.Microsecond, ClockKnown: true,
		TimelineDropped: 6,
		Coordinator: &trace.Coordinator{
			Cycles: 70, Late: []trace.HeldUp{{Rank: 0, Last: 8, Held: time.Second},
				{Rank: 3, Last: 90, Held: 9500 * time.Millisecond}},
			Stalled: 10, StallReports: 11,
		},
		Tuning: &trace.Tuning{Active: true, Rounds: 12, BytesPerSecond: 1.5e9,
			Values: message.Tuning{FusionThresholdBytes: 13, CycleTime: 14 * time.Millisecond,
				SegmentBytes: 15, OneLevelAllgather: true}},
	}
}

// other returns statistics of rank 1 in which every metric of a rank has a value, and no metric of the
// coordinator has one.
func other() trace.Stats {
	s := full()
	s.Rank, s.Coordinator, s.Tuning = 1, nil, nil
	return s
}

func gather(t *testing.T, c prometheus.Collector) []*dto.MetricFamily {
	t.Helper()
	// A pedantic registry fails if Collect returns a metric that Describe does not announce.
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

func TestCollector(t *testing.T) {
	const want = `
# HELP hvd_autotune_active 1 while autotune searches for settings, and 0 after that.
# TYPE hvd_autotune_active gauge
hvd_autotune_active 1
# HELP hvd_autotune_algorithm 1, with the algorithm of allreduces over TCP that autotune has chosen last, or table.
# TYPE hvd_autotune_algorithm gauge
hvd_autotune_algorithm{algorithm="table"} 1
# HELP hvd_autotune_best_bytes_per_second Score of the best settings so far: bytes that allreduces of all ranks reduce per second. 0 if nothing was measured.
# TYPE hvd_autotune_best_bytes_per_second gauge
hvd_autotune_best_bytes_per_second 1.5e+09
# HELP hvd_autotune_cache_enabled 1 if autotune has switched the response cache on last, and 0 if it has switched it off.
# TYPE hvd_autotune_cache_enabled gauge
hvd_autotune_cache_enabled 1
# HELP hvd_autotune_cycle_time_seconds Cycle time that autotune has chosen last.
# TYPE hvd_autotune_cycle_time_seconds gauge
hvd_autotune_cycle_time_seconds 0.014
# HELP hvd_autotune_fusion_threshold_bytes Fusion threshold that autotune has chosen last.
# TYPE hvd_autotune_fusion_threshold_bytes gauge
hvd_autotune_fusion_threshold_bytes 13
# HELP hvd_autotune_hierarchical_allgather 1 if allgathers run on two levels with the settings that autotune has chosen last, and 0 if not.
# TYPE hvd_autotune_hierarchical_allgather gauge
hvd_autotune_hierarchical_allgather 0
# HELP hvd_autotune_hierarchical_allreduce 1 if allreduces run on two levels with the settings that autotune has chosen last, and 0 if not.
# TYPE hvd_autotune_hierarchical_allreduce gauge
hvd_autotune_hierarchical_allreduce 1
# HELP hvd_autotune_rounds Rounds of the search that have ended. A round measures one point.
# TYPE hvd_autotune_rounds gauge
hvd_autotune_rounds 12
# HELP hvd_autotune_segment_bytes Segment size of operations over TCP that autotune has chosen last.
# TYPE hvd_autotune_segment_bytes gauge
hvd_autotune_segment_bytes 15
# HELP hvd_clock_error_seconds Maximum error of hvd_start_offset_seconds, in either direction.
# TYPE hvd_clock_error_seconds gauge
hvd_clock_error_seconds 5e-05
# HELP hvd_start_offset_seconds Time by which rank 0 started before this rank, as last measured. It changes if the clocks drift apart. A wrong time of day does not affect it.
# TYPE hvd_start_offset_seconds gauge
hvd_start_offset_seconds -1.5
# HELP hvd_collective_bytes_total Bytes that this rank contributed to operations, or received in broadcasts.
# TYPE hvd_collective_bytes_total counter
hvd_collective_bytes_total{backend="shm",dtype="float16",op="allreduce"} 5
hvd_collective_bytes_total{backend="shm",dtype="float32",op="allreduce"} 1.06954752e+08
# HELP hvd_collective_duration_seconds Time from the beginning of the execution of a fused response to its end.
# TYPE hvd_collective_duration_seconds histogram
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="9.5367431640625e-07"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="3.814697265625e-06"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="1.52587890625e-05"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="6.103515625e-05"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.000244140625"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.0009765625"} 0
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.00390625"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.015625"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.0625"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="0.25"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="1"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="4"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="16"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="64"} 2
hvd_collective_duration_seconds_bucket{backend="shm",op="allreduce",le="+Inf"} 3
hvd_collective_duration_seconds_sum{backend="shm",op="allreduce"} 10800.003
hvd_collective_duration_seconds_count{backend="shm",op="allreduce"} 3
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="9.5367431640625e-07"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="3.814697265625e-06"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="1.52587890625e-05"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="6.103515625e-05"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.000244140625"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.0009765625"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.00390625"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.015625"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.0625"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="0.25"} 0
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="1"} 1
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="4"} 1
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="16"} 1
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="64"} 1
hvd_collective_duration_seconds_bucket{backend="tcp",op="broadcast",le="+Inf"} 1
hvd_collective_duration_seconds_sum{backend="tcp",op="broadcast"} 1
hvd_collective_duration_seconds_count{backend="tcp",op="broadcast"} 1
# HELP hvd_collective_tensors_total Tensors in the fused responses that were executed.
# TYPE hvd_collective_tensors_total counter
hvd_collective_tensors_total{backend="shm",op="allreduce"} 161
hvd_collective_tensors_total{backend="tcp",op="broadcast"} 1
# HELP hvd_cycles_total Negotiation cycles that the coordinator has made.
# TYPE hvd_cycles_total counter
hvd_cycles_total 70
# HELP hvd_epoch Number of the job's epoch. It grows with each Init, and counters start again from 0.
# TYPE hvd_epoch gauge
hvd_epoch 2
# HELP hvd_failed_tensors_total Tensors that completed with an error because the job failed or was shut down.
# TYPE hvd_failed_tensors_total counter
hvd_failed_tensors_total 4
# HELP hvd_fusion_buffer_bytes Fusion threshold: the maximum number of bytes that are fused into one response. 0 disables fusion.
# TYPE hvd_fusion_buffer_bytes gauge
hvd_fusion_buffer_bytes 1.34217728e+08
# HELP hvd_fusion_bytes_total Bytes in executed responses of kinds that can be fused. A response counts for at most the fusion threshold.
# TYPE hvd_fusion_bytes_total counter
hvd_fusion_bytes_total 6.7108864e+07
# HELP hvd_fusion_fill_ratio Mean size of executed responses of kinds that can be fused, as a share of the fusion threshold.
# TYPE hvd_fusion_fill_ratio gauge
hvd_fusion_fill_ratio 0.25
# HELP hvd_fusion_responses_total Executed responses of kinds that can be fused.
# TYPE hvd_fusion_responses_total counter
hvd_fusion_responses_total 2
# HELP hvd_fusion_tensors_total Tensors in executed responses of kinds that can be fused.
# TYPE hvd_fusion_tensors_total counter
hvd_fusion_tensors_total 161
# HELP hvd_phase_seconds_total Wall time of the rank by phase: computing is without an operation in flight, communicating is while one is executed, queued is while one is granted but none executed, and waiting is the rest, for other ranks or for the negotiation. At any moment a rank is in one phase.
# TYPE hvd_phase_seconds_total counter
hvd_phase_seconds_total{phase="communicating"} 3
hvd_phase_seconds_total{phase="computing"} 5
hvd_phase_seconds_total{phase="queued"} 0.5
hvd_phase_seconds_total{phase="waiting"} 1
# HELP hvd_queue_depth Tensors that are submitted and not completed. A grouped allreduce counts as one tensor.
# TYPE hvd_queue_depth gauge
hvd_queue_depth 5
# HELP hvd_rank_info 1, with the rank and host of the process, to be joined with its other metrics.
# TYPE hvd_rank_info gauge
hvd_rank_info{host="h1",rank="0"} 1
# HELP hvd_rank_last_total Tensors for which this rank's request arrived last.
# TYPE hvd_rank_last_total counter
hvd_rank_last_total{late_rank="0"} 8
hvd_rank_last_total{late_rank="3"} 90
# HELP hvd_rank_lateness_seconds_total Wall time during which this rank held up all others: they had requested an operation and this rank had not. If several operations waited at the same time, the time counts once.
# TYPE hvd_rank_lateness_seconds_total counter
hvd_rank_lateness_seconds_total{late_rank="0"} 1
hvd_rank_lateness_seconds_total{late_rank="3"} 9.5
# HELP hvd_refused_tensors_total Tensors that completed with an error that affects only them, for example because ranks disagree on the shape.
# TYPE hvd_refused_tensors_total counter
hvd_refused_tensors_total 3
# HELP hvd_response_cache_hits_total Requests that were in the response cache and were sent as one bit.
# TYPE hvd_response_cache_hits_total counter
hvd_response_cache_hits_total 300
# HELP hvd_response_cache_misses_total Requests that were not in the response cache and were sent in full.
# TYPE hvd_response_cache_misses_total counter
hvd_response_cache_misses_total 161
# HELP hvd_stall_reports_total Stall warnings that were logged.
# TYPE hvd_stall_reports_total counter
hvd_stall_reports_total 11
# HELP hvd_stalled_tensors Tensors that have waited for ranks longer than HOROVOD_STALL_CHECK_TIME_SECONDS.
# TYPE hvd_stalled_tensors gauge
hvd_stalled_tensors 10
# HELP hvd_steps_total Training steps that the program, or the optimizer of gohvd.torch, has marked as begun.
# TYPE hvd_steps_total counter
hvd_steps_total 6
# HELP hvd_timeline_dropped_operations_total Operations that are missing in the timeline because its file could not be written or was written too slowly.
# TYPE hvd_timeline_dropped_operations_total counter
hvd_timeline_dropped_operations_total 6
# HELP hvd_world_size Ranks in the job.
# TYPE hvd_world_size gauge
hvd_world_size 4
`
	c := metrics.NewCollector(full)
	var names []string
	for _, f := range gather(t, c) {
		// These two histograms are left out. They differ from hvd_collective_duration_seconds only in that
		// they have no labels.
		if name := f.GetName(); name != "hvd_negotiation_seconds" && name != "hvd_queue_seconds" {
			names = append(names, name)
		}
	}
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

// Each number in trace.Stats is changed in turn, and the text of the metrics changes each time. No metric
// contains the name of a tensor.
func TestNothingIsForgotten(t *testing.T) {
	text := func(s trace.Stats) string {
		got, err := metrics.Text(func() trace.Stats { return s })
		if err != nil {
			t.Fatal(err)
		}
		// The metrics of the Go runtime and of the process are left out, because they change all the time.
		var ours []string
		for line := range strings.Lines(string(got)) {
			if strings.HasPrefix(line, "hvd_") {
				ours = append(ours, line)
			}
		}
		return strings.Join(ours, "")
	}
	before := text(full())
	leaves := 0
	var walk func(path string, get func(*trace.Stats) reflect.Value)
	walk = func(path string, get func(*trace.Stats) reflect.Value) {
		changed := full()
		v := get(&changed)
		switch v.Kind() {
		case reflect.Pointer:
			walk(path, func(s *trace.Stats) reflect.Value { return get(s).Elem() })
			return
		case reflect.Struct:
			for i := range v.NumField() {
				walk(path+"."+v.Type().Field(i).Name, func(s *trace.Stats) reflect.Value {
					return get(s).Field(i)
				})
			}
			return
		case reflect.Slice, reflect.Array:
			for i := range v.Len() {
				walk(fmt.Sprintf("%s[%d]", path, i), func(s *trace.Stats) reflect.Value {
					return get(s).Index(i)
				})
			}
			return
		case reflect.String:
			v.SetString(v.String() + "x")
		case reflect.Bool:
			v.SetBool(!v.Bool())
		// Only the lowest bit is flipped, so that kinds, backends and element types stay valid.
		case reflect.Uint8, reflect.Uint64:
			v.SetUint(v.Uint() ^ 1)
		case reflect.Int, reflect.Int32, reflect.Int64:
			v.SetInt(v.Int() + 1<<20) // large enough to be visible after a duration was rounded
		case reflect.Float64:
			v.SetFloat(v.Float() * 2)
		default:
			t.Fatalf("%s: a %v is new here", path, v.Kind())
		}
		leaves++
		if text(changed) == before {
			t.Errorf("%s has no effect", path)
		}
	}
	walk("Stats", func(s *trace.Stats) reflect.Value { return reflect.ValueOf(s).Elem() })
	if leaves < 100 {
		t.Errorf("looked at %d values only", leaves)
	}
}

// If all values are known, the collector returns every metric that Describe announces. If a value is unknown,
// its metric is left out. It is not exported as 0.
func TestUnknownIsLeftOut(t *testing.T) {
	c := metrics.NewCollector(full)
	described := make(chan *prometheus.Desc, 100)
	c.Describe(described)
	if got := gather(t, c); len(got) != len(described) {
		t.Errorf("got %d metrics of %d that are described", len(got), len(described))
	}
	s := full()
	s.Coordinator, s.Tuning, s.ClockKnown, s.FusionRoomBytes = nil, nil, false, 0
	for _, f := range gather(t, metrics.NewCollector(func() trace.Stats { return s })) {
		switch f.GetName() {
		case "hvd_cycles_total", "hvd_rank_last_total", "hvd_rank_lateness_seconds_total",
			"hvd_stalled_tensors", "hvd_stall_reports_total",
			"hvd_start_offset_seconds", "hvd_clock_error_seconds", "hvd_fusion_fill_ratio",
			"hvd_autotune_active", "hvd_autotune_rounds", "hvd_autotune_cache_enabled":
			t.Errorf("%s is there: %v", f.GetName(), f)
		}
	}
	s = full()
	s.FusionThresholdBytes, s.FusionRoomBytes = 0, 0 // fusion is off
	for _, f := range gather(t, metrics.NewCollector(func() trace.Stats { return s })) {
		for _, m := range f.Metric {
			if g := m.GetGauge().GetValue(); math.IsNaN(g) || math.IsInf(g, 0) {
				t.Errorf("%s is %v", f.GetName(), g)
			}
		}
	}
}

// The cumulative counts of the buckets agree with the counts of trace.Histogram at each bound.
func TestHistogram(t *testing.T) {
	for name, h := range map[string]trace.Histogram{
		"nothing": {},
		"zero":    histogramOf(0, 0),
		"one":     histogramOf(time.Second),
		"gaps": histogramOf(0, 3*time.Microsecond, 3*time.Microsecond, time.Millisecond, 2*time.Second,
			64*time.Second),
		"too long": histogramOf(65*time.Second, 3*time.Hour),
		"all": {Buckets: [trace.NumBuckets]uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0,
			1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, Sum: time.Hour},
		"a bound":   histogramOf(time.Second / 4),
		"above one": histogramOf(time.Second/4 + 1),
	} {
		t.Run(name, func(t *testing.T) {
			var got *dto.Histogram
			for _, f := range gather(t, metrics.NewCollector(func() trace.Stats {
				return trace.Stats{Negotiation: h}
			})) {
				if f.GetName() == "hvd_negotiation_seconds" {
					got = f.Metric[0].Histogram
				}
			}
			if got.GetSampleCount() != h.Count() || got.GetSampleSum() != h.Sum.Seconds() {
				t.Errorf("got %d of sum %v, want %d of %v", got.GetSampleCount(), got.GetSampleSum(),
					h.Count(), h.Sum.Seconds())
			}
			next, bounds := 0, 0
			for _, b := range got.Bucket {
				var want uint64
				for next = 0; trace.UpperBound(next) <= b.GetUpperBound(); next++ {
					want += h.Buckets[next]
				}
				if next == 0 || trace.UpperBound(next-1) != b.GetUpperBound() ||
					b.GetCumulativeCount() != want {
					t.Errorf("got %d up to %v s, want %d", b.GetCumulativeCount(), b.GetUpperBound(), want)
				}
				bounds++
			}
			if bounds != 14 || next != trace.NumBuckets-1 {
				t.Errorf("got %d buckets, want every second of ours from the first to 64 s: %v",
					bounds, got.Bucket)
			}
		})
	}
}

// Prometheus's linters accept the names, units and help texts of all metrics.
func TestNames(t *testing.T) {
	problems, err := testutil.CollectAndLint(metrics.NewCollector(full))
	if err != nil || len(problems) > 0 {
		t.Errorf("got %v and error %v", problems, err)
	}
	for name, get := range map[string]func() trace.Stats{"rank 0": full, "rank 1": other} {
		text, err := metrics.Text(get)
		if err != nil {
			t.Fatal(err)
		}
		if out, content := testnet.Promtool(t, "", string(text), "check", "metrics"); !content || out != "" {
			t.Errorf("%s: promtool: %s", name, out)
		}
	}
	// Promtool must find a fault in a metric that violates the rules. This shows that promtool does check the
	// metrics.
	if _, content := testnet.Promtool(t, "", "# TYPE hvd_x_milliseconds counter\nhvd_x_milliseconds 1\n",
		"check", "metrics"); content {
		t.Error("promtool accepts what it should not")
	}
}

// request sends a GET request for path to the handler h and returns the response. headers has the name of
// each header, followed by its value.
func request(h http.Handler, path string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestHandler(t *testing.T) {
	h := metrics.Handler(full)
	for _, c := range []struct{ accept, contentType, has string }{
		{"", "text/plain; version=0.0.4", "hvd_world_size 4\n"},
		{"application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0",
			"# EOF\n"},
		{"application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited",
			"application/vnd.google.protobuf", "hvd_world_size"},
	} {
		w := request(h, "/metrics", "Accept", c.accept, "Accept-Encoding", "gzip")
		if w.Code != http.StatusOK || !strings.HasPrefix(w.Header().Get("Content-Type"), c.contentType) ||
			!strings.Contains(w.Body.String(), c.has) {
			t.Errorf("accept %q: got %d, %v and %d bytes, want %s with %q", c.accept, w.Code, w.Header(),
				w.Body.Len(), c.contentType, c.has)
		}
	}
	body := request(h, "/metrics").Body.String()
	for _, want := range []string{"go_goroutines ", "process_resident_memory_bytes ",
		`hvd_build_info{goversion="go`} {
		if !strings.Contains(body, "\n"+want) {
			t.Errorf("%s is missing in %s", want, body)
		}
	}
	if w := request(h, "/healthz"); w.Code != http.StatusOK || w.Body.String() != "ok\n" {
		t.Errorf("/healthz: got %d %q", w.Code, w.Body.String())
	}
	if w := request(h, "/"); w.Code != http.StatusNotFound {
		t.Errorf("/: got %d", w.Code)
	}
}

func BenchmarkScrape(b *testing.B) {
	h := metrics.Handler(full)
	b.ReportAllocs()
	for b.Loop() {
		w := request(h, "/metrics")
		b.SetBytes(int64(w.Body.Len()))
	}
}

func BenchmarkText(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		text, err := metrics.Text(full)
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(int64(len(text)))
	}
}
