package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// textOf returns the metrics of a rank as text. Before that, the function change may change the rank's
// statistics.
func textOf(t testing.TB, rank int, change func(*trace.Stats)) []byte {
	t.Helper()
	s := full()
	s.Rank = rank
	if rank != 0 {
		s.Coordinator = nil
	}
	change(&s)
	text, err := metrics.Text(func() trace.Stats { return s })
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func asIs(*trace.Stats) {}

// jobOf returns a Job of the given number of ranks, and its log. The ranks are on hosts a and b in turn. The
// queries return the given answers. The Job is closed when the test ends.
func jobOf(t *testing.T, size int, answers map[int][]byte) (*metrics.Job, *observer.ObservedLogs) {
	t.Helper()
	log, entries := testnet.Logs()
	var hosts []string
	for r := range size {
		hosts = append(hosts, []string{"a", "b"}[r%2])
	}
	j := metrics.NewJob(metrics.JobConfig{
		Ranks: ranksOn(hosts...), Log: log,
		Ask: func(context.Context) (map[int][]byte, error) { return answers, nil },
	})
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j, entries
}

// ranksOn returns the ranks of an elastic job, and what its launcher has counted.
func ranksOn(hosts ...string) func() ([]string, *metrics.Elastic) {
	return func() ([]string, *metrics.Elastic) {
		return hosts, &metrics.Elastic{Resets: 3, StoppedByFailures: 1500 * time.Millisecond,
			StoppedByPlan: 20 * time.Millisecond}
	}
}

// shown scrapes j and returns the text of the response.
func shown(t *testing.T, j *metrics.Job) string {
	t.Helper()
	w := request(j.Handler(), "/metrics")
	if w.Code != http.StatusOK {
		t.Fatalf("got status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func wantLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains(text, "\n"+l+"\n") {
			t.Errorf("%s is missing in\n%s", l, text)
		}
	}
}

func TestJob(t *testing.T) {
	j, entries := jobOf(t, 4, map[int][]byte{
		0: textOf(t, 0, asIs), 1: textOf(t, 1, func(s *trace.Stats) { s.InFlight = 77 }), 3: textOf(t, 3,
			asIs),
		4: textOf(t, 4, asIs), -1: []byte("hvd_epoch 1\n"), // 4 and -1 are not ranks of the job
	})
	text := shown(t, j)
	wantLines(t, text,
		`hvd_up{host="a",rank="0"} 1`, `hvd_up{host="b",rank="1"} 1`, `hvd_up{host="a",rank="2"} 0`,
		`hvd_up{host="b",rank="3"} 1`,
		`hvd_queue_depth{host="a",rank="0"} 5`, `hvd_queue_depth{host="b",rank="1"} 77`,
		`hvd_queue_depth{host="b",rank="3"} 5`,
		// The rank has sent the labels rank and host, and the launcher overwrites them.
		`hvd_rank_info{host="b",rank="3"} 1`,
		`hvd_rank_last_total{host="a",late_rank="3",rank="0"} 90`,
		`hvd_collective_duration_seconds_bucket{backend="shm",host="b",op="allreduce",rank="1",le="0.00390625"} 2`,
		`hvd_collective_duration_seconds_sum{backend="shm",host="b",op="allreduce",rank="3"} 10800.003`,
		`hvd_job_ranks 4`, `hvd_elastic_resets_total 3`,
		`hvd_elastic_stopped_seconds_total{cause="failure"} 1.5`,
		`hvd_elastic_stopped_seconds_total{cause="plan"} 0.02`,
	)
	testnet.WantText(t, text, "go_goroutines{", "process_cpu_seconds_total{", "hvd_job_gather_seconds ",
		"hvd_job_start_time_seconds ", "hvd_job_build_info{")
	for _, not := range []string{`rank="4"`, `rank="-1"`, `host="h1"`} {
		if strings.Contains(text, not) {
			t.Errorf("%s is there", not)
		}
	}
	var names []string
	for line := range strings.Lines(text) {
		if rest, is := strings.CutPrefix(line, "# TYPE "); is {
			name, _, _ := strings.Cut(rest, " ")
			names = append(names, name)
		}
	}
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("got %v, want each once, in order", names)
	}
	if out, content := testnet.Promtool(t, "", text, "check", "metrics"); !content || out != "" {
		t.Errorf("promtool: %s", out)
	}
	if entries.Len() > 0 {
		t.Errorf("logged %v", entries.All())
	}

	w := request(j.Handler(), "/metrics", "Accept", "application/openmetrics-text; version=1.0.0")
	wantLines(t, w.Body.String(), `hvd_rank_last_total{host="a",late_rank="3",rank="0"} 90.0`,
		`# TYPE hvd_rank_last counter`)
	if !strings.HasPrefix(w.Header().Get("Content-Type"), "application/openmetrics-text") ||
		!strings.HasSuffix(w.Body.String(), "# EOF\n") {
		t.Errorf("got %v and %d bytes, want OpenMetrics", w.Header(), w.Body.Len())
	}
	if w := request(j.Handler(), "/metrics", "Accept-Encoding", "gzip"); w.Header().Get(
		"Content-Encoding") != "gzip" || w.Body.Len() > len(text)/5 {
		t.Errorf("got %d bytes of %d and %v, want them compressed", w.Body.Len(), len(text), w.Header())
	}
	if w := request(j.Handler(), "/healthz"); w.Code != http.StatusOK {
		t.Errorf("/healthz: got %d", w.Code)
	}
}

