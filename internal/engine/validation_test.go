package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/simulate"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/tcp"
	opstcp "github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensorqueue"
)

var validate = flag.Bool("validate", false,
	"compare the processor time and memory of real processes with the simulation (make scale)")

var validatedRanks = flag.Int("validated-ranks", 256, "leave out larger jobs in TestValidation")

// partVariable is set in the processes that TestValidation starts.
const partVariable = "GOHVD_VALIDATION_PART"

const (
	perHost    = 8 // ranks
	numTensors = 8 // that a rank submits in a step
)

// partConfig describes a job to one of its processes, which has the ranks from First to End-1.
type partConfig struct {
	First, End, Size, Steps int
	Capacity                int
	Above, Levels           int      // engine.Config.LeadersAbove and LevelsAbove
	Addrs                   []string // of all ranks
}

// partResult is what one process has measured: its processor time and the time for all steps, and the memory
// of its engines, which is that of the heap and of the stacks after all steps.
type partResult struct {
	CPU, Time time.Duration
	Bytes     uint64
}

// TestValidationPart is the program of the processes that TestValidation starts. It prints the addresses of
// its ranks, reads a partConfig, and prints a partResult.
func TestValidationPart(t *testing.T) {
	if os.Getenv(partVariable) == "" {
		t.Skip("TestValidation starts it")
	}
	var ranks int
	if _, err := fmt.Sscan(os.Getenv(partVariable), &ranks); err != nil {
		t.Fatal(err)
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	before := used()
	var addrs []string
	var endpoints []*tcp.Endpoint
	for range ranks {
		e, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0", DialTimeout: 4 * time.Minute,
			HandshakeTimeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		endpoints, addrs = append(endpoints, e), append(addrs, e.Addr())
	}
	var p partConfig
	if err := errors.Join(out.Encode(addrs), in.Decode(&p)); err != nil {
		t.Fatal(err)
	}
	var hosts []string
	for r := range p.Size {
		hosts = append(hosts, fmt.Sprint("host", r/perHost))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	engines := make([]*engine.Engine, ranks)
	each := func(f func(i int) error) {
		var wg sync.WaitGroup
		for i := range engines {
			wg.Go(func() {
				if err := f(i); err != nil {
					fmt.Fprintf(os.Stderr, "rank %d: %v\n", p.First+i, err)
					t.Fail()
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	each(func(i int) error {
		rank := topo.Rank(p.First + i)
		mesh, err := endpoints[i].Connect(tcp.Epoch{Job: "test", Epoch: 1, Rank: rank, Addrs: p.Addrs})
		if err != nil {
			return err
		}
		cfg := engine.Config{Rank: rank, Size: p.Size, Mesh: mesh, Hosts: hosts, Spin: -1,
			LeadersAbove: p.Above, LevelsAbove: p.Levels,
			CacheCapacity: p.Capacity, FusionThresholdBytes: 1 << 20, LivenessTimeout: 5 * time.Minute}
		cfg.Backends = append(cfg.Backends, opstcp.Register(mesh, opstcp.Config{}))
		engines[i], err = engine.Start(ctx, cfg)
		return err
	})
	// A step sums tensors without elements, so that the ranks only negotiate.
	run := func(steps int) {
		each(func(i int) error {
			done := make(chan error, numTensors)
			for range steps {
				entries := make([]*tensorqueue.Entry, numTensors)
				for k := range entries {
					entries[k] = sum(fmt.Sprint("g", k), nil)
					entries[k].Done = func(err error) { done <- err }
				}
				if err := engines[i].Submit(entries...); err != nil {
					return err
				}
				for range entries {
					select {
					case err := <-done:
						if err != nil {
							return err
						}
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			}
			return nil
		})
	}
	run(3)
	cpu, began := processorTime(t), time.Now()
	run(p.Steps)
	r := partResult{CPU: processorTime(t) - cpu, Time: time.Since(began)}
	if after := used(); after > before {
		r.Bytes = after - before
	}
	each(func(i int) error { return engines[i].Shutdown(ctx, engine.Departure{}) })
	if err := out.Encode(r); err != nil {
		t.Fatal(err)
	}
}

// used returns the memory of the heap and of the stacks after a garbage collection.
func used() uint64 {
	var m runtime.MemStats
	debug.FreeOSMemory()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

func processorTime(t *testing.T) time.Duration {
	var use unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &use); err != nil {
		t.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// part is a process with some ranks of a job.
type part struct {
	ranks int
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *json.Decoder
}

// measureJob runs a job whose ranks are in processes of the given numbers of ranks. It returns the results of
// the processes.
func measureJob(t *testing.T, job partConfig, sizes []int) []partResult {
	t.Helper()
	parts := make([]part, len(sizes))
	for i := range parts {
		p := &parts[i]
		p.ranks = sizes[i]
		p.cmd = exec.CommandContext(t.Context(), os.Args[0], "-test.run=TestValidationPart$")
		p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", partVariable, p.ranks))
		p.cmd.Stderr = os.Stderr
		out, err := p.cmd.StdoutPipe()
		if err == nil {
			p.in, err = p.cmd.StdinPipe()
		}
		if err == nil {
			err = p.cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		p.out = json.NewDecoder(out)
	}
	for i := range parts {
		var addrs []string
		if err := parts[i].out.Decode(&addrs); err != nil {
			t.Fatal(err)
		}
		job.Addrs = append(job.Addrs, addrs...)
	}
	for i := range parts {
		job.First, job.End = job.End, job.End+parts[i].ranks
		if err := json.NewEncoder(parts[i].in).Encode(job); err != nil {
			t.Fatal(err)
		}
	}
	results := make([]partResult, len(parts))
	for i := range parts {
		if err := parts[i].out.Decode(&results[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range parts {
		if err := parts[i].cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	return results
}

// measured is what a step of a job costs: the processor time of rank 0 and the mean of the others, the time
// of the step, and the memory of rank 0 and the mean of the others.
type measured struct {
	root, other, step     time.Duration
	rootBytes, otherBytes uint64
}

// stepOf runs a job of real processes and returns the mean of its steps.
func stepOf(t *testing.T, job partConfig) (m measured) {
	t.Helper()
	sizes := []int{1, job.Size - 1}
	if job.Size <= mostProcesses {
		sizes = make([]int, job.Size)
		for i := range sizes {
			sizes[i] = 1
		}
	}
	results := measureJob(t, job, sizes)
	for _, r := range results[1:] {
		m.other += r.CPU
		m.otherBytes += r.Bytes
	}
	steps, others := time.Duration(job.Steps), time.Duration(job.Size-1)
	root := results[0]
	return measured{root.CPU / steps, m.other / steps / others, root.Time / steps, root.Bytes,
		m.otherBytes / uint64(others)}
}

// mostProcesses is the largest number of ranks of which each has a process.
const mostProcesses = 256

// simulated returns the mean of simulated steps, in which waking a rank costs wake. turns are those of all
// ranks, and rootTurns those of rank 0.
func simulated(t *testing.T, job partConfig, policy simulate.Policy, wake time.Duration) (m measured,
	rootTurns, turns float64) {
	t.Helper()
	costs := simulate.Measured
	costs.Wake = wake
	// All ranks are on one machine, and nothing but the negotiation takes time.
	costs.Latency, costs.Loopback, costs.Operation, costs.BytesPerSecond = 0, 0, 0, 1e15
	const first, steps = 3, 10
	r, err := simulate.Run(simulate.Config{Ranks: job.Size, PerHost: perHost, Policy: policy,
		Workload: simulate.Small(numTensors), Steps: first + steps, CacheCapacity: job.Capacity,
		Cores: runtime.NumCPU(), Costs: costs})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range r.Steps[first:] {
		leaders, members := int64(s.Leaders), int64(job.Size-1-s.Leaders)
		m.root += s.Root.CPU / steps
		m.step += s.Latency / steps
		m.other += (s.Leader.CPU*time.Duration(leaders) + s.Member.CPU*time.Duration(members)) / steps /
			time.Duration(job.Size-1)
		rootTurns += float64(s.Root.Turns) / steps
		turns += float64(s.Root.Turns+s.Leader.Turns*leaders+s.Member.Turns*members) / steps
	}
	return m, rootTurns, turns
}

// TestValidation compares the processor time and the memory of jobs of real processes, which have no core to
// themselves, with the simulation. It measures the cost of waking a rank in a small job first, because it
// depends on what else the machine does. The job of more than mostProcesses ranks has two processes: one for
// rank 0, and one for all others.
func TestValidation(t *testing.T) {
	if !*validate {
		t.Skip("make scale compares real processes with the simulation")
	}
	small := partConfig{Size: perHost, Capacity: 64, Steps: 100, Above: perHost}
	real := stepOf(t, small)
	want, _, turns := simulated(t, small, simulate.Star, 0)
	wake := time.Duration(float64(real.root-want.root+(perHost-1)*(real.other-want.other)) / turns)
	fmt.Printf("waking a rank costs %v\n", wake.Round(time.Microsecond))
	fmt.Println("| ranks | policy | cache | CPU of rank 0, real | simulated | ratio | CPU of others, real | simulated | ratio | time of a step, real | simulated | KiB at rank 0 | KiB at others |")
	fmt.Println("|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	for _, c := range []struct {
		ranks    int
		policy   simulate.Policy
		capacity int
	}{
		{16, simulate.Star, 64}, {16, simulate.Leaders, 64}, {64, simulate.Star, 64},
		{64, simulate.Leaders, 64}, {64, simulate.Leaders, 0}, {128, simulate.Leaders, 64},
		{256, simulate.Leaders, 64}, {1024, simulate.Levels, 64},
	} {
		if c.ranks > *validatedRanks {
			continue
		}
		job := partConfig{Size: c.ranks, Capacity: c.capacity, Steps: max(10, 800/c.ranks), Above: 1}
		if c.policy == simulate.Star {
			job.Above = c.ranks
		}
		real := stepOf(t, job)
		want, rootTurns, _ := simulated(t, job, c.policy, wake)
		fmt.Printf("| %d | %s | %s | %.0f us | %.0f us (%.0f turns) | %.2f | %.0f us | %.0f us | %.2f | %.1f ms | %.1f ms | %d | %d |\n",
			c.ranks, c.policy, map[bool]string{true: "yes", false: "no"}[c.capacity > 0],
			us(real.root), us(want.root), rootTurns, float64(real.root)/float64(want.root),
			us(real.other), us(want.other), float64(real.other)/float64(want.other),
			us(real.step)/1e3, us(want.step)/1e3, real.rootBytes>>10, real.otherBytes>>10)
	}
}
