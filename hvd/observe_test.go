package hvd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// events counts the events of a timeline by name. It also counts the events that name a tensor, under the key
// "tensor NAME". If the file is not a valid timeline, the test fails.
func events(t *testing.T, file string) (names map[string]int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
		return nil
	}
	if err := timelinetest.Check(strings.NewReader(string(text))); err != nil {
		t.Errorf("%s: %v", file, err)
	}
	var all []struct {
		Name string `json:"name"`
		Args struct {
			Name string `json:"name"`
		} `json:"args"`
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Errorf("%s: %v", file, err)
	}
	names = make(map[string]int)
	for _, e := range all {
		names[e.Name]++
		names["tensor "+e.Args.Name]++
	}
	return names
}

// TestTimeline checks that each rank can start, redirect and stop its timeline while the job runs. Each file
// must contain exactly the operations that ran while it was the timeline. Shutdown must complete the last
// file.
func TestTimeline(t *testing.T) {
	dir := t.TempDir()
	path := func(name string, rank int) string {
		if rank > 0 {
			return filepath.Join(dir, fmt.Sprintf("%s.rank%d.json", name, rank))
		}
		return filepath.Join(dir, name+".json")
	}
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		do := func(name string) {
			must(hvd.Allreduce(ctx, []float32{1}, hvd.Name(name), hvd.On(e)))
		}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		must(e.StopTimeline()) // there is no timeline yet, so this does nothing
		do("before")
		must(e.StartTimeline(path("a", 0), true))
		do("in a")
		e.MarkStep(17)
		end := e.MarkRange("in a range")
		end()
		must(e.StartTimeline(path("a", 0), true)) // already records to this path, so nothing changes
		do("in a too")
		must(e.StartTimeline(path("b", 0), false))
		do("in b")
		if err := e.StartTimeline(filepath.Join(dir, "missing", "c.json"), false); err == nil ||
			!errors.Is(err, os.ErrNotExist) {
			t.Errorf("a timeline in a folder that is not there: %v", err)
		}
		if err := e.StartTimeline("", false); err == nil {
			t.Error("a timeline without a name has started")
		}
		do("in b too")
		must(e.StopTimeline())
		do("after")
		must(e.StartTimeline(path("d", 0), false))
		do("in d")
	})
	for rank := range 2 {
		for name, want := range map[string][]string{"a": {"in a", "in a too"}, "b": {"in b", "in b too"},
			"d": {"in d"}} {
			got := events(t, path(name, rank))
			for _, tensor := range want {
				if got["tensor "+tensor] != 1 {
					t.Errorf("rank %d: %s has no %s: %v", rank, name, tensor, got)
				}
			}
			if got["NEGOTIATE_ALLREDUCE"] != len(want) || got["ALLREDUCE"] != len(want) ||
				(got["CYCLE_START"] > 0) != (name == "a") || (got["hvd_step"] == 1) != (name == "a") ||
				(got["in a range"] == 1) != (name == "a") {
				t.Errorf("rank %d: %s has %v", rank, name, got)
			}
		}
	}
}

// TestTimelineShowsWaits checks that the timeline has the times in which the program waited for results.
func TestTimelineShowsWaits(t *testing.T) {
	dir := t.TempDir()
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		noError(t, e.StartTimeline(filepath.Join(dir, "t.json"), false))
		for i := range 100 {
			name := hvd.Name(fmt.Sprint("x", i))
			must(hvd.Allreduce(ctx, []float32{1}, name, hvd.On(e)))
		}
	})
	for _, name := range []string{"t.json", "t.rank1.json"} {
		text := testnet.ReadFile(t, filepath.Join(dir, name))
		s, err := timelinetest.Read(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Spans) == 0 {
			t.Errorf("%s has no wait", name)
		}
		for _, w := range s.Spans {
			if i := slices.IndexFunc(s.Operations, func(o timelinetest.Operation) bool {
				return o.Track == w.Name
			}); i < 0 || w.Begin < s.Operations[i].Submitted || w.End < s.Operations[i].Ended {
				t.Errorf("%s: got %+v, want a wait from after the submission to after the end", name, w)
			}
		}
	}
}

