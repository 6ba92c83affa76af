package rank

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/timeline/report"
)

// observed runs a job with the given epoch. At each rank it attaches a Watch to the rank's engine and calls f
// with the Watch.
func observed(t *testing.T, ranks int, set config.Config, epoch uint64,
	f func(r *testcluster.Rank, o *Watch)) {
	t.Helper()
	testcluster.Run(t, testcluster.Options{Ranks: ranks}, func(r *testcluster.Rank) {
		o := NewWatch(WatchConfig{
			Settings: &set, Rank: int(r.Rank), Size: r.Size, Host: "h", Epoch: epoch, Log: zap.NewNop(),
			Sets: func() map[topo.ProcessSetID][]topo.Rank { return nil },
		})
		if err := o.Attach(r.Engine); err != nil {
			t.Error(err)
			return
		}
		f(r, o)
		r.Do(testcluster.Barrier("the end"))
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Each timeline gets a file of its own, whether a setting or a signal has started the timeline. Timelines of
// a later epoch do not overwrite the files of an earlier epoch.
func TestFilesOfEpochs(t *testing.T) {
	for name, c := range map[string]struct {
		fromStart bool
		want      []string
	}{
		"signals alone": {false, []string{"hvd-timeline-2.json", "hvd-timeline.epoch2-2.json",
			"hvd-timeline.epoch2.json", "hvd-timeline.json"}},
		"from the start": {true, []string{"t-1.json", "t-2.json", "t.epoch2-1.json", "t.epoch2-2.json",
			"t.epoch2.json", "t.json"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			set := config.Config{}
			if c.fromStart {
				set.Timeline = "t.json"
			}
			for epoch := range uint64(2) {
				observed(t, 2, set, epoch+1, func(r *testcluster.Rank, o *Watch) {
					times := 4 // four signals start and stop two timelines
					if c.fromStart {
						times++ // the first signal stops the timeline of the settings
					}
					for range times {
						if err := o.timeline.toggle(); err != nil {
							t.Error(err)
						}
					}
				})
			}
			for rank, part := range []string{"", ".rank1"} {
				var want []string
				for _, name := range c.want {
					want = append(want, strings.TrimSuffix(name, ".json")+part+".json")
				}
				all, err := filepath.Glob("*.json")
				if err != nil {
					t.Fatal(err)
				}
				all = slices.DeleteFunc(all, func(name string) bool {
					return strings.Contains(name, ".rank1") != (rank == 1)
				})
				slices.Sort(want)
				if slices.Sort(all); !slices.Equal(all, want) {
					t.Errorf("rank %d: got files %v, want %v", rank, all, want)
				}
			}
		})
	}
}

// If a signal arrives as soon as Init has returned, it starts the timeline. The test uses one processor, so
// that no other goroutine runs between Init and the signal.
func TestSignalAtOnce(t *testing.T) {
	t.Chdir(t.TempDir())
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	observed(t, 1, config.Config{TimelineSignal: "SIGUSR2"}, 1, func(_ *testcluster.Rank, o *Watch) {
		if err := unix.Kill(unix.Getpid(), unix.SIGUSR2); err != nil {
			t.Error(err)
		}
		for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
			o.timeline.mu.Lock()
			started := o.timeline.started
			o.timeline.mu.Unlock()
			if started > 0 {
				break
			}
			if time.Now().After(end) {
				t.Error("the signal was lost")
				break
			}
		}
	})
}

// If the settings direct the timeline to a device, a signal that restarts the timeline makes it write to the
// same device.
func TestSignalsAndDevices(t *testing.T) {
	observed(t, 2, config.Config{Timeline: os.DevNull}, 2, func(_ *testcluster.Rank, o *Watch) {
		for range 2 {
			if err := o.timeline.toggle(); err != nil {
				t.Error(err)
			}
		}
		if o.timeline.path != os.DevNull {
			t.Errorf("got %q, want %s", o.timeline.path, os.DevNull)
		}
	})
}

// If a file in the folder was written by a rank of an earlier job that had more ranks, the report says so and
// ignores the file.
func TestFilesOfTwoJobs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	job := func(ranks int) {
		observed(t, 2, config.Config{Timeline: config.TimelineDynamic}, 1,
			func(r *testcluster.Rank, o *Watch) {
				if int(r.Rank) < ranks {
					if err := o.StartTimeline(path, false); err != nil {
						t.Error(err)
					}
				}
				for range 3 {
					r.Do(testcluster.Allreduce("x", tensor.Float32, tensor.Shape{1}, tensor.Sum,
						make([]byte, 4)))
				}
			})
	}
	check := func(missing []int, problems ...string) {
		t.Helper()
		j, bad, err := report.Open([]string{path})
		if bad != nil || err != nil {
			t.Fatal(bad, err)
		}
		r, err := j.Report(report.Options{})
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(r.Problems, "\n")
		if !slices.Equal(r.Missing, missing) || len(r.Problems) != len(problems) {
			t.Errorf("got missing ranks %v and problems %q, want %v and %q", r.Missing, r.Problems, missing,
				problems)
		}
		for _, p := range problems {
			if !strings.Contains(text, p) {
				t.Errorf("got %q, want %q", r.Problems, p)
			}
		}
	}
	job(2)
	check(nil)
	job(1)
	check([]int{1}, "t.rank1.json is left out: it is of another job", "no file of rank 1")
	job(2)
	check(nil)
}

// A rank records only for a reader that asks. Each entry is sent once.
func TestRecordsForAReader(t *testing.T) {
	observed(t, 2, config.Config{}, 1, func(r *testcluster.Rank, o *Watch) {
		ask := func(question string) *live.Records {
			t.Helper()
			text := o.records(question)
			if text == nil {
				return nil
			}
			all, err := live.DecodeRecords(fmt.Appendf(nil, `{"%d":%s}`, r.Rank, text))
			if err != nil {
				t.Error(err)
				return nil
			}
			return all[int(r.Rank)]
		}
		r.Do(testcluster.Barrier("before"))
		if got := ask("7:0"); got != nil {
			t.Errorf("rank %d answers a question to rank 7: %+v", r.Rank, got)
		}
		me := fmt.Sprintf("%d:", r.Rank)
		first := ask("7:0 " + me + "0")
		r.Do(testcluster.Barrier("while it records"))
		second := ask(me + fmt.Sprint(first.Next()))
		third := ask(me + fmt.Sprint(second.Next()))
		if len(first.Entries) != 0 || len(second.Entries) != 1 || len(third.Entries) != 0 ||
			second.Entries[0].Operation.Records[0].Name != "while it records" || second.Rank != int(r.Rank) ||
			second.Clock.Domain == "" {
			t.Errorf("rank %d: got %+v, %+v and %+v, want one operation", r.Rank, first, second, third)
		}
		o.mu.Lock()
		recorder := o.live
		o.forget.Reset(0) // as if nobody had asked for 10 s
		o.mu.Unlock()
		for begun := time.Now(); ; time.Sleep(time.Millisecond) {
			o.mu.Lock()
			over := o.live == nil
			o.mu.Unlock()
			if over {
				break
			}
			if time.Since(begun) > time.Minute {
				t.Error("the rank still records")
				break
			}
		}
		ask(me + "0")
		o.mu.Lock()
		e, later := o.engine, o.live
		o.mu.Unlock()
		o.endRecording(e, recorder) // the timer of the first one, once more
		o.mu.Lock()
		if o.live != later {
			t.Errorf("rank %d has forgotten the recorder that it uses", r.Rank)
		}
		o.mu.Unlock()
		o.endRecording(e, later)
		r.Do(testcluster.Barrier("later"))
		if got := recorder.Since(second.Next()); len(got.Entries) != 0 {
			t.Errorf("rank %d has recorded %+v without a reader", r.Rank, got)
		}
	})
}