// The launcher does not know the hosts. A rank that has answered has the one that its answer named, also
// later.
func TestHostsThatRanksName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := map[int][]byte{1: textOf(t, 1, asIs)}
		j := metrics.NewJob(metrics.JobConfig{Ranks: ranksOn("", ""),
			Ask: func(context.Context) (map[int][]byte, error) { return answers, nil }})
		wantLines(t, shown(t, j), `hvd_up{host="",rank="0"} 0`, `hvd_up{host="h1",rank="1"} 1`,
			`hvd_queue_depth{host="h1",rank="1"} 5`)
		time.Sleep(2 * time.Second)
		answers = nil
		wantLines(t, shown(t, j), `hvd_up{host="h1",rank="1"} 0`)
		j.Close()
	})
}

// Rank 1 sends an invalid answer. Its hvd_up is 0, and the log says why. The metrics of the other ranks are
// the same as without this answer.
func TestBadAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		text []byte
		want string
	}{
		"garbage": {[]byte("\x00\x01\x02"), "not in Prometheus's text format"},
		"cut":     {textOf(t, 1, asIs)[:5000], "not in Prometheus's text format"},
		"100 MiB": {bytes.Repeat([]byte("x 1\n"), 25<<20), "got 104857600 bytes, want"},
	} {
		t.Run(name, func(t *testing.T) {
			j, entries := jobOf(t, 3, map[int][]byte{0: textOf(t, 0, asIs), 1: c.text, 2: textOf(t, 2, asIs)})
			text := shown(t, j)
			wantLines(t, text, `hvd_up{host="a",rank="0"} 1`, `hvd_up{host="b",rank="1"} 0`,
				`hvd_up{host="a",rank="2"} 1`,
				`hvd_epoch{host="a",rank="2"} 2`, `hvd_job_ranks 3`)
			if n := strings.Count(text, `rank="1"}`); n != 1 {
				t.Errorf("%d series of rank 1, want hvd_up alone", n)
			}
			if !testnet.Logged(entries, "the metrics of a rank are invalid", c.want) || entries.Len() != 1 {
				t.Errorf("got log %v, want %q", entries.All(), c.want)
			}
		})
	}
}

// Rank 0 of the largest possible job answers. The answer is shorter than the limit for answers.
func TestLargestJobFits(t *testing.T) {
	late := func(s *trace.Stats) {
		s.Coordinator.Late = nil
		for r := range 4096 {
			s.Coordinator.Late = append(s.Coordinator.Late, trace.HeldUp{Rank: topo.Rank(r),
				Last: 1<<63 + uint64(r), Held: 123456789123456789})
		}
	}
	text := textOf(t, 0, late)
	j, _ := jobOf(t, 1, map[int][]byte{0: text})
	wantLines(t, shown(t, j), `hvd_up{host="a",rank="0"} 1`)
	t.Logf("%d bytes", len(text))
}

// asker answers queries for two ranks and counts the queries. A query waits until free is closed and then
// returns the answers of both ranks. If its context ends before that, it returns only the answer of rank 0.
type asker struct {
	mu    sync.Mutex
	asked int
	limit time.Duration // the time that the ranks had in the last query
	free  chan struct{}
	text  []byte
}

func (a *asker) ask(ctx context.Context) (map[int][]byte, error) {
	deadline, _ := ctx.Deadline()
	a.mu.Lock()
	a.asked++
	a.limit = time.Until(deadline)
	a.mu.Unlock()
	select {
	case <-a.free:
		return map[int][]byte{0: a.text, 1: a.text}, nil
	case <-ctx.Done():
		return map[int][]byte{0: a.text}, nil
	}
}

func newAsker(t *testing.T) (*asker, *metrics.Job) {
	a := &asker{free: make(chan struct{}), text: textOf(t, 1, asIs)}
	return a, metrics.NewJob(metrics.JobConfig{Ranks: ranksOn("a", "b"), Ask: a.ask})
}

