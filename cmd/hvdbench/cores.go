package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

const coresLong = `hvdbench cores measures how far apart the first two cores are that this process may use: the round trip of a cache
line between them, and the time in which one of them reads 64 KiB that the other one has just written. Both are
medians of many short trials. On an idle machine, the measurement takes a few milliseconds.

The cores are near if the round trip takes less than 0.2 us, and far otherwise. Round trips usually take 0.04 to 0.18 us
between cores of one chip, and more if the chips or the sockets differ. On a virtual machine the state changes when the
host moves the virtual processors. Compare times of collectives only if they were measured in the same state. The state
counts as the same on both sides of 0.2 us if one round trip takes less than 1.6 times as long as the other.`

const coresExamples = `  hvdbench cores
  taskset -c 0,8 hvdbench cores          # other cores
  hvdbench cores --format csv`

// farRoundTrip is the least round trip in us between cores that are far apart. The state does not depend on
// the time of the read, because the clock rate of the processor bounds it if the cores are near.
const farRoundTrip = 0.2

// sameRatio is the least ratio of two round trips that shows that the state has changed. On a machine whose
// round trips take about farRoundTrip, they vary on both sides of it in the same state. RATIO in
// bench/cores.py is the same.
const sameRatio = 1.6

// The number of trials, the number of round trips in each trial, and the number of reads after them. They are
// small, so that only few trials are interrupted by other programs.
const coreTrials, coreTrips, coreReads = 50, 50, 5

// coresLimit is far more time than the measurement takes, also on a busy machine.
const coresLimit = 30 * time.Second

// distance is how far apart two cores are.
type distance struct {
	cores           []int   // the cores; only one if this process may use only one
	roundTrip, read float64 // in us; 0 if there is only one core
}

// state returns near, far, or single if there is only one core.
func (d distance) state() string {
	switch {
	case len(d.cores) < 2:
		return "single"
	case d.roundTrip < farRoundTrip:
		return "near"
	}
	return "far"
}

// sameState reports whether d and another distance were measured in the same state.
func (d distance) sameState(other distance) bool {
	return d.state() == other.state() ||
		max(d.roundTrip, other.roundTrip) < sameRatio*min(d.roundTrip, other.roundTrip)
}

// String describes d for users.
func (d distance) String() string {
	if len(d.cores) < 2 {
		return fmt.Sprintf("core %d: single: this process may use only one core", d.cores[0])
	}
	return fmt.Sprintf("cores %d and %d: %s: round trip of a cache line %.3f us, read of 64 KiB that the other core has just written %.2f us",
		d.cores[0], d.cores[1], d.state(), d.roundTrip, d.read)
}

// print prints d in one of the formats.
func (d distance) print(w io.Writer, format string) error {
	text := d.String() + "\n"
	second, times := "", ","
	if len(d.cores) > 1 {
		second, times = fmt.Sprint(d.cores[1]), fmt.Sprintf("%.4f,%.4f", d.roundTrip, d.read)
	}
	if format == "csv" {
		text = "# hvdbench cores\nstate,core,other_core,round_trip_us,read_64KiB_us\n" +
			fmt.Sprintf("%s,%d,%s,%s\n", d.state(), d.cores[0], second, times)
	}
	_, err := io.WriteString(w, text)
	return err
}

// newCoresCommand returns the command hvdbench cores.
func newCoresCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:     "cores",
		Short:   "Measure how far apart two cores are",
		Long:    coresLong,
		Example: coresExamples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("got %q, but cores has no arguments", args)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFormat(format); err != nil {
				return usageError{err}
			}
			d, err := measureCores(cmd.Context(), coresLimit)
			if err != nil {
				return err
			}
			return d.print(cmd.OutOrStdout(), format)
		},
	}
	addFormat(c, &format)
	return c
}

