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
}

func (s *exact) Save() ([]byte, error) {
	head := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, s.next), s.digest)
	return append(head, s.used...), nil
}

func (s *exact) Restore(data []byte) error {
	s.next, s.digest = binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint64(data[8:])
	copy(s.used, data[16:])
	return nil
}

// trainExactly uses each sample once in each epoch, until there is a file named end and the epoch ends. In
// each step every rank uses one sample, and the ranks check that their states are equal.
func trainExactly(ctx context.Context) error {
	folder, bySteps := os.Getenv(folderVariable), os.Getenv(stepsVariable) != ""
	s := &exact{used: make([]byte, numSamples)}
	err := elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		for first := true; ; first = false {
			ended, err := s.step(ctx, job, folder, bySteps)
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
		fmt.Println("done", s.digest, slices.Min(s.used) == slices.Max(s.used))
		err = hvd.Shutdown(ctx)
	}
	return err
}

// step does a step, and reports whether the training ends.
func (s *exact) step(ctx context.Context, job *elastic.Job, folder string, bySteps bool) (ended bool,
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
	epochEnds := int64((s.next/numSamples + 1) * numSamples)
	for r := range hvd.Size() {
		if got := uint64(all[3*r+1]); got != s.digest {
			return false, fmt.Errorf("sample %d: got digest %x at rank %d, want %x", s.next, got, r, s.digest)
		}
		if all[3*r] < epochEnds {
			samples = append(samples, all[3*r])
		}
		end = max(end, all[3*r+2])
	}
	if end == 1 && s.next%numSamples == 0 && s.next > 0 {
		return true, nil
	}
	apply := func() {
		h := fnv.New64a()
		_ = binary.Write(h, binary.LittleEndian, append(samples, int64(s.digest))) // a hash takes everything
		s.digest = h.Sum64()
		for _, i := range samples {
			s.used[i%numSamples]++
		}
		s.next += uint64(len(samples))
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

// voteForSteps measures votes for steps that do nothing.
func voteForSteps(ctx context.Context) error {
	n, err := strconv.Atoi(os.Getenv(votesVariable))
	if err != nil {
		return err
	}
	err = elastic.Run(ctx, &exact{}, func(ctx context.Context, job *elastic.Job) error {
		var began time.Time
		for i := range n + 1000 {
			if i == 1000 {
				began = time.Now()
			}
			if err := job.Step(ctx, func() {}); err != nil {
				return err
			}
		}
		fmt.Println("votes took", time.Since(began).Nanoseconds())
		return nil
	})
	return errors.Join(err, hvd.Shutdown(ctx))
}

// BenchmarkElasticVote measures the vote for a step, which is the cost of a step that does nothing, with 2
// ranks.
func BenchmarkElasticVote(b *testing.B) {
	j := startHvdrun(b, nil, []string{"-np", "2", "--min-np", "1"}, "elastic-votes",
		votesVariable+"="+strconv.Itoa(b.N))
	j.until("the votes", func(l line) bool {
		text, found := strings.CutPrefix(l.text, "votes took ")
		if ns, err := strconv.Atoi(text); found && err == nil {
			b.ReportMetric(float64(ns)/float64(b.N), "ns/op")
		}
		return found
	})
}

// TestElasticExact kills ranks at random moments. With a vote for each step, and with a commit every few
// steps, the states of all ranks are equal after each step, and each sample of an epoch is used once.
func TestElasticExact(t *testing.T) {
	const ranks = 3
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
			flags := []string{"-np", strconv.Itoa(ranks), "--min-np", "2", "--blacklist-cooldown-range", "1,1"}
			j := startHvdrun(t, nil, flags, "elastic-exact", folderVariable+"="+folder, stepsVariable+"="+steps)
			for i := range kills {
				now := j.awaitBegun(ranks)
				time.Sleep(seed * time.Duration(i+1) * time.Millisecond) // a random point of a step
				if err := unix.Kill(now[(i+int(seed))%ranks].pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			j.awaitBegun(ranks)
			if err := os.WriteFile(filepath.Join(folder, "end"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if status := j.wait(); status != 0 {
				t.Errorf("hvdrun ended with status %d, want 0", status)
			}
			var results []string
			for text := range strings.Lines(j.out()) {
				if _, result, ok := strings.Cut(strings.TrimSpace(text), ">:done "); ok {
					results = append(results, result)
				}
			}
			if len(results) != ranks || len(slices.Compact(results)) != 1 ||
				!strings.HasSuffix(results[0], " true") {
				t.Errorf("got results %q, want %d equal ones with true", results, ranks)
			}
			tellJob(t, j)
		})
	}
}
