package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
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

const (
	// stepsVariable makes the program "elastic-exact" vote for each step, instead of a commit every few
	// steps.
	stepsVariable = "GOHVD_E2E_STEPS"
	numSamples    = 10_007
)

// exact is the state of the program "elastic-exact".
type exact struct {
	next   uint64 // the first sample, of all epochs, that was not used
	used   []byte // how often each sample was used
	digest uint64 // of all samples in the order in which they were used
	// history has, for each call of the training function, the number of ranks and the first sample.
	history []uint64
}

func (s *exact) Save() ([]byte, error) {
	head := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, s.next), s.digest)
	data := append(head, s.used...)
	for _, n := range s.history {
		data = binary.LittleEndian.AppendUint64(data, n)
	}
	return data, nil
}

func (s *exact) Restore(data []byte) error {
	s.next, s.digest = binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint64(data[8:])
	data = data[16+copy(s.used, data[16:]):]
	s.history = nil
	for ; len(data) > 0; data = data[8:] {
		s.history = append(s.history, binary.LittleEndian.Uint64(data))
	}
	return nil
}

// add changes the state by a step with these samples, of which one is of each rank.
func (s *exact) add(samples []int64) {
	epochEnds := (s.next/numSamples + 1) * numSamples
	h := fnv.New64a()
	for _, i := range samples {
		if uint64(i) < epochEnds {
			_ = binary.Write(h, binary.LittleEndian, i) // a hash takes everything
			s.used[i%numSamples]++
		}
	}
	_ = binary.Write(h, binary.LittleEndian, s.digest)
	s.digest, s.next = h.Sum64(), min(s.next+uint64(len(samples)), epochEnds)
}

// replay returns the digest of an undisturbed training with the numbers of ranks of a history, up to a
// sample.
func replay(history []uint64, end uint64) uint64 {
	s := &exact{used: make([]byte, numSamples)}
	for ; len(history) > 0; history = history[2:] {
		stop := end
		if len(history) > 2 {
			stop = history[3]
		}
		for s.next < stop {
			samples := make([]int64, history[0])
			for r := range samples {
				samples[r] = int64(s.next) + int64(r)
			}
			s.add(samples)
		}
	}
	return s.digest
}

// trainExactly uses each sample once in each epoch, until there is a file named end and the epoch ends. In
// each step every rank uses one sample, and the ranks check that their states are equal. The first and the
// last rank are a process set, and that of the generation before does not exist any more.
func trainExactly(ctx context.Context) error {
	folder, bySteps := os.Getenv(folderVariable), os.Getenv(stepsVariable) != ""
	s := &exact{used: make([]byte, numSamples)}
	var ends *hvd.ProcessSet
	err := elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		if ends != nil {
			// While the engine of the earlier generation still ends in the background, its set exists, and
			// the error is that with which the generation has ended.
			if _, err := hvd.Allreduce(ctx, []int64{1}, hvd.Over(ends)); err == nil {
				return errors.New("process set of an earlier generation: got no error")
			}
		}
		var err error
		if ends, err = hvd.AddProcessSet(ctx, []int{0, hvd.Size() - 1}); err != nil {
			return err
		}
		for first := true; ; first = false {
			if ends.Included() {
				sum, err := hvd.Allreduce(ctx, []int64{1}, hvd.Over(ends), hvd.Op(hvd.Sum), hvd.Name("ends"))
				if err != nil || sum[0] != int64(ends.Size()) {
					return fmt.Errorf("got sum %v of %v and error %w", sum, ends, err)
				}
			}
			ended, err := s.step(ctx, job, folder, bySteps, first)
			if err != nil || ended {
				return err
			}
			if first {
				reportGeneration()
			}
		}
	})
	if errors.Is(err, elastic.ErrRemoved) {
		return nil
	}
	if err == nil {
		fmt.Println("done", s.digest == replay(s.history, s.next), slices.Min(s.used) == slices.Max(s.used),
			s.digest, s.history)
		err = hvd.Shutdown(ctx)
	}
	return err
}

// step does a step, and reports whether the training ends.
func (s *exact) step(ctx context.Context, job *elastic.Job, folder string, bySteps, first bool) (ended bool,
	err error) {
	_, missing := os.Stat(filepath.Join(folder, "end"))
	sample, end := int64(s.next)+int64(hvd.Rank()), int64(0)
	if missing == nil {
		end = 1
	}
	all, err := hvd.Allgather(ctx, []int64{sample, int64(s.digest), end})
	if err != nil {
		return false, err
	}
	var samples []int64
	for r := range hvd.Size() {
		if got := uint64(all[3*r+1]); got != s.digest {
			return false, fmt.Errorf("sample %d: got digest %x at rank %d, want %x", s.next, got, r, s.digest)
		}
		samples = append(samples, all[3*r])
		end = max(end, all[3*r+2])
	}
	if end == 1 && s.next%numSamples == 0 && s.next > 0 {
		return true, nil
	}
	apply := func() {
		if first {
			s.history = append(s.history, uint64(hvd.Size()), s.next)
		}
		s.add(samples)
	}
	if bySteps {
		return false, job.Step(ctx, apply)
	}
	if apply(); s.next%7 == 0 {
		err = job.Commit(ctx)
	}
	return false, err
}

// votesVariable has the number of steps of the program "elastic-votes".
const votesVariable = "GOHVD_E2E_VOTES"

