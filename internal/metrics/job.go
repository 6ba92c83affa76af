package metrics

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/zap"
)

const (
	// Ranks have three quarters of the scraper's timeout to answer, but at most askTime and at least
	// leastAskTime.
	askTime      = time.Second
	leastAskTime = askTime / 16
	// fresh is how long answers are reused for further scrapes, counted from the start of the query.
	fresh = time.Second
	// timeoutHeader is the header in which Prometheus sends its scrape timeout in seconds.
	timeoutHeader = "X-Prometheus-Scrape-Timeout-Seconds"
	// maxText limits the bytes of a rank's answer, and so the memory that its metrics take. The longest
	// answer, from a node of a parameter server with as many peers as hvdrun can start, has about 3 MiB.
	maxText = 4 << 20
)

// JobConfig is the configuration of a Job.
type JobConfig struct {
	// Ranks returns the host names of the ranks, indexed by rank. A name is empty if the launcher does not
	// know it; then the rank's answer has it. In an elastic job, Ranks also returns what the launcher has
	// counted, and otherwise nil.
	Ranks func() (hosts []string, counts *Elastic)
	// Ask asks the ranks for their metrics and must return before ctx ends. It returns the answers that it
	// has received, by rank. Each answer is the result of Text at that rank. If Ask returns an error, it also
	// returns these answers.
	Ask func(ctx context.Context) (answers map[int][]byte, err error)
	// Log receives warnings about answers that cannot be used. It may be nil.
	Log *zap.Logger
}

// Elastic is what the launcher counts in an elastic job.
type Elastic struct {
	Resets int // changes of the ranks
	// StoppedByFailures and StoppedByPlan say how long the training has stopped because ranks had failed, and
	// because the launcher wanted other ranks.
	StoppedByFailures, StoppedByPlan time.Duration
}

// Job serves the metrics of all ranks of a job. Each metric has the labels rank and host. The metric hvd_up
// says whether a rank has answered.
//
// Scrapes at the same time, or within a second of a query, share one query of the ranks. The methods of a Job
// may be called from any goroutine.
type Job struct {
	cfg   JobConfig
	begun time.Time

	ctx    context.Context
	cancel context.CancelFunc
	asking sync.WaitGroup

	said map[int]string // the hosts that the ranks have named, used by one query after the other

	mu     sync.Mutex
	closed bool
	last   *gathering
}

var (
	errLate  = errors.New("metrics: the ranks did not answer before the scrape timed out")
	errEnded = errors.New("metrics: the job is over")
)

// gathering is one query of all ranks and its result.
type gathering struct {
	begun time.Time
	done  chan struct{}
	// families and err are set before done is closed. They do not change afterwards.
	families []*dto.MetricFamily
	err      error
}

// NewJob returns a Job. The caller must close it.
func NewJob(cfg JobConfig) *Job {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Job{cfg: cfg, begun: time.Now(), ctx: ctx, cancel: cancel, said: make(map[int]string)}
}

// Close cancels the queries in progress and waits until they have ended. Later scrapes fail.
func (j *Job) Close() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	j.cancel()
	j.asking.Wait()
	return nil
}

// Handler returns a handler that serves /metrics with the metrics of all ranks, and /healthz with status 200.
func (j *Job) Handler() http.Handler {
	return paths(http.HandlerFunc(j.scrape))
}

func (j *Job) scrape(w http.ResponseWriter, r *http.Request) {
	wait := scrapeTimeout
	if s, err := strconv.ParseFloat(r.Header.Get(timeoutHeader), 64); err == nil && s > 0 &&
		s < scrapeTimeout.Seconds() {
		wait = time.Duration(s * float64(time.Second))
	}
	families, err := j.gather(r.Context(), wait)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	promhttp.HandlerFor(
		prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return families, nil }),
		promhttp.HandlerOpts{EnableOpenMetrics: true},
	).ServeHTTP(w, r)
}

// gather returns the result of a query in progress, of a recent query or of a new one. wait is the time that
// the scraper allows. Three quarters of it are for the ranks' answers, and the rest is for sending the
// result.
func (j *Job) gather(ctx context.Context, wait time.Duration) ([]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	g, err := j.query(max(min(askTime, wait*3/4), leastAskTime))
	if err != nil {
		return nil, err
	}
	select {
	case <-g.done:
		return g.families, g.err
	case <-ctx.Done():
		return nil, errLate
	}
}

// query returns the query in progress, or the last query if it is recent enough. Otherwise it starts a new
// query, in which the ranks have the given time to answer.
func (j *Job) query(ask time.Duration) (*gathering, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, errEnded
	}
	if g := j.last; g != nil {
		select {
		case <-g.done:
			if time.Since(g.begun) <= fresh {
				return g, nil
			}
		default:
			return g, nil
		}
	}
	g := &gathering{begun: time.Now(), done: make(chan struct{})}
	j.last = g
	// The query does not use the context of the HTTP request. Other requests wait for the query too, and must
	// get its result even if the first request is cancelled.
	j.asking.Go(func() {
		defer close(g.done)
		ctx, cancel := context.WithTimeout(j.ctx, ask)
		defer cancel()
		answers, err := j.cfg.Ask(ctx)
		if j.ctx.Err() != nil {
			g.err = errEnded
			return
		}
		if err != nil {
			j.cfg.Log.Warn("asking the ranks for metrics failed", zap.Error(err))
		}
		g.families, g.err = j.merge(answers, time.Since(g.begun))
	})
	return g, nil
}