// TestTimelineDescribesJob checks that the timeline has the settings, the command line, the members of
// process sets, also of those that are added later, and the operations that are pending when it ends.
func TestTimelineDescribesJob(t *testing.T) {
	dir, stopped := t.TempDir(), make(chan struct{})
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		must(e.StartTimeline(filepath.Join(dir, "t.json"), false))
		_, err := hvd.AddProcessSet(ctx, []int{e.Rank()}, hvd.MembersOnly(), hvd.On(e))
		must(err)
		if e.Rank() == 1 {
			<-stopped
		}
		h, err := hvd.AllreduceAsync([]float32{1}, hvd.Name("x"), hvd.On(e))
		must(err)
		if e.Rank() == 0 {
			must(e.StopTimeline())
			close(stopped)
		}
		_, err = h.Wait(ctx)
		must(err)
	}, "HOROVOD_CACHE_CAPACITY", "77")
	text := testnet.ReadFile(t, filepath.Join(dir, "t.json"))
	s, err := timelinetest.Read(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if s.Settings["HOROVOD_CACHE_CAPACITY"] != "77" || len(s.Command) == 0 || s.Command[0] != os.Args[0] {
		t.Errorf("got the command %q and the settings %q", s.Command, s.Settings)
	}
	for name := range s.Settings {
		if strings.Contains(name, "SECRET") || strings.Contains(name, "UNIQUE_ID") {
			t.Errorf("the timeline has the setting %s, which is a secret", name)
		}
	}
	if len(s.Sets) != 1 || !slices.Equal(s.Pending, []string{"x"}) {
		t.Errorf("got the sets %v and the pending operations %q, want one set of rank 0, and x", s.Sets,
			s.Pending)
	}
	for _, ranks := range s.Sets {
		if !slices.Equal(ranks, []int{0}) {
			t.Errorf("got a set of ranks %v, want rank 0", ranks)
		}
	}
}

// TestTimelineAfterShutdown checks that StartTimeline fails after Shutdown and creates no file, because
// nothing would end such a timeline.
func TestTimelineAfterShutdown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	engines(t, 1, func(ctx context.Context, e *hvd.Engine) {
		noError(t, e.Shutdown(ctx))
		if err := e.StartTimeline(path, false); !errors.Is(err, hvd.ErrShutDown) {
			t.Errorf("got error %v, want ErrShutDown", err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after StartTimeline, stat of the file: got error %v, want none such", err)
		}
		if err := e.StopTimeline(); err != nil {
			t.Errorf("StopTimeline: %v", err)
		}
	}, nil)
}

// TestTimelineBySetting checks that HOROVOD_TIMELINE starts a timeline at each rank, and that the job works
// even if the file cannot be written.
func TestTimelineBySetting(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{filepath.Join(dir, "t.json"), filepath.Join(dir, "missing", "t.json")} {
		run(t, 2, func(ctx context.Context, e *hvd.Engine) {
			if got, err := hvd.Allreduce(ctx, []float32{1}, hvd.Op(hvd.Sum), hvd.Name("x"),
				hvd.On(e)); err != nil || got[0] != 2 {
				t.Errorf("got %v, %v", got, err)
			}
		}, "HOROVOD_TIMELINE", file)
	}
	if got := events(t, filepath.Join(dir, "t.rank1.json")); got["tensor x"] != 1 {
		t.Errorf("rank 1: %v", got)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestMetricsAndDump runs three operations of one name and starts a fourth, which waits. The metrics and the
// dump of a rank must show all four.
func TestMetricsAndDump(t *testing.T) {
	var looked sync.WaitGroup
	looked.Add(2)
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		for range 3 {
			must(hvd.Allreduce(ctx, []float32{1, 2}, hvd.Name("x"), hvd.On(e)))
		}
		waits := must(hvd.AllreduceAsync([]int64{1}, hvd.Name("pending"+fmt.Sprint(e.Rank())), hvd.On(e)))
		server := httptest.NewServer(e.MetricsHandler())
		defer server.Close()
		text := must(testnet.Get(ctx, server.URL+"/metrics"))
		for _, want := range []string{
			`hvd_world_size 2`, `hvd_queue_depth 1`, `hvd_response_cache_hits_total 2`,
			`hvd_response_cache_misses_total 1`,
			`hvd_collective_bytes_total{backend="tcp",dtype="float32",op="allreduce"} 24`,
		} {
			if !strings.Contains(text, "\n"+want+"\n") {
				t.Errorf("rank %d: no %s in\n%s", e.Rank(), want, text)
			}
		}
		dump := must(e.Dump())
		var d struct {
			Rank       int `json:"rank"`
			Recorded   int `json:"recorded"`
			Operations []struct {
				Name string `json:"name"`
			} `json:"operations"`
			Pending []struct {
				Name string `json:"name"`
			} `json:"pending"`
		}
		if err := json.Unmarshal(dump, &d); err != nil {
			t.Errorf("%v in %s", err, dump)
		}
		if d.Rank != e.Rank() || d.Recorded != 3 || len(d.Operations) != 3 || d.Operations[2].Name != "x" ||
			len(d.Pending) != 1 ||
			d.Pending[0].Name != "pending"+fmt.Sprint(e.Rank()) {
			t.Errorf("rank %d: the dump is %s", e.Rank(), dump)
		}
		looked.Done()
		looked.Wait()
		must(hvd.Allreduce(ctx, []int64{1}, hvd.Name("pending"+fmt.Sprint(1-e.Rank())),
			hvd.On(e)))
		must(waits.Wait(ctx))
	}, "HOROVOD_CPU_OPERATIONS", "tcp")
}

