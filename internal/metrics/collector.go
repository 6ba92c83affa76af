package metrics

import (
	"runtime"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/trace"
)

// These constants are the names of labels.
const (
	// labelOp is the label for the kind of an operation. It has the same name as in Horovod.
	labelOp        = "op"
	labelBackend   = "backend"
	labelDType     = "dtype"
	labelAlgorithm = "algorithm"
	labelLate      = "late_rank"
	labelPhase     = "phase"
	labelRank      = "rank"
	labelHost      = "host"
	labelVersion   = "version"
	labelGo        = "goversion"
)

const rankInfoName = "hvd_rank_info"

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// number is a metric without labels, with the function that returns its value.
type number struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*trace.Stats) float64
}

func counter(name, help string, value func(*trace.Stats) uint64) number {
	return number{desc(name, help), prometheus.CounterValue, func(s *trace.Stats) float64 {
		return float64(value(s))
	}}
}

func gauge(name, help string, value func(*trace.Stats) float64) number {
	return number{desc(name, help), prometheus.GaugeValue, value}
}

// These metrics are exported by every rank.
var (
	rankInfo = desc(rankInfoName,
		"1, with the rank and host of the process, to be joined with its other metrics.", labelRank,
		labelHost)

	duration = desc("hvd_collective_duration_seconds",
		"Time from the beginning of the execution of a fused response to its end.", labelOp,
		labelBackend)
	tensors = desc("hvd_collective_tensors_total", "Tensors in the fused responses that were executed.",
		labelOp, labelBackend)
	moved = desc("hvd_collective_bytes_total",
		"Bytes that this rank contributed to operations, or received in broadcasts.", labelOp, labelBackend,
		labelDType)

	negotiation = desc("hvd_negotiation_seconds",
		"Time from the submission of a tensor or a grouped allreduce to its grant, which comes when all ranks have submitted it.")
	queued = desc("hvd_queue_seconds",
		"Time from the grant of a fused response to the beginning of its execution.")

	numbers = []number{
		gauge("hvd_world_size", "Ranks in the job.", func(s *trace.Stats) float64 { return float64(s.Size) }),
		gauge("hvd_epoch", "Number of the job's epoch. It grows with each Init, and counters start again from 0.",
			func(s *trace.Stats) float64 { return float64(s.Epoch) }),
		gauge("hvd_queue_depth",
			"Tensors that are submitted and not completed. A grouped allreduce counts as one tensor.",
			func(s *trace.Stats) float64 { return float64(s.InFlight) }),
		counter("hvd_fusion_responses_total", "Executed responses of kinds that can be fused.",
			func(s *trace.Stats) uint64 { return s.FusionResponses }),
		counter("hvd_fusion_tensors_total", "Tensors in executed responses of kinds that can be fused.",
			func(s *trace.Stats) uint64 { return s.FusedTensors }),
		counter("hvd_fusion_bytes_total",
			"Bytes in executed responses of kinds that can be fused. A response counts for at most the fusion threshold.", func(s *trace.Stats) uint64 { return s.FusedBytes }),
		gauge("hvd_fusion_buffer_bytes",
			"Fusion threshold: the maximum number of bytes that are fused into one response. 0 disables fusion.",
			func(s *trace.Stats) float64 { return float64(s.FusionThresholdBytes) }),
		counter("hvd_response_cache_hits_total", "Requests that were in the response cache and were sent as one bit.",
			func(s *trace.Stats) uint64 { return s.CacheHits }),
		counter("hvd_response_cache_misses_total", "Requests that were not in the response cache and were sent in full.",
			func(s *trace.Stats) uint64 { return s.CacheMisses }),
		counter("hvd_refused_tensors_total",
			"Tensors that completed with an error that affects only them, for example because ranks disagree on the shape.",
			func(s *trace.Stats) uint64 { return s.Refused }),
		counter("hvd_failed_tensors_total",
			"Tensors that completed with an error because the job failed or was shut down.",
			func(s *trace.Stats) uint64 { return s.Failed }),
		counter("hvd_steps_total",
			"Training steps that the program, or the optimizer of gohvd.torch, has marked as begun.",
			func(s *trace.Stats) uint64 { return s.Steps }),
		counter("hvd_timeline_dropped_operations_total",
			"Operations that are missing in the timeline because its file could not be written or was written too slowly.",
			func(s *trace.Stats) uint64 { return s.TimelineDropped }),
	}
)

