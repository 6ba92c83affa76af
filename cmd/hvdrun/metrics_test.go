package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/store"
)

// ranksOfMetrics is an environment variable that tells each rank of a test how to answer requests.
const ranksOfMetrics = "RANKS_OF_METRICS"

// TestMetricsRank runs a rank that answers requests for metrics. Other tests run it as a rank, with this test
// binary as the program. If it does not run as a rank, it is skipped.
func TestMetricsRank(t *testing.T) {
	kinds := strings.Split(os.Getenv(ranksOfMetrics), ",")
	rank, err := strconv.Atoi(os.Getenv("HOROVOD_RANK"))
	if err != nil || rank >= len(kinds) {
		t.Skip("runs only as a rank of other tests")
	}
	key, err := secret.Parse(os.Getenv("HVD_SECRET"))
	if err != nil {
		t.Fatal(err)
	}
	addr := net.JoinHostPort(os.Getenv("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
		os.Getenv("HOROVOD_GLOO_RENDEZVOUS_PORT"))
	kv, err := store.Dial(t.Context(), addr, store.Config{Secret: key})
	if err != nil {
		t.Fatal(err)
	}
	defer kv.Close()
	answer := func(string) []byte { return nil }
	switch kinds[rank] {
	case "good":
		answer = func(what string) []byte {
			if what != joblink.Metrics {
				return nil
			}
			text, err := metrics.Text(func() trace.Stats { return statsOf(rank) })
			if err != nil {
				t.Error(err)
			}
			return text
		}
	case "garbage":
		answer = func(string) []byte { return []byte("{\"hvd\":\xff") }
	case "large":
		answer = func(string) []byte { return bytes.Repeat([]byte("x 1\n"), joblink.MaxBodyBytes/4) }
	case "silent":
		select {} // waits until it is killed at the end of the job
	}
	if err := joblink.New(kv, rank).Answer(t.Context(), answer); err != nil {
		t.Log(err) // Answer returns an error when the job has ended
	}
}

// statsOf returns statistics of a rank that give every metric a value.
func statsOf(rank int) trace.Stats {
	var h trace.Histogram
	h.Add(time.Millisecond)
	s := trace.Stats{
		Rank: rank, Size: 5, Host: "?", Epoch: 1, InFlight: 10 + rank, ClockKnown: true,
		Operations: []trace.Operations{{Kind: message.Allreduce, Backend: message.SHM, Durations: h,
			Tensors: 3}},
		Moved: []trace.Moved{{Kind: message.Allreduce, Backend: message.SHM, DType: tensor.Float32,
			Bytes: 100}},
		Negotiation: h, Queued: h, FusedTensors: 3, FusedBytes: 100, FusionResponses: 1,
		FusionRoomBytes: 1000, FusionThresholdBytes: 1000,
	}
	if rank == 0 {
		s.Coordinator = &trace.Coordinator{Late: []trace.HeldUp{{Rank: 2, Last: 3, Held: time.Second}},
			Stalled: 1}
	}
	return s
}

// metricsJob is a running job, with its metrics address and its log.
type metricsJob struct {
	*exec.Cmd
	addr string

	mu    sync.Mutex
	log   strings.Builder
	drain sync.WaitGroup
}

func (j *metricsJob) said() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.log.String()
}

var metricsLine = regexp.MustCompile(`^hvdrun: metrics at http://(.*)/metrics$`)

// startMetricsJob starts a job with a rank for each element of kinds, which says how that rank answers. It
// waits until the job serves metrics.
func startMetricsJob(t *testing.T, kinds ...string) *metricsJob {
	t.Helper()
	self := testnet.Self(t)
	short := hvdrun(t, "-np", strconv.Itoa(len(kinds)), "--metrics-addr", ":0", self,
		"-test.run=^TestMetricsRank$")
	// The job has a context of its own, because a test with Prometheus may take longer than the time limit
	// for hvdrun in other tests.
	j := &metricsJob{Cmd: exec.CommandContext(testnet.Context(t), short.Path, short.Args[1:]...)}
	j.Env = append(short.Env, ranksOfMetrics+"="+strings.Join(kinds, ","))
	pipe, err := j.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Start(); err != nil {
		t.Fatal(err)
	}
	addr := make(chan string, 1)
	j.drain.Go(func() {
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			if m := metricsLine.FindStringSubmatch(lines.Text()); m != nil {
				addr <- m[1]
			}
			j.mu.Lock()
			fmt.Fprintln(&j.log, lines.Text())
			j.mu.Unlock()
		}
	})
	select {
	case j.addr = <-addr:
	case <-time.After(deadline):
		t.Fatalf("hvdrun does not say where metrics are: %s", j.said())
	}
	return j
}

// end interrupts the job, waits for its end and checks its exit status.
func (j *metricsJob) end(t *testing.T) {
	t.Helper()
	if err := j.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	j.drain.Wait()
	var exit *exec.ExitError
	if err := j.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if got := j.ProcessState.ExitCode(); got != 130 {
		t.Errorf("got exit status %d, want 130: %s", got, j.said())
	}
}