// Scrapes at the same time or within a second of a query share one query of the ranks. A later scrape starts
// another query.
func TestScrapesShareQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, j := newAsker(t)
		h := j.Handler()
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				if w := request(h, "/metrics"); w.Code != http.StatusOK ||
					!strings.Contains(w.Body.String(), `hvd_up{host="b",rank="1"} 1`) {
					t.Errorf("got %d: %s", w.Code, w.Body)
				}
			})
		}
		synctest.Wait()
		if a.asked != 1 {
			t.Errorf("ten scrapes asked %d times", a.asked)
		}
		close(a.free)
		all.Wait()
		time.Sleep(time.Second)
		request(h, "/metrics")
		if a.asked != 1 {
			t.Errorf("a scrape within a second asked again")
		}
		time.Sleep(time.Nanosecond)
		request(h, "/metrics")
		if a.asked != 2 {
			t.Errorf("%d questions, want another one after a second", a.asked)
		}
		j.Close()
	})
}

// A rank does not answer. The query waits for it for a second, but at most for three quarters of Prometheus's
// scrape timeout. Then the scrape returns the metrics of the other ranks.
func TestRanksThatDoNotAnswer(t *testing.T) {
	for _, c := range []struct {
		header string
		want   time.Duration
	}{
		{"", time.Second}, {"10", time.Second}, {"5", time.Second}, {"0.4", 300 * time.Millisecond},
		{"1", 750 * time.Millisecond},
		{"NaN", time.Second}, {"-1", time.Second}, {"0", time.Second}, {"1e300", time.Second},
		{"soon", time.Second},
	} {
		t.Run(c.header, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, j := newAsker(t)
				begun := time.Now()
				w := request(j.Handler(), "/metrics", "X-Prometheus-Scrape-Timeout-Seconds", c.header)
				if w.Code != http.StatusOK || time.Since(begun) != c.want || a.limit != c.want {
					t.Errorf("got %d after %v, ranks had %v, want %v", w.Code, time.Since(begun), a.limit,
						c.want)
				}
				wantLines(t, w.Body.String(), `hvd_up{host="a",rank="0"} 1`, `hvd_up{host="b",rank="1"} 0`,
					fmt.Sprintf("hvd_job_gather_seconds %v", c.want.Seconds()),
					// Time in a synctest bubble starts at the beginning of the year 2000.
					"hvd_job_start_time_seconds 9.466848e+08")
				j.Close()
			})
		})
	}
}

// Three scrapes share a query: one with a long timeout, one with a short timeout, and one whose client
// disconnects. The scrape with the short timeout gets an error in time, and the scrape with the long timeout
// gets the metrics.
func TestShortScrapeTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, j := newAsker(t)
		h := j.Handler()
		var patient sync.WaitGroup
		begun := time.Now()
		gone, leave := context.WithCancel(t.Context())
		patient.Go(func() {
			// This scrape starts the query. Its client disconnects before the ranks answer.
			r, err := http.NewRequestWithContext(gone, http.MethodGet, "/metrics", nil)
			if err != nil {
				t.Error(err)
				return
			}
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != http.StatusServiceUnavailable ||
				time.Since(begun) != 100*time.Millisecond {
				t.Errorf("the one that left: got %d after %v", w.Code, time.Since(begun))
			}
		})
		synctest.Wait()
		patient.Go(func() {
			if w := request(h, "/metrics"); w.Code != http.StatusOK || time.Since(begun) != time.Second {
				t.Errorf("the patient one: got %d after %v", w.Code, time.Since(begun))
			}
		})
		time.Sleep(100 * time.Millisecond)
		leave()
		w := request(h, "/metrics", "X-Prometheus-Scrape-Timeout-Seconds", "0.2")
		if w.Code != http.StatusServiceUnavailable || time.Since(begun) != 300*time.Millisecond ||
			!strings.Contains(w.Body.String(), "before the scrape timed out") {
			t.Errorf("the scrape with a short timeout: got %d after %v: %s", w.Code, time.Since(begun),
				w.Body)
		}
		patient.Wait()
		j.Close()
	})
}

