package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
)

// ending is a way in which a rank can end in the middle of training while the other ranks go on.
type ending struct {
	name   string
	status int    // the exit status of the rank's process
	reason string // a text that the report must contain
}

var (
	pythonEndings = []ending{
		{"raise", 1, "its program raised ValueError: step 5"},
		{"exit", 5, "shut down after"},
		{"early", 0, "shut down after"},
		{"in flight", 5, "shut down after"},
		{"daemons", 5, "shut down after"},
		{"os._exit", 7, "its control connection ended"},
	}
	goEndings = []ending{
		{"return", 3, "shut down after"},
		{"panic", 2, "the program panicked: step 5"},
		{"os.Exit", 6, "its control connection ended"},
	}
)

const pythonEnding = `
import os, sys, threading
import numpy as np
import gohvd.numpy as hvd

hvd.init()
for step in range(10):
    if step == 5 and hvd.rank() == int(os.environ["CULPRIT"]):
        how = os.environ["ENDING"]
        if how == "raise":
            raise ValueError("step 5")
        if how == "in flight":
            handles = [hvd.allreduce_async(np.ones(1 << 18), name=f"flying{k}") for k in range(8)]
        if how == "daemons":
            for k in range(4):
                wait = hvd.allreduce_async(np.ones(3), name=f"flying{k}").wait
                threading.Thread(target=wait, daemon=True).start()
        if how in ("exit", "in flight", "daemons"):
            sys.exit(5)
        if how == "early":
            break
        os._exit(7)
    hvd.allreduce(np.ones(3, np.float32), name="gradient")
`

// ends is the program of a Go rank, which may end early. It has the same structure as the program in the
// README.
func ends(ctx context.Context) error {
	if err := hvd.Init(ctx); err != nil {
		return err
	}
	defer hvd.Shutdown(ctx)
	for step := range 10 {
		if step == 5 && strconv.Itoa(hvd.Rank()) == os.Getenv("CULPRIT") {
			switch os.Getenv("ENDING") {
			case "return":
				return errCulprit
			case "panic":
				panic("step 5")
			default:
				os.Exit(6)
			}
		}
		if _, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name("gradient")); err != nil {
			return err
		}
	}
	return nil
}

var errCulprit = errors.New("step 5")

// A rank ends in one of several ways while others wait for it. hvdrun's report names this rank as the root
// cause. The exit status of hvdrun is the status of this rank, or 1 if that status is 0.
func TestEndings(t *testing.T) {
	random := draws(t)
	script := filepath.Join(t.TempDir(), "ending.py")
	testnet.WriteFile(t, script, pythonEnding)
	package_, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	self := testnet.Self(t)
	inPython := []string{"PYTHONPATH=" + package_, "HVD_LIBRARY=" + library(t)}
	try := func(t *testing.T, ranks int, e ending, command []string, env ...string) {
		culprit := random.IntN(ranks)
		j := startCommand(t, append([]string{hvdrunPath, "-np", strconv.Itoa(ranks)}, command...),
			append(env, "ENDING="+e.name, fmt.Sprint("CULPRIT=", culprit))...)
		status := j.wait()
		if want := max(e.status, 1); status != want {
			t.Errorf("%s of rank %d of %d: status %d, want %d", e.name, culprit, ranks, status, want)
		}
		report := j.err()
		_, root, _ := strings.Cut(report, "Root cause")
		root, _, _ = strings.Cut(root, "Other ranks")
		if !strings.Contains(root, fmt.Sprintf("\n  rank %d: exit status %d\n", culprit, e.status)) ||
			strings.Count(root, "\n  rank ") != 1 ||
			!strings.Contains(root, e.reason) {
			t.Errorf("%s of rank %d of %d: the root cause is not that one:\n%s", e.name, culprit, ranks,
				report)
		}
	}
	each := func(t *testing.T, all []ending, command []string, env ...string) {
		for _, e := range all {
			for _, ranks := range sample(random, []int{2, 3, 4}, 1) {
				try(t, ranks, e, command, env...)
			}
		}
	}
	t.Run("go", func(t *testing.T) { each(t, goEndings, []string{self}, programVariable+"=ends") })
	t.Run("python", func(t *testing.T) {
		testnet.NeedTorch(t)
		each(t, pythonEndings, []string{testnet.Python, script}, inPython...)
	})
}

// survives is the program of two Go ranks. Rank 1 leaves the first job while rank 0 waits for it. Both join
// and leave another job. Then rank 0 fails.
func survives(ctx context.Context) error {
	for job := range 2 {
		if err := hvd.Init(ctx); err != nil {
			return err
		}
		if job == 1 || hvd.Rank() == 0 {
			_, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name("gradient"))
			if (err == nil) != (job == 1) {
				return fmt.Errorf("job %d: got error %v", job, err)
			}
		}
		rank := hvd.Rank()
		if err := hvd.Shutdown(ctx); err != nil && job == 1 {
			return err
		}
		if job == 1 && rank == 0 {
			return errCulprit
		}
	}
	return nil
}

// initFailedVariable is the variable that names a file for the program lateRoot, and jobsVariable says how
// many jobs that program joins.
const initFailedVariable, jobsVariable = "E2E_INIT_FAILED", "E2E_JOBS"

// lateRoot is the program of two Go ranks. Rank 0 joins the last job only after an Init of rank 1 has ended
// at its time limit. Rank 1 calls Init again. When both have left that job, rank 1 fails.
func lateRoot(ctx context.Context) error {
	jobs, err := strconv.Atoi(os.Getenv(jobsVariable))
	if err != nil {
		return err
	}
	for job := range jobs {
		switch last := job == jobs-1; {
		case last && os.Getenv("HOROVOD_RANK") == "1":
			limit := hvd.WithSetting("HOROVOD_GLOO_TIMEOUT_SECONDS", "0.5")
			if err := hvd.Init(ctx, limit); err == nil {
				return errors.New("joined a job without rank 0")
			}
			if err := os.WriteFile(os.Getenv(initFailedVariable), nil, 0o600); err != nil {
				return err
			}
		case last:
			for {
				if _, err := os.Stat(os.Getenv(initFailedVariable)); err == nil {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
		if err := hvd.Init(ctx); err != nil {
			return err
		}
		rank := hvd.Rank()
		if err := hvd.Shutdown(ctx); err != nil {
			return err
		}
		if job == jobs-1 && rank == 1 {
			return errCulprit
		}
	}
	return nil
}

// The ranks survive a failure and join another job, or the same one at the next attempt. If a rank fails
// after that job, hvdrun does not blame the rank that has caused the first failure.
func TestSurvivedFailure(t *testing.T) {
	for _, test := range []struct {
		program string
		jobs    int
		culprit int
	}{{"survives", 2, 0}, {"late-root", 1, 1}, {"late-root", 2, 1}} {
		j := startCommand(t, []string{hvdrunPath, "-np", "2", testnet.Self(t)},
			programVariable+"="+test.program, fmt.Sprint(jobsVariable, "=", test.jobs),
			initFailedVariable+"="+filepath.Join(t.TempDir(), "failed"))
		if status := j.wait(); status != 3 {
			t.Errorf("%s: status %d, want 3", test.program, status)
		}
		_, report, _ := strings.Cut(j.err(), "hvdrun: the job failed")
		want := fmt.Sprintf("Root cause (first observed failure):\n  rank %d: exit status 3\n", test.culprit)
		if !strings.Contains(report, want) || strings.Contains(report, "what the ranks did") {
			t.Errorf("%s, %d jobs: got the report%s", test.program, test.jobs, report)
		}
	}
}