// TestNoRecorder checks that a dump lists the operations that the rank waits for even if the flight recorder
// is off.
func TestNoRecorder(t *testing.T) {
	run(t, 2, func(ctx context.Context, e *hvd.Engine) {
		if e.Rank() == 0 {
			waits := must(hvd.AllreduceAsync([]int64{1}, hvd.Name("waits"), hvd.On(e)))
			if text, err := e.Dump(); err != nil || !strings.Contains(string(text), `"waits"`) ||
				!strings.Contains(string(text), `"recorded": 0`) {
				t.Errorf("got %s and %v", text, err)
			}
			noError(t, hvd.Barrier(ctx, hvd.Name("dumped"), hvd.On(e)))
			must(waits.Wait(ctx))
			return
		}
		noError(t, hvd.Barrier(ctx, hvd.Name("dumped"), hvd.On(e)))
		must(hvd.Allreduce(ctx, []int64{1}, hvd.Name("waits"), hvd.On(e)))
	}, "HVD_FLIGHT_RECORDER", "0")
}

// TestMetricsAddressTaken checks that Init logs a warning if the address for metrics is in use, and fails if
// that address is malformed.
func TestMetricsAddressTaken(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	addr := strings.TrimPrefix(server.URL, "http://")
	core, logged := observer.New(zapcore.WarnLevel)
	e, err := hvd.New(t.Context(), hvd.WithSetting("HVD_METRICS_ADDR", addr), hvd.WithLogger(writesTo(core)))
	if err != nil {
		t.Fatal(err)
	}
	if lines := logged.FilterMessageSnippet("HVD_METRICS_ADDR").All(); len(lines) != 1 ||
		!strings.Contains(fmt.Sprint(lines[0].ContextMap()), addr) {
		t.Errorf("logged %v", logged.All())
	}
	noError(t, e.Shutdown(t.Context()))
	if _, err := hvd.New(t.Context(), hvd.WithSetting("HVD_METRICS_ADDR", "here")); err == nil ||
		!strings.Contains(err.Error(), "HVD_METRICS_ADDR") {
		t.Errorf("got %v, want an error that names the setting", err)
	}
}

// TestTensorsAreNotKept checks that neither the flight recorder nor the timeline keeps tensors in memory
// after their operations.
func TestTensorsAreNotKept(t *testing.T) {
	const numBytes, times = 1 << 20, 200
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		before := heap() // may include memory of earlier tests that is freed during this test
		for i := range times {
			x := make([]byte, numBytes)
			must(hvd.Allreduce(ctx, x, hvd.Op(hvd.Max), hvd.Name(fmt.Sprint("x", i%3)),
				hvd.On(e)))
			must(hvd.Allgather(ctx, x, hvd.Name(fmt.Sprint("y", i%3)), hvd.On(e)))
		}
		if now, most := heap(), before+50*numBytes; now > most {
			t.Errorf("after %d operations on %d bytes %d are in use, want at most %d", 2*times, numBytes,
				now, most)
		}
	}, "HOROVOD_TIMELINE", filepath.Join(t.TempDir(), "t.json"))
}

// TestShutdownWhileScraped checks that Shutdown returns while clients scrape the metrics without pause.
func TestShutdownWhileScraped(t *testing.T) {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(testnet.FreePort(t)))
	for range 5 {
		e, err := hvd.New(t.Context(), hvd.WithSetting("HVD_METRICS_ADDR", addr))
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		var scrapers sync.WaitGroup
		var scraped atomic.Int64
		for range 8 {
			scrapers.Go(func() {
				client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: deadline}
				for {
					select {
					case <-ended:
						return
					default:
					}
					if resp, err := client.Get("http://" + addr + "/metrics"); err == nil {
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
						scraped.Add(1)
					}
				}
			})
		}
		for scraped.Load() < 20 {
			if _, err := hvd.Allreduce(t.Context(), []int64{1}, hvd.Name("x"), hvd.On(e)); err != nil {
				t.Fatal(err)
			}
		}
		down := make(chan error, 1)
		go func() { down <- e.Shutdown(t.Context()) }()
		select {
		case err := <-down:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(deadline):
			t.Fatal("the shutdown hangs")
		}
		close(ended)
		scrapers.Wait()
	}
}

// TestMetricsInAStall checks that the function of OnStall can read the metrics while it handles a report.
func TestMetricsInAStall(t *testing.T) {
	ctx, kv := meeting(t)
	var zero atomic.Pointer[hvd.Engine]
	saw := make(chan string, 1)
	ranks(t, 2, func(r int) {
		opts := append(place(kv, r, 2, "HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2", "HOROVOD_LOG_LEVEL",
			"fatal"), hvd.OnStall(func(hvd.Stall) {
			if e := zero.Load(); e != nil {
				w := httptest.NewRecorder()
				e.MetricsHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
				select {
				case saw <- w.Body.String():
				default:
				}
			}
		}))
		e := must(hvd.New(ctx, opts...))
		if r == 0 {
			zero.Store(e)
		} else {
			select {
			case text := <-saw:
				if !strings.Contains(text, "hvd_world_size 2") {
					t.Errorf("saw %s", text)
				}
			case <-ctx.Done():
				t.Error("no stall was reported")
			}
		}
		must(hvd.Allreduce(ctx, []int64{1}, hvd.Name("x"), hvd.On(e)))
		noError(t, e.Shutdown(ctx))
	})
}
