package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/elastic"
	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// enough is how many steps the program of elastic jobs trains with all ranks after there were fewer.
const enough = 20

// training is the state of the program of elastic jobs.
type training struct {
	Step, Sum int64
	Least     int // the smallest number of ranks so far
	Again     int // steps with more than the smallest number of ranks
	saves     int64
}

func (s *training) Save() ([]byte, error) {
	s.saves++
	return json.Marshal(s)
}
func (s *training) Restore(data []byte) error {
	fmt.Println("restored")
	return json.Unmarshal(data, s)
}

// trainElastic trains until there were fewer ranks than at the start, and then more again. In each step it
// checks that the sum has the value of each rank once.
func trainElastic(ctx context.Context) error {
	fmt.Println("pid", os.Getpid())
	s := &training{Least: 1000}
	err := elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		places, err := hvd.Allgather(ctx, []int64{int64(hvd.LocalRank())})
		if err != nil {
			return err
		}
		want := int64(0)
		for _, at := range places {
			want += 1 << (8 * at)
		}
		fmt.Println("rank", hvd.Rank(), "of", hvd.Size())
		if s.Step == 0 {
			s.saves = 0
		}
		for s.Again < enough {
			sum, err := hvd.Allreduce(ctx, []int64{1 << (8 * hvd.LocalRank())}, hvd.Op(hvd.Sum))
			if err != nil {
				return err
			}
			if sum[0] != want {
				return fmt.Errorf("step %d: got the sum %x, want %x", s.Step, sum[0], want)
			}
			s.Step++
			s.Sum += sum[0]
			s.Least = min(s.Least, hvd.Size())
			if hvd.Size() > s.Least {
				s.Again++
			}
			if err := job.Commit(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, elastic.ErrRemoved) {
		if s.saves > s.Step { // no rank has died before, and each step was a commit
			return fmt.Errorf("saved %d times in %d steps", s.saves, s.Step)
		}
		fmt.Println("removed")
		return nil
	}
	if err == nil {
		fmt.Println("done", s.Step, s.Sum)
		err = errors.Join(trainAgain(ctx), hvd.Shutdown(ctx))
	}
	return err
}

// trainAgain is the second training of the program. If there are three ranks, the last one dies in it.
func trainAgain(ctx context.Context) error {
	s := &training{Step: int64(hvd.Rank())}
	err := elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		for s.Step < 10 {
			if s.Step == 5 && hvd.Size() == 3 && hvd.Rank() == 2 {
				if err := unix.Kill(os.Getpid(), unix.SIGKILL); err != nil {
					return err
				}
			}
			s.Step++
			s.Sum++
			if err := job.Commit(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	fmt.Println("trained again", s.Step, s.Sum, hvd.Size())
	return err
}

// TestElastic kills a rank of an elastic job, or stops it, while it trains. The others go on in their
// processes, and a new process takes the place of the dead one. Another rank dies in the second training, for
// which no process is added.
func TestElastic(t *testing.T) {
	random := draws(t)
	type fault struct {
		victim int
		signal unix.Signal
		memory string
	}
	var faults []fault
	for _, signal := range []unix.Signal{unix.SIGKILL, unix.SIGSTOP} {
		for _, memory := range []string{"shm", "tcp"} {
			for victim := range 3 {
				faults = append(faults, fault{victim, signal, memory})
			}
		}
	}
	for _, f := range sample(random, faults, 3) {
		after := time.Duration(random.IntN(100)) * time.Millisecond
		t.Run(fmt.Sprintf("%d/%s/%s", f.victim, unix.SignalName(f.signal), f.memory), func(t *testing.T) {
			t.Parallel()
			j := startHvdrun(t, nil, []string{"-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "1,1"}, "elastic",
				"HOROVOD_CPU_OPERATIONS="+f.memory, "HVD_LIVENESS_SECONDS=3")
			pids := j.awaitTraining(3)
			time.Sleep(after) // a random point of a step
			send(t, pids[f.victim], f.signal)
			j.ends(0)
			results := make(map[string]int)
			begun := 0
			for text := range strings.Lines(j.out()) {
				if m := prefix.FindStringSubmatch(strings.TrimSpace(text)); m != nil {
					if strings.HasPrefix(m[3], "done ") {
						results[m[3]]++
					}
					if strings.HasPrefix(m[3], "pid ") {
						begun++
					}
				}
			}
			if len(results) != 1 || begun != 4 {
				t.Errorf("got results %v of %d processes, want one result at 3 ranks, of 4 processes", results, begun)
			}
			if n := strings.Count(j.out(), ">:trained again 10 10 2\n"); n != 2 {
				t.Errorf("%d ranks have trained again with 10 commits, want 2", n)
			}
			testnet.WantText(t, j.err(), "generation 2: 2 ranks: rank "+strconv.Itoa(f.victim)+" (",
				"generation 3: 3 ranks: new: ", "generation 4: 2 ranks: rank 2 (")
			tellJob(t, j)
		})
	}
}

// TestElasticNotice sends SIGTERM to a rank of an elastic job. It leaves, and the others lose no step. Then
// it sends SIGTERM to hvdrun, which ends the others.
func TestElasticNotice(t *testing.T) {
	t.Parallel()
	j := startHvdrun(t, nil, []string{"-np", "3", "--min-np", "2", "--metrics-addr", "127.0.0.1:0"}, "elastic")
	pids := j.awaitTraining(3)
	restored := strings.Count(j.out(), "restored") // the ranks may get the first state from rank 0
	victim := draws(t).IntN(3)
	send(t, pids[victim], unix.SIGTERM)
	others, removed := 0, false
	j.until("the rank has left, and the others train", func(l line) bool {
		if strings.HasSuffix(l.text, " of 2") {
			others++
		}
		removed = removed || l.text == "removed"
		return others == 2 && removed
	})
	want := fmt.Sprintf("generation 2: 2 ranks: rank %d (", victim)
	j.untilError(want, func(text string) bool { return strings.Contains(text, want) })
	j.untilError("the stop", func(text string) bool {
		return strings.Contains(text, "generation 2: trains after a stop of ")
	})
	j.scrapes(`hvd_job_ranks 2`, `hvd_elastic_resets_total 1`, `,rank="0"} 1`, `,rank="1"} 1`)
	j.signal(unix.SIGQUIT)
	j.untilError("the report", func(text string) bool { return strings.Contains(text, "SIGQUIT: 2 of 2 ranks answered") })
	j.signal(unix.SIGTERM)
	j.ends(128 + int(unix.SIGTERM))
	if got := strings.Count(j.out(), "restored"); got != restored {
		t.Errorf("got %d calls of Restore, want %d", got, restored)
	}
	testnet.WantText(t, j.err(), "leaves: SIGTERM", "changes of the ranks: 1")
	if strings.Contains(j.err(), "again: killing") {
		t.Error("the ranks did not end after SIGTERM")
	}
	tellJob(t, j)
}

// awaitTraining waits until each of the given number of ranks of an elastic job trains. It returns the IDs of
// their processes.
func (j *job) awaitTraining(ranks int) map[int]int {
	j.t.Helper()
	pids, train := make(map[int]int), 0
	j.until("all ranks trained", func(l line) bool {
		if text, ok := strings.CutPrefix(l.text, "pid "); ok {
			pids[l.rank], _ = strconv.Atoi(text)
		}
		if strings.HasPrefix(l.text, "rank ") {
			train++
		}
		return train == ranks
	})
	return pids
}

// scrapes gets the metrics that hvdrun serves, and fails the test if they do not have all the texts.
func (j *job) scrapes(texts ...string) {
	j.t.Helper()
	body := get(j.t, j.metricsURL())
	for _, text := range texts {
		if !strings.Contains(body, text+"\n") {
			j.t.Errorf("got metrics without %s", text)
		}
	}
	if j.t.Failed() {
		j.t.Logf("metrics:\n%s", body)
	}
}

// TestElasticHosts adds a host to an elastic job and removes the first one, with rank 0 and the store of the
// ranks.
func TestElasticHosts(t *testing.T) {
	t.Parallel()
	hosts := testnet.NewHosts(t, 3)
	list := filepath.Join(t.TempDir(), "hosts")
	offer := func(hosts ...*testnet.Host) {
		text := ""
		for _, h := range hosts {
			text += h.Name + ":1\n"
		}
		testnet.WriteFile(t, list+".new", text)
		if err := os.Rename(list+".new", list); err != nil {
			t.Fatal(err)
		}
	}
	offer(hosts[1], hosts[2])
	j := startHvdrun(t, on(t, hosts[0]), []string{"-np", "2", "--min-np", "1", "--host-discovery-script", "cat " + list,
		"--agent", enterHost}, "elastic")
	says := func(what string) {
		j.untilError(what, func(text string) bool { return strings.Contains(text, what) })
	}
	says("generation 1: 2 ranks")
	offer(hosts[2])
	says("generation 2: 1 rank: rank 0 (" + hosts[1].Name + ":0) leaves: its slot is not offered any more")
	offer(hosts[2], hosts[0])
	says("generation 3: 2 ranks: new: " + hosts[0].Name + ":0")
	j.ends(0)
	var done []string
	for text := range strings.Lines(j.out()) {
		if _, result, ok := strings.Cut(text, "done "); ok {
			done = append(done, result)
		}
	}
	if len(done) != 2 || len(slices.Compact(done)) != 1 || !strings.Contains(j.out(), ">:removed\n") {
		t.Errorf("got results %q, want two equal ones, and a process that was removed", done)
	}
	tellJob(t, j)
}

// TestElasticIsland cuts off a host with half of the ranks, also rank 0. The ranks there end, and the others
// go on. When the host is back, new processes take their places.
func TestElasticIsland(t *testing.T) {
	t.Parallel()
	hosts := testnet.NewHosts(t, 3)
	j := startHvdrun(t, on(t, hosts[0]), []string{"-H", list(hosts[1:], layout{3, 3}, false), "--min-np", "3",
		"--blacklist-cooldown-range", "1,1", "--agent", enterHost}, "elastic", "HVD_LIVENESS_SECONDS=3")
	j.awaitLines(6, "rank ")
	var island []int // the process IDs there
	for text := range strings.Lines(j.out()) {
		label, text, ok := strings.Cut(text, "<stdout>:pid ")
		if pid, err := strconv.Atoi(strings.TrimSpace(text)); ok && err == nil &&
			strings.HasPrefix(label, "["+hosts[1].Name+":") {
			island = append(island, pid)
		}
	}
	if len(island) != 3 {
		t.Fatalf("got the processes %d on the island, want 3", island)
	}
	hosts[1].SetLink(false)
	const want = ": 3 ranks: "
	j.untilError(want, func(text string) bool { return strings.Contains(text, want) })
	for _, pid := range island {
		testnet.Eventually(t, "the processes on the island end", func() bool {
			return unix.Kill(pid, 0) == unix.ESRCH
		})
	}
	if first, second := "generation 2: 3 ranks: ", "generation 3: 3 ranks: "; !strings.Contains(j.err(), first) &&
		!strings.Contains(j.err(), second) {
		t.Errorf("got %q, want %q or %q: the ranks on the island leave together", j.err(), first, second)
	}
	hosts[1].SetLink(true)
	j.ends(0)
	results := make(map[string]int)
	for text := range strings.Lines(j.out()) {
		if _, result, ok := strings.Cut(text, ">:done "); ok {
			results[result]++
		}
	}
	if len(results) != 1 {
		t.Errorf("got results %v, want the same at all ranks", results)
	}
	tellJob(t, j)
}