// merge merges the answers of the ranks and adds the launcher's own metrics. took is the duration of the
// query.
func (j *Job) merge(answers map[int][]byte, took time.Duration) ([]*dto.MetricFamily, error) {
	r := prometheus.NewRegistry()
	all := prometheus.Gatherers{r}
	hosts, counts := j.cfg.Ranks()
	hosts, up := slices.Clone(hosts), make([]bool, len(hosts))
	for rank := range hosts {
		hosts[rank] = cmp.Or(hosts[rank], j.said[rank])
		text, answered := answers[rank]
		if !answered {
			continue
		}
		families, host, err := parse(rank, hosts[rank], text)
		if err != nil {
			j.cfg.Log.Warn("the metrics of a rank are invalid", zap.Int("rank", rank),
				zap.String("host", hosts[rank]), zap.Error(err))
			continue
		}
		up[rank], hosts[rank], j.said[rank] = true, host, host
		all = append(all, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
			return families, nil
		}))
	}
	err := r.Register(&jobCollector{job: j, hosts: hosts, counts: counts, up: up, took: took})
	if err != nil {
		return nil, err
	}
	if err := r.Register(buildInfo(jobPrefix + "build_info")); err != nil {
		return nil, err
	}
	families, err := all.Gather()
	if err != nil {
		j.cfg.Log.Warn("metrics of ranks contradict each other and are left out", zap.Error(err))
	}
	return families, nil
}

// parse returns the metrics in the answer of a rank. Each has the labels rank and host. If host is empty, it
// is the one that the rank names, which parse returns.
func parse(rank int, host string, text []byte) ([]*dto.MetricFamily, string, error) {
	if len(text) > maxText {
		return nil, "", fmt.Errorf("got %d bytes, want at most %d", len(text), maxText)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	named, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return nil, "", fmt.Errorf("got text that is not in Prometheus's text format: %.200w", err)
	}
	for _, m := range named[rankInfoName].GetMetric() {
		for _, l := range m.Label {
			if l.GetName() == labelHost {
				host = cmp.Or(host, l.GetValue())
			}
		}
	}
	own := []*dto.LabelPair{
		{Name: new(labelRank), Value: new(strconv.Itoa(rank))}, {Name: new(labelHost), Value: &host},
	}
	families := make([]*dto.MetricFamily, 0, len(named))
	for _, f := range named {
		families = append(families, f)
		for _, m := range f.Metric {
			m.Label = slices.DeleteFunc(m.Label, func(l *dto.LabelPair) bool {
				return l.GetName() == labelRank || l.GetName() == labelHost
			})
			m.Label = append(m.Label, own...)
			slices.SortFunc(m.Label, func(a, b *dto.LabelPair) int {
				return strings.Compare(a.GetName(), b.GetName())
			})
		}
	}
	return families, host, nil
}

// The names of the launcher's metrics.
const (
	upName    = "hvd_up"
	jobPrefix = "hvd_job_"
)

var (
	upDesc    = desc(upName, "1 if the rank has answered with its metrics, else 0.", labelRank, labelHost)
	ranksDesc = desc(jobPrefix+"ranks", "Ranks that the launcher has started. In an elastic job, those that take part now.")
	startDesc = desc(jobPrefix+"start_time_seconds", "When the job was started, in seconds since 1970.")
	tookDesc  = desc(jobPrefix+"gather_seconds", "Time from the request for these metrics to the last answer of a rank.")
)

// These are the metrics of an elastic job.
var (
	resetsDesc  = desc("hvd_elastic_resets_total", "How often the ranks of an elastic job have changed.")
	stoppedDesc = desc("hvd_elastic_stopped_seconds_total",
		"How long an elastic job has not trained, because ranks had failed (failure) or because others were wanted (plan).",
		"cause")
)

// jobCollector collects the metrics of the launcher itself.
type jobCollector struct {
	job    *Job
	hosts  []string
	counts *Elastic // nil if the job is not elastic
	up     []bool
	took   time.Duration
}

func (c *jobCollector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{upDesc, ranksDesc, startDesc, tookDesc, resetsDesc,
		stoppedDesc} {
		to <- d
	}
}

func (c *jobCollector) Collect(to chan<- prometheus.Metric) {
	show := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for rank, up := range c.up {
		value := 0.0
		if up {
			value = 1
		}
		show(upDesc, value, strconv.Itoa(rank), c.hosts[rank])
	}
	show(ranksDesc, float64(len(c.up)))
	show(startDesc, float64(c.job.begun.UnixMilli())/1e3)
	show(tookDesc, c.took.Seconds())
	if c.counts == nil {
		return
	}
	count := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, value, labels...)
	}
	count(resetsDesc, float64(c.counts.Resets))
	count(stoppedDesc, c.counts.StoppedByFailures.Seconds(), "failure")
	count(stoppedDesc, c.counts.StoppedByPlan.Seconds(), "plan")
}
