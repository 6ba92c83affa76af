package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// masks returns the set of cores that each thread of this process may use.
func masks(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	all := make(map[string]string)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		for line := range strings.Lines(string(text)) {
			if mask, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
				all[file] = strings.TrimSpace(mask)
			}
		}
	}
	return all
}

// firstCore returns the first core that this process may use.
func firstCore(t *testing.T) int {
	t.Helper()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	core := 0
	for !allowed.IsSet(core) {
		core++
	}
	return core
}

// TestCores checks that a measurement gives two times, and that all threads may use the same cores
// afterwards.
func TestCores(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("this process may use only one core")
	}
	var want string
	for _, want = range masks(t) { // all threads have the same
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	d, err := measureCores(t.Context(), deadline)
	if err != nil || len(d.cores) != 2 || d.cores[0] == d.cores[1] || d.roundTrip <= 0 || d.read <= 0 {
		t.Errorf("got %+v and error %v, want two cores and two times", d, err)
	}
	if got := runtime.GOMAXPROCS(0); got != 1 {
		t.Errorf("GOMAXPROCS is %d afterwards, want 1", got)
	}
	for thread, got := range masks(t) {
		if got != want {
			t.Errorf("%s may use the cores %s afterwards, want %s", thread, got, want)
		}
	}
}

func TestOneCore(t *testing.T) {
	var d distance
	only := firstCore(t)
	if err := onCore(only, func() (err error) {
		d, err = measureCores(t.Context(), deadline)
		return err
	}); err != nil || d.state() != "single" || len(d.cores) != 1 || d.cores[0] != only {
		t.Errorf("got %+v and error %v, want only core %d", d, err, only)
	}
}

// TestCoresTooBusy checks that neither thread waits for the other one for ever.
func TestCoresTooBusy(t *testing.T) {
	busy := errors.New("too busy")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(busy)
	for name, play := range map[string]func(*corePair) error{"lead": (*corePair).lead,
		"follow": (*corePair).follow} {
		if err := play(&corePair{ctx: ctx}); !errors.Is(err, busy) {
			t.Errorf("%s: error %v, want %v", name, err, busy)
		}
	}
	if runtime.NumCPU() < 2 {
		return
	}
	if _, err := measureCores(ctx, deadline); !errors.Is(err, busy) ||
		!strings.Contains(err.Error(), "distance of cores ") {
		t.Errorf("error %v, want one that names the cores and the cause %v", err, busy)
	}
}

// TestSameState checks distances on both sides of the border between near and far.
func TestSameState(t *testing.T) {
	for _, c := range []struct {
		a, b float64
		same bool
	}{
		{0.05, 0.19, true},
		{0.19, 0.21, true},
		{0.13, 0.2, true},
		{0.15, 0.25, false},
		{0.06, 0.33, false},
		{0.21, 0.6, true},
		{0, 0.1, false}, // only one core
	} {
		of := func(trip float64) distance {
			if trip == 0 {
				return distance{cores: []int{0}}
			}
			return distance{[]int{0, 1}, trip, 2}
		}
		if a, b := of(c.a), of(c.b); a.sameState(b) != c.same || b.sameState(a) != c.same {
			t.Errorf("%v and %v: got %v and %v, want %v", c.a, c.b, a.sameState(b), b.sameState(a), c.same)
		}
	}
}

func TestCoresFormats(t *testing.T) {
	const columns = "# hvdbench cores\nstate,core,other_core,round_trip_us,read_64KiB_us\n"
	for _, c := range []struct {
		d         distance
		nccl, csv string
	}{
		{distance{[]int{0, 3}, 0.1999, 2.2}, "cores 0 and 3: near: round trip of a cache line 0.200 us, " +
			"read of 64 KiB that the other core has just written 2.20 us\n", "near,0,3,0.1999,2.2000\n"},
		{distance{[]int{0, 1}, 0.2, 2.2}, "cores 0 and 1: far: round trip of a cache line 0.200 us, " +
			"read of 64 KiB that the other core has just written 2.20 us\n", "far,0,1,0.2000,2.2000\n"},
		{distance{cores: []int{5}}, "core 5: single: this process may use only one core\n", "single,5,,,\n"},
	} {
		for format, want := range map[string]string{"nccl": c.nccl, "csv": columns + c.csv} {
			var got bytes.Buffer
			if err := c.d.print(&got, format); err != nil || got.String() != want {
				t.Errorf("%s of %+v: error %v and\n%s\nwant\n%s", format, c.d, err, &got, want)
			}
		}
	}
	if err := (distance{cores: []int{5}}).print(full{}, "csv"); err == nil {
		t.Error("the error of the writer is lost")
	}
}