// TestPrometheusScrapesTheJob runs a real Prometheus with the configuration and the rules in deploy/.
// Prometheus scrapes a job in which some ranks give wrong answers or no answers. The metrics of the other
// ranks must arrive, and the queries of the dashboard must have results.
func TestPrometheusScrapesTheJob(t *testing.T) {
	deploy := filepath.Join("..", "..", "deploy")
	read := func(name string) string {
		text := testnet.ReadFile(t, filepath.Join(deploy, name))
		return string(text)
	}
	config := read("prometheus.yml")
	job := startMetricsJob(t, "good", "good", "silent", "garbage", "large")
	for _, c := range []struct{ is, want string }{
		{"127.0.0.1:9610", job.addr}, {"scrape_interval: 5s", "scrape_interval: 1s"},
		{"evaluation_interval: 15s", "evaluation_interval: 1s"},
	} {
		if strings.Count(config, c.is) != 1 {
			t.Fatalf("deploy/prometheus.yml has changed:\n%s", config)
		}
		config = strings.Replace(config, c.is, c.want, 1)
	}
	prom := testnet.StartPrometheus(t, config, map[string]string{"alerts.yml": read("alerts.yml")})

	values := func(expression, label string) map[string]float64 {
		samples, err := prom.Query(expression)
		if err != nil {
			t.Fatal(err)
		}
		all := make(map[string]float64)
		for _, s := range samples {
			all[s.Labels[label]] = s.Value
		}
		return all
	}
	same := func(a, b map[string]float64) bool { return fmt.Sprint(a) == fmt.Sprint(b) }
	up := map[string]float64{"0": 1, "1": 1, "2": 0, "3": 0, "4": 0}
	// The ranks may not be ready at the first scrape.
	testnet.Eventually(t, "Prometheus has the ranks", func() bool {
		if got := len(values("hvd_up", "rank")); got != 0 && got != len(up) {
			t.Fatalf("got %d ranks, want %d", got, len(up))
		}
		return same(values("hvd_up", "rank"), up)
	})
	if got, want := values("hvd_queue_depth", "rank"), map[string]float64{"0": 10, "1": 11}; !same(got,
		want) {
		t.Errorf("got %v, want %v", got, want)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := values("sum by (host) (hvd_collective_bytes_total)", "host"), map[string]float64{
		host: 200}; !same(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got, want := values("hvd_rank_last_total", "late_rank"), map[string]float64{"2": 3}; !same(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	// A rate needs two scrapes, so some queries have no result at first.
	for _, query := range testnet.Dashboard(t, filepath.Join(deploy, "grafana-dashboard.json")) {
		testnet.Eventually(t, "Prometheus answers "+query, func() bool {
			samples, err := prom.Query(query)
			if err != nil {
				t.Fatal(err)
			}
			return len(samples) > 0
		})
	}
	targets, err := prom.Targets()
	if err != nil || len(targets) != 1 || targets[0].Health != "up" || targets[0].LastError != "" {
		t.Errorf("got targets %v and error %v", targets, err)
	}
	testnet.Eventually(t, "the stall is an alert", func() bool {
		return len(values(`ALERTS{alertname="HvdStalledTensors",alertstate="firing"}`, "rank")) == 1
	})
	testnet.Eventually(t, "hvdrun says what is wrong", func() bool {
		said := job.said()
		return strings.Contains(said, "not in Prometheus's text format") && strings.Contains(said, " bytes, want ")
	})
	job.end(t)
	if strings.Contains(job.said(), "panic") {
		t.Error(job.said())
	}
}

// TestScrapesWhileTheJobEnds scrapes a job while it ends. Each scrape must get metrics or an error in bounded
// time, and hvdrun must end normally.
func TestScrapesWhileTheJobEnds(t *testing.T) {
	job := startMetricsJob(t, "good", "garbage", "silent")
	ctx := testnet.Context(t)
	var scrapes sync.WaitGroup
	begun := make(chan struct{}, 10)
	for range 10 {
		scrapes.Go(func() {
			for first := true; ; first = false {
				text, err := testnet.Get(ctx, "http://"+job.addr+"/metrics")
				if first {
					begun <- struct{}{}
				}
				if err != nil {
					return
				}
				testnet.WantText(t, text, "\nhvd_up{", "\nhvd_job_ranks 3\n", `rank="1"} 0`,
					`rank="2"} 0`)
			}
		})
	}
	for range 10 {
		<-begun
	}
	job.end(t)
	scrapes.Wait()
	if ctx.Err() != nil {
		t.Error("a scrape hung")
	}
}

// TestMetricsAddr checks that hvdrun fails with an error if the address for metrics is in use or malformed.
// Without the flag it must print nothing about metrics.
func TestMetricsAddr(t *testing.T) {
	l := testnet.Listen(t)
	defer l.Close()
	for _, c := range []struct {
		addr   string
		status int
		want   string
	}{
		{l.Addr().String(), statusFailure, "hvdrun: --metrics-addr: metrics: listen tcp " +
			l.Addr().String() + ": bind: address already in use\n"},
		{"here", statusUsage, `hvdrun: --metrics-addr: metrics: address "here": `},
		{":x", statusUsage, `got port "x", want a number`},
	} {
		stdout, stderr, status := output(t, "-np", "1", "--metrics-addr", c.addr, "echo", "ran")
		if status != c.status || !strings.Contains(stderr, c.want) || stdout != "" {
			t.Errorf("%s: got exit status %d, %q and %q, want %d and %q", c.addr, status, stderr, stdout,
				c.status, c.want)
		}
	}
	// Without the flag hvdrun must print nothing about metrics.
	if _, stderr, status := output(t, "-np", "1", "true"); status != 0 || stderr != "" {
		t.Errorf("got exit status %d and %q", status, stderr)
	}
}

func TestHostNames(t *testing.T) {
	hosts := []launch.Host{{Name: "h1", Slots: 2}, {Name: "h2", Slots: 2}}
	if got, err := hostNames(hosts, nil, 3); err != nil || !slices.Equal(got, []string{"h1", "h1", "h2"}) {
		t.Errorf("got %v and error %v", got, err)
	}
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := hostNames(nil, nil, 2); err != nil || !slices.Equal(got, []string{here, here}) {
		t.Errorf("got %v and error %v", got, err)
	}
	if _, err := hostNames(hosts, nil, 5); err == nil {
		t.Error("five ranks were placed on four slots")
	}
}
