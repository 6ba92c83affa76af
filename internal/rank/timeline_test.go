package rank

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

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

// The launcher starts timelines with the path of the settings or with a given one. Each has files of its own,
// no file is overwritten, and a running timeline is not replaced.
func TestTimelinesThatTheLauncherStarts(t *testing.T) {
	for settings, base := range map[string]string{"": "hvd-timeline", config.TimelineDynamic: "hvd-timeline", "t.json": "t"} {
		t.Run(settings, func(t *testing.T) {
			t.Chdir(t.TempDir())
			folder, err := os.Getwd()
			if err != nil {
				t.Fatal(err)
			}
			check := func(r *testcluster.Rank, file, want string) {
				t.Helper()
				want = filepath.Join(folder, want)
				if r.Rank > 0 {
					want = strings.TrimSuffix(want, ".json") + ".rank1.json"
				}
				if file != want {
					t.Errorf("rank %d: got the file %q, want %q", r.Rank, file, want)
				}
			}
			for epoch, middle := range []string{"", ".epoch2"} {
				observed(t, 2, config.Config{Timeline: settings}, uint64(epoch+1),
					func(r *testcluster.Rank, o *Watch) {
						l := &o.timeline
						start := func(question, want string) {
							t.Helper()
							file, err := l.startAsked(question)
							if err != nil || file != l.file() {
								t.Errorf("got %q, %v, and %q is written", file, err, l.file())
							}
							check(r, file, want)
						}
						refused := func(question, want string) {
							t.Helper()
							_, err := l.startAsked(question)
							if err == nil || !strings.Contains(err.Error(), want) {
								t.Errorf("%q: got %v, want %q", question, err, want)
							}
						}
						if base == "t" {
							refused("now ", "this rank already writes one to "+folder)
							file, err := l.stopAsked()
							if err != nil {
								t.Error(err)
							}
							check(r, file, base+middle+".json")
						}
						start("now ", base+middle+"-now.json")
						start("now ", base+middle+"-now.json") // a repetition
						refused("later ", "this rank already writes one to "+folder)
						if file, err := l.stopAsked(); file == "" || err != nil {
							t.Errorf("got %q, %v, want the file", file, err)
						}
						if file, err := l.stopAsked(); file != "" || err != nil {
							t.Errorf("got %q, %v, want that no timeline ended", file, err)
						}
						refused("now ", "exists: choose another name")
						old := []string{"old.7.json", "old.rank1.7.json"}[r.Rank] // a segment of an earlier timeline
						of := []string{"old.json", "old.rank1.json"}[r.Rank]
						if err := os.WriteFile(old, fmt.Appendf(nil, `[{"name":"hvd_rank","args":{"rank":0,"file":%q,`, of), 0o600); err != nil {
							t.Error(err)
						}
						refused("now old.json", old+" exists: choose another name")
						if _, err := os.Stat(old); err != nil {
							t.Error(err)
						}
						for range 2 { // a device is not replaced, so that it may be used again
							if _, err := l.startAsked("now /dev/null"); err != nil {
								t.Error(err)
							}
							if _, err := l.stopAsked(); err != nil {
								t.Error(err)
							}
						}
						refused("now no/such/folder.json", "no such file or directory")
						given := fmt.Sprintf("a name%d.json", epoch)
						start("now "+given, given)
					})
			}
		})
	}
}

// Process sets are added and removed while a timeline opens. Its later segments have exactly those that
// exist.
func TestSetsWhileATimelineOpens(t *testing.T) {
	t.Chdir(t.TempDir())
	testcluster.Run(t, testcluster.Options{Ranks: 1}, func(r *testcluster.Rank) {
		sets := map[topo.ProcessSetID][]topo.Rank{1: {0}, 2: {0}}
		var o *Watch
		opens := sync.OnceFunc(func() {
			delete(sets, 1)
			o.timeline.removed(&Set{ID: 1})
			sets[3] = []topo.Rank{0}
			o.timeline.added(&Set{ID: 3, Ranks: sets[3]})
		})
		o = NewWatch(WatchConfig{
			Settings: &config.Config{TimelineMaxMiB: 1}, Size: 1, Host: "h", Epoch: 1, Log: zap.NewNop(),
			Sets: func() map[topo.ProcessSetID][]topo.Rank {
				defer opens()
				return maps.Clone(sets)
			},
		})
		if err := errors.Join(o.Attach(r.Engine), o.StartTimeline("t.json", true)); err != nil {
			t.Error(err)
			return
		}
		for i := range 4000 { // more than fit into a segment
			o.timeline.current.Cycle(time.Duration(i))
		}
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		text, err := os.ReadFile("t.json")
		if err != nil || !strings.Contains(string(text), `"segment":2`) {
			t.Errorf("got %v and %.500s, want segment 2", err, text)
		}
		for id := 1; id <= 3; id++ {
			has := strings.Contains(string(text), fmt.Sprintf(`"set":%d,"ranks":[0]`, id))
			if has != (id > 1) {
				t.Errorf("the segment has set %d: %v", id, has)
			}
		}
	})
}

// A rank whose disk does not answer says so, and goes on to answer questions.
func TestTheDiskDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewWatch(WatchConfig{Settings: &config.Config{}, Log: zap.NewNop()})
		disk := make(chan struct{})
		slow := func() (string, error) {
			<-disk
			return "t.json", nil
		}
		for _, want := range []string{"has not answered for 7s", "has not answered to an earlier request"} {
			if got := string(r.switchTimeline(slow)); !strings.Contains(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		close(disk)
		synctest.Wait()
		if got := string(r.switchTimeline(slow)); !strings.Contains(got, "t.json") {
			t.Errorf("got %q, want the file", got)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
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
	check([]int{1}, "t.rank1.json is left out: it is of another job, whose rank started at ", "no file of rank 1")
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
			all, err := live.DecodeRecords(live.EncodeAnswers(map[int][]byte{int(r.Rank): text}))
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