// phases is exported by every rank.
var phases = desc("hvd_phase_seconds_total",
	"Wall time of the rank by phase: computing is without an operation in flight, communicating is while one is executed, queued is while one is granted but none executed, and waiting is the rest, for other ranks or for the negotiation. At any moment a rank is in one phase.", labelPhase)

// Each of these metrics is exported only while its value is known.
var (
	fill = gauge("hvd_fusion_fill_ratio",
		"Mean size of executed responses of kinds that can be fused, as a share of the fusion threshold.",
		func(s *trace.Stats) float64 {
			return float64(s.FusedBytes) / float64(s.FusionRoomBytes)
		})
	clock = []number{
		gauge("hvd_start_offset_seconds",
			"Time by which rank 0 started before this rank, as last measured. It changes if the clocks drift apart. A wrong time of day does not affect it.",
			func(s *trace.Stats) float64 { return s.ClockOffset.Seconds() }),
		gauge("hvd_clock_error_seconds", "Maximum error of hvd_start_offset_seconds, in either direction.",
			func(s *trace.Stats) float64 { return s.ClockError.Seconds() }),
	}
)

// These metrics are exported only by rank 0.
var (
	coordinator = []number{
		counter("hvd_cycles_total", "Negotiation cycles that the coordinator has made.", func(s *trace.Stats) uint64 {
			return s.Coordinator.Cycles
		}),
		gauge("hvd_stalled_tensors",
			"Tensors that have waited for ranks longer than HOROVOD_STALL_CHECK_TIME_SECONDS.",
			func(s *trace.Stats) float64 { return float64(s.Coordinator.Stalled) }),
		counter("hvd_stall_reports_total", "Stall warnings that were logged.", func(s *trace.Stats) uint64 {
			return s.Coordinator.StallReports
		}),
	}
	// tuned is exported only if the job tunes its settings.
	tuned = []number{
		gauge("hvd_autotune_active", "1 while autotune searches for settings, and 0 after that.",
			func(s *trace.Stats) float64 { return toggle(s.Tuning.Active) }),
		gauge("hvd_autotune_rounds", "Rounds of the search that have ended. A round measures one point.",
			func(s *trace.Stats) float64 { return float64(s.Tuning.Rounds) }),
		gauge("hvd_autotune_best_bytes_per_second",
			"Score of the best settings so far: bytes that allreduces of all ranks reduce per second. 0 if nothing was measured.",
			func(s *trace.Stats) float64 { return s.Tuning.BytesPerSecond }),
		gauge("hvd_autotune_fusion_threshold_bytes", "Fusion threshold that autotune has chosen last.",
			func(s *trace.Stats) float64 { return float64(s.Tuning.Values.FusionThresholdBytes) }),
		gauge("hvd_autotune_cycle_time_seconds", "Cycle time that autotune has chosen last.",
			func(s *trace.Stats) float64 { return s.Tuning.Values.CycleTime.Seconds() }),
		gauge("hvd_autotune_segment_bytes",
			"Segment size of operations over TCP that autotune has chosen last.",
			func(s *trace.Stats) float64 { return float64(s.Tuning.Values.SegmentBytes) }),
		gauge("hvd_autotune_cache_enabled",
			"1 if autotune has switched the response cache on last, and 0 if it has switched it off.",
			func(s *trace.Stats) float64 { return toggle(!s.Tuning.Values.CacheOff) }),
		gauge("hvd_autotune_hierarchical_allreduce",
			"1 if allreduces run on two levels with the settings that autotune has chosen last, and 0 if not.",
			func(s *trace.Stats) float64 { return toggle(!s.Tuning.Values.OneLevelAllreduce) }),
		gauge("hvd_autotune_hierarchical_allgather",
			"1 if allgathers run on two levels with the settings that autotune has chosen last, and 0 if not.",
			func(s *trace.Stats) float64 { return toggle(!s.Tuning.Values.OneLevelAllgather) }),
	}
	algorithm = desc("hvd_autotune_algorithm",
		"1, with the algorithm of allreduces over TCP that autotune has chosen last, or table.", labelAlgorithm)
	last     = desc("hvd_rank_last_total", "Tensors for which this rank's request arrived last.", labelLate)
	lateness = desc("hvd_rank_lateness_seconds_total",
		"Wall time during which this rank held up all others: they had requested an operation and this rank had not. If several operations waited at the same time, the time counts once.", labelLate)
)