// measureCores measures the distance of the first two cores that this process may use.
func measureCores(ctx context.Context, limit time.Duration) (distance, error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return distance{}, fmt.Errorf("read the set of cores that this process may use: %w", err)
	}
	var d distance
	for core := 0; len(d.cores) < min(2, allowed.Count()); core++ {
		if allowed.IsSet(core) {
			d.cores = append(d.cores, core)
		}
	}
	if len(d.cores) < 2 {
		return d, nil
	}
	// Two goroutines must run at the same time.
	if before := runtime.GOMAXPROCS(0); before < 2 {
		runtime.GOMAXPROCS(2)
		defer runtime.GOMAXPROCS(before)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("other programs keep these cores busy"))
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	p := &corePair{ctx: ctx, data: make([]uint64, 64<<10/8)}
	var wg sync.WaitGroup
	var failed atomic.Bool
	for i, play := range []func() error{p.lead, p.follow} {
		wg.Go(func() {
			if err := onCore(d.cores[i], play); err != nil {
				failed.Store(true)
				fail(err) // so that the other goroutine does not wait for this one
			}
		})
	}
	wg.Wait()
	if failed.Load() {
		return distance{}, fmt.Errorf("measure the distance of cores %d and %d: %w", d.cores[0], d.cores[1], context.Cause(ctx))
	}
	slices.Sort(p.trips)
	slices.Sort(p.reads)
	d.roundTrip, d.read = quantile(p.trips, 0.5), quantile(p.reads, 0.5)
	return d, nil
}

// onCore calls a function in a thread that is bound to a core. The thread may use the same cores as before
// afterwards, or it ends.
func onCore(core int, f func() error) error {
	runtime.LockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	one.Set(core)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("bind a thread to core %d: %w", core, err)
	}
	err := f()
	if unix.SchedSetaffinity(0, &before) == nil {
		runtime.UnlockOSThread() // otherwise the thread ends together with the goroutine
	}
	return err
}

// corePair is what two threads on two cores share. They take turns: each waits for a number in turn, and then
// writes the next one.
type corePair struct {
	ctx  context.Context
	_    [128]byte // turn has a cache line of its own, and its neighbour, which a processor may fetch with it
	turn atomic.Uint32
	_    [128]byte
	data []uint64 // 64 KiB
	sum  uint64   // of the follower, so that the compiler keeps its reads

	trips, reads []float64 // the times of the leader in us
}

// wait spins until turn has the given number. It fails if the context ends first.
func (p *corePair) wait(turn uint32) error {
	for n := 1; p.turn.Load() != turn; n++ {
		if n%(1<<16) == 0 && p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
	}
	return nil
}

// lead gives the follower its turns and measures their times.
func (p *corePair) lead() error {
	p.trips, p.reads = make([]float64, 0, coreTrials), make([]float64, 0, coreTrials*coreReads)
	turn := uint32(0)
	pass := func(times int) (us float64, err error) {
		began := time.Now()
		for range times {
			p.turn.Store(turn + 1)
			turn += 2
			if err := p.wait(turn); err != nil {
				return 0, err
			}
		}
		return float64(time.Since(began).Nanoseconds()) / 1000, nil
	}
	for range coreTrials {
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		us, err := pass(coreTrips)
		if err != nil {
			return err
		}
		p.trips = append(p.trips, us/coreTrips)
		for range coreReads {
			for i := range p.data {
				p.data[i] = uint64(turn)
			}
			if us, err = pass(1); err != nil {
				return err
			}
			p.reads = append(p.reads, us)
		}
	}
	return nil
}

// follow answers the leader. In some of its turns, it reads the data first.
func (p *corePair) follow() error {
	turn := uint32(0)
	for range coreTrials {
		for n := range coreTrips + coreReads {
			if err := p.wait(turn + 1); err != nil {
				return err
			}
			if n >= coreTrips {
				sum := uint64(0)
				for _, v := range p.data {
					sum += v
				}
				p.sum = sum
			}
			turn += 2
			p.turn.Store(turn)
		}
	}
	return nil
}
