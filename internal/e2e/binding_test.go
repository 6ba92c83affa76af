package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestBindTo runs a job of two ranks with HVD_BIND_TO=core, under hvdrun, which binds the processes, and
// under Open MPI and MPICH, where Init binds the threads. In another job, Open MPI itself binds each process
// to a core. While the job runs, all threads of a rank may use the cores of the rank and no others, although
// ranks that wait for each other move their threads. If Init has bound them, they may use all cores again
// after Shutdown, and the next Init binds them again. TestUnderSlurm does the same with srun.
func TestBindTo(t *testing.T) {
	all, half, one := placesOfTwo(t)
	if all == nil {
		t.Skip("two ranks need two cores")
	}
	self := testnet.Self(t)
	for _, c := range []struct {
		program string
		args    []string
		in      []string // the CPUs of each rank in the job
		after   []string // and after Shutdown
	}{
		{hvdrunPath, []string{"-np", "2", "--tag-output=false", "--bind-to", "core"}, half, half},
		{"mpirun.openmpi", []string{"--allow-run-as-root", "--bind-to", "none", "-np", "2"}, half, all},
		{"mpirun.openmpi", []string{"--allow-run-as-root", "--bind-to", "core", "-np", "2", "env", "HVD_BIND_TO=none"},
			one, one},
		{"mpiexec.mpich", []string{"-n", "2"}, half, all},
	} {
		t.Run(strings.Join(append([]string{filepath.Base(c.program)}, c.args...), " "), func(t *testing.T) {
			if _, err := exec.LookPath(c.program); err != nil {
				t.Skip(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, c.program, append(c.args, self)...)
			cmd.Env = append(os.Environ(), programVariable+"=bound", "HVD_BIND_TO=core")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, line := range boundLines(c.in, c.after) {
				if !strings.Contains(string(out), line) {
					t.Errorf("no rank says %q:\n%s", line, out)
				}
			}
		})
	}
}

// placesOfTwo returns the CPUs that each of two ranks on this host may use if they are not bound, if they are
// bound to cores, which they then share equally, and if each is bound to one core. It returns nil if this
// process may use only one core.
func placesOfTwo(t *testing.T) (all, half, one []string) {
	allowed, err := binding.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	top, err := binding.Read(os.DirFS("/"), allowed)
	if err != nil {
		t.Fatal(err)
	}
	place := func(rank, size int) string {
		cpus, err := top.Place(binding.Core, rank, size)
		if err != nil {
			return ""
		}
		return cpus.String()
	}
	cores := 1
	for place(0, cores+1) != "" {
		cores++
	}
	if cores < 2 {
		return nil, nil, nil
	}
	for r := range 2 {
		all = append(all, allowed.String())
		half, one = append(half, place(r, 2)), append(one, place(r, cores))
	}
	return all, half, one
}

// boundLines returns the lines that the program bound prints at ranks with these CPUs.
func boundLines(in, after []string) (lines []string) {
	for r := range in {
		lines = append(lines,
			fmt.Sprintf("rank %d round 0 in the job: %s\n", r, in[r]),
			fmt.Sprintf("rank %d round 0 after Shutdown: %s\n", r, after[r]),
			fmt.Sprintf("rank %d round 1 in the job: %s\n", r, in[r]))
	}
	return lines
}

// TestBindToRefused runs jobs whose ranks cannot be bound. The error must say why.
func TestBindToRefused(t *testing.T) {
	all, err := binding.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	self := testnet.Self(t)
	last := all[len(all)-1:].String()
	for _, c := range []struct {
		unit    string
		command []string
		want    string
	}{
		{"core", []string{"taskset", "-c", last, hvdrunPath, "-np", "2", self},
			"--bind-to core: got 2 ranks on this host, but they may use only 1 core (CPUs " + last + "): start fewer ranks"},
		{"core", []string{"mpiexec.mpich", "-n", "2", "taskset", "-c", last, self},
			"HVD_BIND_TO=core: got 2 ranks on this host, but they may use only 1 core (CPUs " + last + ")"},
		{"numa", []string{hvdrunPath, "-np", "1", self}, "--bind-to numa: this host has only one NUMA node"},
	} {
		if _, err := exec.LookPath(c.command[0]); err != nil {
			t.Log(err)
			continue
		}
		if nodes, _ := os.ReadFile("/sys/devices/system/node/online"); c.unit == "numa" && strings.ContainsAny(
			string(nodes), "-,") {
			continue // this host has several nodes
		}
		ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
		defer cancel()
		cmd := exec.CommandContext(ctx, c.command[0], c.command[1:]...)
		cmd.Env = append(os.Environ(), programVariable+"=bound", "HVD_BIND_TO="+c.unit)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s of %q: got %q and error %v, want %q", c.unit, c.command, out, err, c.want)
		}
	}
}

// bound joins and leaves the job twice. It prints which CPUs the threads of this process may use in the job,
// after operations for which the ranks have waited for each other, and after Shutdown.
func bound(ctx context.Context) error {
	for round := range 2 {
		if err := hvd.Init(ctx); err != nil {
			return err
		}
		rank := hvd.Rank()
		for range 200 {
			if _, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name("x")); err != nil {
				return err
			}
		}
		say := func(when string) error {
			cpus, err := threadsMayUse()
			// While a thread moves to another core, it may use fewer CPUs.
			for end := time.Now().Add(time.Minute); err == nil && len(cpus) > 1 && time.Now().Before(end); {
				cpus, err = threadsMayUse()
			}
			// One Write, because the ranks share a pipe.
			fmt.Printf("rank %d round %d %s: %s\n", rank, round, when, strings.Join(cpus, " and "))
			return err
		}
		if err := say("in the job"); err != nil {
			return err
		}
		if err := hvd.Shutdown(ctx); err != nil {
			return err
		}
		if err := say("after Shutdown"); err != nil {
			return err
		}
	}
	return nil
}

var allowedList = regexp.MustCompile(`(?m)^Cpus_allowed_list:\s*(\S+)$`)

// threadsMayUse returns the different sets of CPUs that threads of this process may use.
func threadsMayUse() (sets []string, err error) {
	files, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := os.ReadFile("/proc/self/task/" + f.Name() + "/status")
		if err != nil {
			continue // the thread has ended
		}
		if found := allowedList.FindSubmatch(text); found != nil {
			sets = append(sets, string(found[1]))
		}
	}
	slices.Sort(sets)
	return slices.Compact(sets), nil
}