func toggle(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// NewCollector returns a collector of a rank's metrics. For each scrape the collector calls get once, which
// returns the rank's statistics. get must be safe for concurrent use.
func NewCollector(get func() trace.Stats) prometheus.Collector { return &collector{get} }

type collector struct{ get func() trace.Stats }

func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{rankInfo, duration, tensors, moved, negotiation, queued, fill.desc,
		phases, last, lateness, algorithm} {
		to <- d
	}
	for _, group := range [][]number{numbers, clock, coordinator, tuned} {
		for _, n := range group {
			to <- n.desc
		}
	}
}

func (c *collector) Collect(to chan<- prometheus.Metric) {
	s := c.get()
	show := func(group ...number) {
		for _, n := range group {
			to <- prometheus.MustNewConstMetric(n.desc, n.kind, n.value(&s))
		}
	}
	count := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, value, labels...)
	}

	to <- prometheus.MustNewConstMetric(rankInfo, prometheus.GaugeValue, 1, strconv.Itoa(s.Rank), s.Host)
	for i := range s.Operations {
		op := &s.Operations[i]
		kind, backend := op.Kind.String(), op.Backend.String()
		to <- newHistogram(duration, &op.Durations, kind, backend)
		count(tensors, float64(op.Tensors), kind, backend)
	}
	for _, m := range s.Moved {
		count(moved, float64(m.Bytes), m.Kind.String(), m.Backend.String(), m.DType.String())
	}
	to <- newHistogram(negotiation, &s.Negotiation)
	to <- newHistogram(queued, &s.Queued)
	show(numbers...)
	for phase, d := range s.Phases {
		count(phases, d.Seconds(), trace.Phase(phase).String())
	}
	if s.FusionRoomBytes > 0 {
		show(fill)
	}
	if s.ClockKnown {
		show(clock...)
	}
	if s.Coordinator == nil {
		return
	}
	show(coordinator...)
	for _, l := range s.Coordinator.Late {
		rank := strconv.Itoa(int(l.Rank))
		count(last, float64(l.Last), rank)
		count(lateness, l.Held.Seconds(), rank)
	}
	if s.Tuning != nil {
		show(tuned...)
		to <- prometheus.MustNewConstMetric(algorithm, prometheus.GaugeValue, 1,
			s.Tuning.Values.AllreduceText())
	}
}

// bucketEvery selects every second bucket bound of trace.Histogram, so that adjacent bounds differ by a
// factor of 4, because each bucket is a series.
const bucketEvery = 2

// newHistogram returns a metric that exports a trace.Histogram.
func newHistogram(d *prometheus.Desc, from *trace.Histogram, labels ...string) prometheus.Metric {
	var count uint64
	buckets := make(map[float64]uint64)
	for i, n := range from.Buckets {
		if count += n; i%bucketEvery == 0 && i < trace.NumBuckets-1 { // the last bucket has no bound
			buckets[trace.UpperBound(i)] = count
		}
	}
	return prometheus.MustNewConstHistogram(d, count, from.Sum.Seconds(), buckets, labels...)
}

// buildInfo returns a gauge whose value is 1 and whose labels are the versions.
func buildInfo(name string) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: name, Help: "1, with the version of gohvd and the version of Go that built it.",
		ConstLabels: prometheus.Labels{labelVersion: config.Version(), labelGo: runtime.Version()},
	}, func() float64 { return 1 })
}
