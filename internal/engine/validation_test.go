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

// partResult is what one process has measured: its processor time and the time for all steps, and the memory
// of its engine, which is that of the heap and of the stacks after all steps.
type partResult struct {
	CPU, Time time.Duration
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
	cpu, began := testnet.ProcessorTime(t), time.Now()
	run(p.Steps)
	r := partResult{CPU: testnet.ProcessorTime(t) - cpu, Time: time.Since(began)}
	if after := used(); after > before {
		r.Bytes = after - before
	}
	check(e.Shutdown(ctx, engine.Departure{}))
	check(out.Encode(r))
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

// measureJob runs a job whose ranks are processes. It returns their results.
func measureJob(t *testing.T, job partConfig) []partResult {
	t.Helper()
	parts := make([]part, job.Size)
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
	for i := range parts {
		var addr string
		if err := parts[i].out.Decode(&addr); err != nil {
			t.Fatal(err)
		}
		job.Addrs = append(job.Addrs, addr)
	}
	for i := range parts {
		job.Rank = i
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
	results := measureJob(t, job)
	for _, r := range results[1:] {
		m.other += r.CPU
		m.otherBytes += r.Bytes
	}
	steps, others := time.Duration(job.Steps), time.Duration(job.Size-1)
	root := results[0]
	return measured{root.CPU / steps, m.other / steps / others, root.Time / steps, root.Bytes,
		m.otherBytes / uint64(others)}
}

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
// depends on what else the machine does.
func TestValidation(t *testing.T) {
	if !*validate {
		t.Skip("make scale compares real processes with the simulation")
	}
	small := partConfig{Size: perHost, Capacity: 64, Steps: 100, Above: perHost}
	got := stepOf(t, small)
	want, _, turns := simulated(t, small, simulate.Star, 0)
	wake := max(0, time.Duration(float64(got.root-want.root+(perHost-1)*(got.other-want.other))/turns))
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
		{256, simulate.Leaders, 64},
	} {
		job := partConfig{Size: c.ranks, Capacity: c.capacity, Steps: max(10, 800/c.ranks), Above: 1}
		if c.policy == simulate.Star {
			job.Above = c.ranks
		}
		got := stepOf(t, job)
		want, rootTurns, _ := simulated(t, job, c.policy, wake)
		fmt.Printf("| %d | %s | %s | %.0f us | %.0f us (%.0f turns) | %.2f | %.0f us | %.0f us | %.2f | %.1f ms | %.1f ms | %d | %d |\n",
			c.ranks, c.policy, map[bool]string{true: "yes", false: "no"}[c.capacity > 0],
			us(got.root), us(want.root), rootTurns, float64(got.root)/float64(want.root),
			us(got.other), us(want.other), float64(got.other)/float64(want.other),
			us(got.step)/1e3, us(want.step)/1e3, got.rootBytes>>10, got.otherBytes>>10)
	}
}