// Close is called during a query. The scrape in progress ends immediately, and Close waits until the query
// has ended.
func TestCloseDuringQuery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := newAsker(t)
		j := metrics.NewJob(metrics.JobConfig{Ranks: ranksOn("a"),
			Ask: func(ctx context.Context) (map[int][]byte, error) {
				defer time.Sleep(time.Millisecond) // makes the query take 1 ms to end
				return a.ask(ctx)
			}})
		h := j.Handler()
		var scrape sync.WaitGroup
		begun := time.Now()
		scrape.Go(func() {
			if w := request(h, "/metrics"); w.Code != http.StatusServiceUnavailable ||
				!strings.Contains(w.Body.String(), "over") {
				t.Errorf("got %d: %s", w.Code, w.Body)
			}
		})
		synctest.Wait()
		if err := j.Close(); err != nil || time.Since(begun) != time.Millisecond {
			t.Errorf("Close took %v and gave %v, want it to wait for the question, and no longer",
				time.Since(begun), err)
		}
		scrape.Wait()
		time.Sleep(time.Minute) // after this time the last answers are not reused
		if w := request(h, "/metrics"); w.Code != http.StatusServiceUnavailable || a.asked != 1 {
			t.Errorf("a scrape after Close: got %d, and %d questions in all", w.Code, a.asked)
		}
		if err := j.Close(); err != nil {
			t.Errorf("a second Close: %v", err)
		}
	})
}

// Ask returns an error and some answers. The error is logged, and the scrape returns the metrics of the ranks
// that have answered.
func TestQuestionThatFails(t *testing.T) {
	log, entries := testnet.Logs()
	j := metrics.NewJob(metrics.JobConfig{
		Ranks: ranksOn("a", "a"), Log: log,
		Ask: func(context.Context) (map[int][]byte, error) {
			return map[int][]byte{1: []byte("x 1\n")}, errors.New("store is closed")
		},
	})
	defer j.Close()
	wantLines(t, shown(t, j), `hvd_up{host="a",rank="0"} 0`, `hvd_up{host="a",rank="1"} 1`,
		`x{host="a",rank="1"} 1`)
	if !testnet.Logged(entries, "asking the ranks for metrics failed", "store is closed") {
		t.Errorf("got log %v", entries.All())
	}
}

// A rank sends an arbitrary answer. The response to the scrape can be parsed, and the metrics of the other
// ranks are the same as without this answer.
func FuzzAnswer(f *testing.F) {
	const good = "# TYPE hvd_queue_depth gauge\nhvd_queue_depth 5\n# TYPE x histogram\nx_bucket{le=\"1\"} 1\nx_sum 1\nx_count 1\n"
	f.Add([]byte(good))
	f.Add(textOf(f, 0, asIs))
	f.Add([]byte("# TYPE x histogram\nx_bucket{le=\"1\"} 1\nx_sum 1\nx_count 1\nx 3\n"))
	f.Add([]byte("# TYPE x summary\nx{quantile=\"0.5\"} NaN\nx_sum -Inf\n# HELP x \\n\nx_count 1 5\n"))
	f.Add([]byte("x{a=\"\\\"\\n\\\\\",rank=\"0\"} +Inf 1\n{\"y\",\"b c\"=\"1\"} 2\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		j, _ := jobOf(t, 2, map[int][]byte{0: []byte(good), 1: answer})
		text := shown(t, j)
		wantLines(t, text, `hvd_up{host="a",rank="0"} 1`, `hvd_queue_depth{host="a",rank="0"} 5`,
			`hvd_job_ranks 2`)
		// Without the metrics that are reserved for the launcher, the response is a valid answer of a rank.
		var theirs []string
		for line := range strings.Lines(text) {
			name := strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE ")
			if !strings.HasPrefix(name, "hvd_up") && !strings.HasPrefix(name, "hvd_job_") {
				// The label rank is renamed. Otherwise the launcher would overwrite it, and series of two
				// ranks would have the same labels.
				theirs = append(theirs, strings.Replace(strings.Replace(line, `rank="0"`, `of="0"`, 1),
					`rank="1"`, `of="1"`, 1))
			}
		}
		again, entries := jobOf(t, 1, map[int][]byte{0: []byte(strings.Join(theirs, ""))})
		if !strings.Contains(shown(t, again), `hvd_up{host="a",rank="0"} 1`) {
			t.Errorf("what is shown cannot be read: %v\n%s", entries.All(), text)
		}
	})
}

func BenchmarkJob(b *testing.B) {
	for _, ranks := range []int{8, 64, 1024} {
		b.Run("ranks="+strconv.Itoa(ranks), func(b *testing.B) {
			answers := make(map[int][]byte)
			for r := range ranks {
				answers[r] = textOf(b, r, asIs)
			}
			hosts := slices.Repeat([]string{"a"}, ranks)
			ask := func(context.Context) (map[int][]byte, error) { return maps.Clone(answers), nil }
			b.ReportAllocs()
			for b.Loop() {
				// Each iteration needs a new Job, which has no recent answers to reuse.
				j := metrics.NewJob(metrics.JobConfig{Ranks: ranksOn(hosts...), Ask: ask})
				w := request(j.Handler(), "/metrics")
				b.SetBytes(int64(w.Body.Len()))
				j.Close()
			}
		})
	}
}