// voteForSteps measures votes for steps that do nothing and, in turn with them, allreduces of 4 bytes.
func voteForSteps(ctx context.Context) error {
	n, err := strconv.Atoi(os.Getenv(votesVariable))
	if err != nil {
		return err
	}
	err = elastic.Run(ctx, &exact{}, func(ctx context.Context, job *elastic.Job) error {
		var votes, sums []time.Duration
		for range n {
			began := time.Now()
			if err := job.Step(ctx, func() {}); err != nil {
				return err
			}
			voted := time.Now()
			if _, err := hvd.Allreduce(ctx, []int32{1}, hvd.Op(hvd.Sum), hvd.Name("x")); err != nil {
				return err
			}
			votes, sums = append(votes, voted.Sub(began)), append(sums, time.Since(voted))
		}
		slices.Sort(votes)
		slices.Sort(sums)
		fmt.Println("votes took", votes[n/2].Nanoseconds(), sums[n/2].Nanoseconds())
		return nil
	})
	return errors.Join(err, hvd.Shutdown(ctx))
}

// BenchmarkElasticVote measures the vote for a step, which is the cost of a step that does nothing, with 2
// ranks, and an allreduce of 4 bytes for comparison. It reports the medians.
func BenchmarkElasticVote(b *testing.B) {
	j := startHvdrun(b, nil, []string{"-np", "2", "--min-np", "1"}, "elastic-votes",
		votesVariable+"="+strconv.Itoa(b.N))
	j.until("the votes", func(l line) bool {
		var vote, sum int64
		n, _ := fmt.Sscanf(l.text, "votes took %d %d", &vote, &sum)
		b.ReportMetric(float64(vote), "ns/op")
		b.ReportMetric(float64(sum), "ns/allreduce")
		return n == 2
	})
}

// TestElasticExact kills ranks at random moments. With a vote for each step, and with a commit every few
// steps, the states of all ranks are equal after each step, each sample of an epoch is used once, and the
// result is that of an undisturbed training with the same numbers of ranks.
func TestElasticExact(t *testing.T) {
	const ranks = 4
	kills := 3 // for 6 changes of the ranks
	if *whole > 0 {
		kills = 25 * *whole
	}
	random := draws(t)
	for _, steps := range []string{"", "1"} {
		seed := time.Duration(random.IntN(50))
		t.Run("steps="+steps, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			flags := []string{"-np", strconv.Itoa(ranks), "--min-np", "3", "--blacklist-cooldown-range", "1,1"}
			j := startHvdrun(t, nil, flags, "elastic-exact", folderVariable+"="+folder, stepsVariable+"="+steps)
			for i := range kills {
				now := j.awaitBegun(ranks)
				time.Sleep(seed * time.Duration(i+1) * time.Millisecond) // a random point of a step
				send(t, now[(i+int(seed))%ranks].pid, unix.SIGKILL)
			}
			j.awaitBegun(ranks)
			testnet.WriteFile(t, filepath.Join(folder, "end"), "")
			j.ends(0)
			var results []string
			for text := range strings.Lines(j.out()) {
				if _, result, ok := strings.Cut(strings.TrimSpace(text), ">:done "); ok {
					results = append(results, result)
				}
			}
			if len(results) != ranks || len(slices.Compact(results)) != 1 ||
				!strings.HasPrefix(results[0], "true true ") {
				t.Errorf("got results %q, want %d equal ones with true true", results, ranks)
			}
			tellJob(t, j)
		})
	}
}

// stepAhead is the program "elastic-ahead": in step 10, rank 2 learns that the vote for the step has
// succeeded, the ranks 0 and 3 do not, and rank 1 dies.
func stepAhead(ctx context.Context) error {
	seen := filepath.Join(os.Getenv(folderVariable), "seen")
	s, role := &exact{used: make([]byte, numSamples)}, -1
	var begun []uint64
	err := elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		if begun = append(begun, s.next); len(begun) == 1 {
			role = hvd.Rank()
		}
		for s.next < 20 {
			if _, err := hvd.Allreduce(ctx, []int64{1}, hvd.Name("gradient")); err != nil {
				return err
			}
			if len(begun) == 1 && s.next == 10 && role != 2 {
				return missVote(ctx, role == 1, seen)
			}
			if err := job.Step(ctx, func() { s.next++ }); err != nil {
				return err
			}
			if s.next == 11 && role == 2 {
				if err := os.WriteFile(seen, nil, 0o600); err != nil {
					return err
				}
			}
		}
		return nil
	})
	fmt.Println("begun", begun)
	return errors.Join(err, hvd.Shutdown(ctx))
}

// missVote takes part in the operation of a vote for a step, but package elastic does not learn of it. Then
// the process dies when another rank has made the step, or learns that this process has died.
func missVote(ctx context.Context, dies bool, seen string) error {
	const ballot = 1 << 16 // of commits.Step
	if _, err := hvd.Allreduce(ctx, []int64{ballot}, hvd.Op(hvd.Sum), hvd.Name("elastic.vote")); err != nil {
		return err
	}
	for dies {
		if _, err := os.Stat(seen); err == nil {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		time.Sleep(time.Millisecond)
	}
	if err := hvd.Barrier(ctx); err != nil {
		return err
	}
	return errors.New("rank 1 has not died")
}

// TestElasticAhead kills a rank when only one of the others has learned of the vote for a step. That step is
// not made again: the others get the state from the rank that has made it.
func TestElasticAhead(t *testing.T) {
	t.Parallel()
	j := startHvdrun(t, nil, []string{"-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "3600,3600"},
		"elastic-ahead", folderVariable+"="+t.TempDir())
	j.ends(0)
	if got := strings.Count(j.out(), ">:begun [0 11]\n"); got != 3 {
		t.Errorf("got %d ranks that began at the steps 0 and 11, want 3", got)
	}
	tellJob(t, j)
}
