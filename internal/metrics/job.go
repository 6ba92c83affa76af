package metrics

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/zap"
)

const (
	// askTime is how long ranks may take to answer, and leastAskTime what they have in any case.
	askTime      = time.Second
	leastAskTime = askTime / 16
	// fresh is how long what they have answered is shown, since they were asked.
	fresh = time.Second
	// timeoutHeader is how Prometheus says how many seconds it will wait.
	timeoutHeader = "X-Prometheus-Scrape-Timeout-Seconds"
)

// JobConfig is what a Job needs.
type JobConfig struct {
	// Hosts are those of the ranks, by rank.
	Hosts []string
	// Ask asks the ranks and returns by when ctx ends what those have said that have answered: Text. With an error it returns what
	// it has all the same.
	Ask func(ctx context.Context) (answers map[int][]byte, err error)
	// Log may be nil.
	Log *zap.Logger
}

// Job shows the metrics of all ranks of a job. Each has the labels rank and host, and hvd_up says who has answered.
//
// Scrapes that come at the same time, or within a second, share one question to the ranks.
type Job struct {
	cfg   JobConfig
	begun time.Time

	ctx    context.Context
	cancel context.CancelFunc
	asking sync.WaitGroup

	mu     sync.Mutex
	closed bool
	last   *gathering
	bad    uint64 // answers that could not be used
}

// gathering is one question to all ranks.
type gathering struct {
	begun time.Time
	done  chan struct{}
	// When done is closed these are there, and not changed any more.
	families []*dto.MetricFamily
	err      error
}

// NewJob makes a Job, which must be closed.
func NewJob(cfg JobConfig) *Job {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Job{cfg: cfg, begun: time.Now(), ctx: ctx, cancel: cancel}
}

// Close ends questions under way and waits for that. Later scrapes fail.
func (j *Job) Close() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	j.cancel()
	j.asking.Wait()
	return nil
}

// Handler answers /metrics with the metrics of the job, and /healthz with 200.
func (j *Job) Handler() http.Handler {
	return paths(http.HandlerFunc(j.scrape))
}

func (j *Job) scrape(w http.ResponseWriter, r *http.Request) {
	wait := patience
	if s, err := strconv.ParseFloat(r.Header.Get(timeoutHeader), 64); err == nil && s > 0 && s < patience.Seconds() {
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

// gather waits for the answers to a question that is under way, or was asked a moment ago, or asks one. The ranks have
// three quarters of wait, the rest is for the answer's way.
func (j *Job) gather(ctx context.Context, wait time.Duration) ([]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	g, err := j.question(max(min(askTime, wait*3/4), leastAskTime))
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

// question returns the one that is under way, or the last if it is fresh, or a new one that the ranks have so long to answer.
func (j *Job) question(ask time.Duration) (*gathering, error) {
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
	// Nobody's request: the others wait for it too if the one that has caused it goes away.
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
			j.cfg.Log.Warn("ranks could not be asked for metrics", zap.Error(err))
		}
		g.families, g.err = j.merge(answers, time.Since(g.begun))
	})
	return g, nil
}

// merge makes one of the answers, which have taken that long.
func (j *Job) merge(answers map[int][]byte, took time.Duration) ([]*dto.MetricFamily, error) {
	m := newMerger()
	up := make([]bool, len(j.cfg.Hosts))
	bad := uint64(0)
	for rank, host := range j.cfg.Hosts {
		text, answered := answers[rank]
		if !answered {
			continue
		}
		if err := m.add(rank, host, text); err != nil {
			bad++
			j.cfg.Log.Warn("metrics of a rank cannot be used", zap.Int("rank", rank), zap.String("host", host), zap.Error(err))
			continue
		}
		up[rank] = true
	}
	j.mu.Lock()
	j.bad += bad
	own := &jobCollector{job: j, up: up, took: took, bad: j.bad}
	j.mu.Unlock()
	r := prometheus.NewRegistry()
	if err := r.Register(own); err != nil {
		return nil, err
	}
	if err := r.Register(buildInfo(jobPrefix + "build_info")); err != nil {
		return nil, err
	}
	families, err := r.Gather()
	if err != nil {
		return nil, err
	}
	return m.with(families), nil
}

// Names that no rank may use.
const (
	upName    = "hvd_up"
	jobPrefix = "hvd_job_"
)

var (
	upDesc    = desc(upName, "Whether the rank has answered with its metrics.", labelRank, labelHost)
	ranksDesc = desc(jobPrefix+"ranks", "Ranks that the launcher has started.")
	startDesc = desc(jobPrefix+"start_time_seconds", "When the job was started, in seconds since 1970.")
	tookDesc  = desc(jobPrefix+"gather_seconds", "Time that it took to ask the ranks for these metrics.")
	badDesc   = desc(jobPrefix+"bad_answers_total", "Answers of ranks that could not be used.")
)

// jobCollector is what the launcher knows itself.
type jobCollector struct {
	job  *Job
	up   []bool
	took time.Duration
	bad  uint64
}

func (c *jobCollector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{upDesc, ranksDesc, startDesc, tookDesc, badDesc} {
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
		show(upDesc, value, strconv.Itoa(rank), c.job.cfg.Hosts[rank])
	}
	show(ranksDesc, float64(len(c.up)))
	show(startDesc, float64(c.job.begun.UnixMilli())/1e3)
	show(tookDesc, c.took.Seconds())
	to <- prometheus.MustNewConstMetric(badDesc, prometheus.CounterValue, float64(c.bad))
}
