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
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/simulate"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport/tcp"
	opstcp "github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensorqueue"
)

var validate = flag.Bool("validate", false,
	"compare the processor time and memory of real processes with the simulation (make scale)")

// partVariable is set in the processes that TestValidation starts.
const partVariable = "GOHVD_VALIDATION_PART"

const (
	perHost    = 8 // ranks
	numTensors = 8 // that a rank submits in a step
)

// partConfig describes a job to the process of one of its ranks.
type partConfig struct {
	Rank, Size, Steps int
	Capacity          int
	Above             int      // engine.Config.LeadersAbove
	Addrs             []string // of all ranks
}

// partResult is what one process has measured: its processor time, the time and how often a thread has parked
// for all steps, and the memory of its engine, which is that of the heap and of the stacks after all steps.
type partResult struct {
	CPU, Time time.Duration
	Parks     int64
	Bytes     uint64
}

// TestValidationPart is the program of the processes that TestValidation starts. It prints the address of its
// rank, reads a partConfig, and prints a partResult.
func TestValidationPart(t *testing.T) {
	if os.Getenv(partVariable) == "" {
		t.Skip("TestValidation starts it")
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	before := used()
	endpoint, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0", DialTimeout: 4 * time.Minute,
		HandshakeTimeout: time.Minute})
	check(err)
	var p partConfig
	check(errors.Join(out.Encode(endpoint.Addr()), in.Decode(&p)))
	var hosts []string
	for r := range p.Size {
		hosts = append(hosts, fmt.Sprint("host", r/perHost))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	rank := topo.Rank(p.Rank)
	mesh, err := endpoint.Connect(tcp.Epoch{Job: "test", Epoch: 1, Rank: rank, Addrs: p.Addrs})
	check(err)
	cfg := engine.Config{Rank: rank, Size: p.Size, Mesh: mesh, Hosts: hosts, Spin: -1, LeadersAbove: p.Above,
		CacheCapacity: p.Capacity, FusionThresholdBytes: 1 << 20, LivenessTimeout: 5 * time.Minute}
	cfg.Backends = append(cfg.Backends, opstcp.Register(mesh, opstcp.Config{}))
	e, err := engine.Start(ctx, cfg)
	check(err)
	// A step sums tensors without elements, so that the ranks only negotiate.
	run := func(steps int) {
		done := make(chan error, numTensors)
		for range steps {
			entries := make([]*tensorqueue.Entry, numTensors)
			for k := range entries {
				entries[k] = sum(fmt.Sprint("g", k), nil)
				entries[k].Done = func(err error) { done <- err }
			}
			check(e.Submit(entries...))
			for range entries {
				select {
				case err := <-done:
					check(err)
				case <-ctx.Done():
					t.Fatal(ctx.Err())
				}
			}
		}
	}
	run(3)
	parked, cpu, began := parks(t), testnet.ProcessorTime(t), time.Now()
	run(p.Steps)
	r := partResult{CPU: testnet.ProcessorTime(t) - cpu, Time: time.Since(began), Parks: parks(t) - parked}
	if after := used(); after > before {
		r.Bytes = after - before
	}
	check(e.Shutdown(ctx, engine.Departure{}))
	check(out.Encode(r))
}

// parks returns how often threads of this process have waited for something.
func parks(t *testing.T) int64 {
	t.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return used.Nvcsw
}

// used returns the memory of the heap and of the stacks after a garbage collection.
func used() uint64 {
	var m runtime.MemStats
	debug.FreeOSMemory()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// part is the process of a rank.
type part struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

// measureJobs runs equal jobs at the same time, whose ranks are processes. It returns the results of the
// ranks of the first job, then of the second job and so on.
func measureJobs(t *testing.T, job partConfig, jobs int) []partResult {
	t.Helper()
	parts := make([]part, jobs*job.Size)
	for i := range parts {
		p := &parts[i]
		p.cmd = exec.CommandContext(t.Context(), os.Args[0], "-test.run=TestValidationPart$")
		p.cmd.Env = append(os.Environ(), partVariable+"=1")
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
	addrs := make([]string, len(parts))
	for i := range parts {
		if err := parts[i].out.Decode(&addrs[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range parts {
		job.Rank = i % job.Size
		job.Addrs = addrs[i-job.Rank:][:job.Size]
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

// measured is what a step of a job costs: the processor time of rank 0 and the mean of the others, how often
// a thread of another rank has parked, the time of the step, and the memory of rank 0 and the mean of the
// others.
type measured struct {
	root, other, step     time.Duration
	parks                 float64
	rootBytes, otherBytes uint64
}

// stepOf runs jobs of real processes at the same time and returns the mean of their steps.
func stepOf(t *testing.T, job partConfig, jobs int) (m measured) {
	t.Helper()
	parks := int64(0)
	for i, r := range measureJobs(t, job, jobs) {
		if i%job.Size == 0 {
			m.root += r.CPU
			m.step += r.Time
			m.rootBytes += r.Bytes
			continue
		}
		m.other += r.CPU
		m.otherBytes += r.Bytes
		parks += r.Parks
	}
	roots, others := jobs, jobs*(job.Size-1)
	m.root /= time.Duration(job.Steps * roots)
	m.step /= time.Duration(job.Steps * roots)
	m.rootBytes /= uint64(roots)
	m.other /= time.Duration(job.Steps * others)
	m.otherBytes /= uint64(others)
	m.parks = float64(parks) / float64(job.Steps*others)
	return m
}

// simulated returns the mean of simulated steps, in which waking a rank costs wake.
func simulated(t *testing.T, job partConfig, policy simulate.Policy, wake time.Duration) (m measured) {
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
	}
	return m
}

// wakeAmong measures what waking a rank costs if there are so many processes: they are jobs of 8 ranks, and
// the cost is that with which ranks other than rank 0 of such a job have their simulated processor time.
func wakeAmong(t *testing.T, processes int) (wake time.Duration) {
	t.Helper()
	small := partConfig{Size: perHost, Capacity: 64, Steps: max(20, 800/processes), Above: perHost}
	got := stepOf(t, small, processes/perHost).other
	for most := 10 * time.Millisecond; most-wake > 100*time.Nanosecond; {
		if middle := (wake + most) / 2; simulated(t, small, simulate.Star, middle).other < got {
			wake = middle
		} else {
			most = middle
		}
	}
	return wake
}

// TestValidation compares the processor time and the memory of jobs of real processes, which have no core to
// themselves, with the simulation. For each number of processes it first measures the cost of waking a rank
// in small jobs, because the cost depends on the machine, on what else it does and on the number of
// processes.
func TestValidation(t *testing.T) {
	if !*validate {
		t.Skip("make scale compares real processes with the simulation")
	}
	wakes := make(map[int]time.Duration)
	fmt.Println("| ranks | policy | cache | waking | CPU of rank 0, real | simulated | ratio | CPU of others, real | simulated | ratio | parks | time of a step, real | simulated | ratio | KiB at rank 0 | KiB at others |")
	fmt.Println("|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	for _, c := range []struct {
		ranks    int
		policy   simulate.Policy
		capacity int
	}{
		{16, simulate.Star, 64}, {16, simulate.Leaders, 64}, {64, simulate.Star, 64},
		{64, simulate.Leaders, 64}, {64, simulate.Leaders, 0}, {128, simulate.Leaders, 64},
		{256, simulate.Leaders, 64},
	} {
		if _, known := wakes[c.ranks]; !known {
			wakes[c.ranks] = wakeAmong(t, c.ranks)
		}
		job := partConfig{Size: c.ranks, Capacity: c.capacity, Steps: max(20, 800/c.ranks), Above: 1}
		if c.policy == simulate.Star {
			job.Above = c.ranks
		}
		got, want := stepOf(t, job, 1), simulated(t, job, c.policy, wakes[c.ranks])
		ratio := func(got, want time.Duration) float64 { return float64(got) / float64(want) }
		fmt.Printf("| %d | %s | %s | %.0f us | %.0f us | %.0f us | %.2f | %.0f us | %.0f us | %.2f | %.1f | %.1f ms | %.1f ms | %.2f | %d | %d |\n",
			c.ranks, c.policy, map[bool]string{true: "yes", false: "no"}[c.capacity > 0], us(wakes[c.ranks]),
			us(got.root), us(want.root), ratio(got.root, want.root),
			us(got.other), us(want.other), ratio(got.other, want.other), got.parks,
			us(got.step)/1e3, us(want.step)/1e3, ratio(got.step, want.step), got.rootBytes>>10,
			got.otherBytes>>10)
	}
}
