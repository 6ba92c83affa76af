package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
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

// These variables configure the program "elastic-steps".
const (
	// stateVariable has the size of its state in bytes.
	stateVariable = "GOHVD_E2E_STATE"
	// folderVariable names a folder. A process that can remove the file die.POINT there dies at this point of
	// its program. When the file end is there, the training ends.
	folderVariable = "GOHVD_E2E_FOLDER"
)

// points are the points at which the program "elastic-steps" can die.
var points = []string{"start", "negotiation", "fused", "save", "saved", "restore", "train"}

// commitEvery is the number of steps of the program "elastic-steps" from one commit to the next.
const commitEvery = 5

// weights is the state of the program "elastic-steps".
type weights struct {
	step int64
	data []byte
}

func (s *weights) Save() ([]byte, error) {
	dieAt("save")
	head := binary.LittleEndian.AppendUint64(make([]byte, 0, 8+len(s.data)), uint64(s.step))
	saved := append(head, s.data...)
	dieAt("saved")
	return saved, nil
}

func (s *weights) Restore(data []byte) error {
	dieAt("restore")
	s.step = int64(binary.LittleEndian.Uint64(data))
	copy(s.data, data[8:])
	return nil
}

// changing returns the part of the state that each step changes. Not all of a large state changes, so that
// the steps stay short.
func (s *weights) changing() []byte { return s.data[:min(len(s.data), 100_000)] }

// dieAt ends this process if it may die at the point.
func dieAt(point string) {
	folder := os.Getenv(folderVariable)
	if folder == "" || os.Remove(filepath.Join(folder, "die."+point)) != nil {
		return
	}
	fmt.Println("dies at", point)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {} // SIGKILL may take a moment
}

// trainSteadily trains until there is a file named end. Each step changes the state, and checks that
// the sums have the value of each rank once. After the first step of each generation it prints the number of
// ranks, its process ID, the time, its open descriptors, its goroutines and its heap.
func trainSteadily(ctx context.Context) error {
	size, err := strconv.Atoi(os.Getenv(stateVariable))
	if err != nil {
		return err
	}
	fmt.Println("pid", os.Getpid())
	dieAt("start")
	s := &weights{data: make([]byte, size)}
	var steps []time.Duration // all but the first of each generation, with their commits
	err = elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		dieAt("train")
		places, err := hvd.Allgather(ctx, []int64{int64(hvd.LocalRank())})
		if err != nil {
			return err
		}
		want := int64(0)
		for _, at := range places {
			want += 1 << (8 * at)
		}
		for first := true; ; first = false {
			began := time.Now()
			ended, err := s.train(ctx, want)
			if err != nil || ended {
				return err
			}
			if first {
				reportGeneration()
			}
			if s.step%commitEvery == 0 {
				err = job.Commit(ctx)
			}
			if err != nil {
				return err
			}
			if !first {
				steps = append(steps, time.Since(began))
			}
		}
	})
	if errors.Is(err, elastic.ErrRemoved) {
		return nil
	}
	if err == nil {
		if slices.Sort(steps); len(steps) > 0 {
			fmt.Println("p99", steps[len(steps)*99/100].Nanoseconds())
		}
		fmt.Println("done", s.step, len(bytes.Trim(s.changing(), string(s.data[:1]))))
		err = hvd.Shutdown(ctx)
	}
	return err
}

// train does a step: one large tensor and several small ones, which are fused. It reports whether the
// training ends. want is the sum of the ranks' values.
func (s *weights) train(ctx context.Context, want int64) (ended bool, err error) {
	dieAt("negotiation")
	mine := int64(1) << (8 * hvd.LocalRank())
	var handles []*hvd.Handle[[]int64]
	for i := range 8 {
		elements := 16
		if i == 0 {
			elements = 32 << 10
		}
		h, err := hvd.AllreduceAsync(slices.Repeat([]int64{mine}, elements), hvd.Op(hvd.Sum),
			hvd.Name("gradient."+strconv.Itoa(i)))
		if err != nil {
			return false, err
		}
		handles = append(handles, h)
	}
	dieAt("fused")
	for i, h := range handles {
		sum, err := h.Wait(ctx)
		if err != nil {
			return false, err
		}
		if at := slices.IndexFunc(sum, func(got int64) bool { return got != want }); at >= 0 {
			return false, fmt.Errorf("wrong sum: step %d: gradient %d: got %x, want %x", s.step, i, sum[at], want)
		}
	}
	s.step++
	for i := range s.changing() {
		s.data[i] = byte(s.step)
	}
	end := []int64{0}
	if _, err := os.Stat(filepath.Join(os.Getenv(folderVariable), "end")); err == nil {
		end[0] = 1
	}
	end, err = hvd.Allreduce(ctx, end, hvd.Op(hvd.Max))
	return err == nil && end[0] == 1, err
}

func reportGeneration() {
	open, _ := os.ReadDir("/proc/self/fd")
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fmt.Println("first", hvd.Size(), hvd.Rank(), os.Getpid(), time.Now().UnixNano(), len(open),
		runtime.NumGoroutine(), m.HeapAlloc)
}

// begun is what a rank prints after the first step of a generation.
type begun struct {
	slot, size, rank, pid, fds, goroutines, heap int
	at                                           time.Time
}

func parseBegun(l line) (f begun, ok bool) {
	text, ok := strings.CutPrefix(l.text, "first ")
	if !ok {
		return f, false
	}
	f.slot = l.rank
	var at int64
	n, _ := fmt.Sscan(text, &f.size, &f.rank, &f.pid, &at, &f.fds, &f.goroutines, &f.heap)
	f.at = time.Unix(0, at)
	return f, n == 7
}

// awaitBegun waits until n ranks of one generation with n ranks have trained, and returns what they have
// printed, by their slots.
func (j *job) awaitBegun(n int) map[int]begun {
	j.t.Helper()
	seen := make(map[int]begun)
	j.until(fmt.Sprintf("%d ranks trained", n), func(l line) bool {
		if f, ok := parseBegun(l); ok && f.size == n {
			seen[f.slot] = f
		} else if ok {
			clear(seen)
		}
		return len(seen) == n
	})
	return seen
}

// BenchmarkElasticDeath measures how long the ranks of an elastic job do not train after one of them was
// killed: from SIGKILL to the end of the first step at the last survivor. There are 4 ranks with a state of
// 100 MB each.
//
//	go test ./internal/e2e -run '^$' -bench ElasticDeath -benchtime 50x -args -seed 1
func BenchmarkElasticDeath(b *testing.B) { benchmarkFault(b, unix.SIGKILL) }

// BenchmarkElasticStop is like BenchmarkElasticDeath for a rank that is stopped. The others find that only
// after HVD_LIVENESS_SECONDS, which is 5 s here.
func BenchmarkElasticStop(b *testing.B) { benchmarkFault(b, unix.SIGSTOP) }

func benchmarkFault(b *testing.B, signal unix.Signal) {
	const ranks = 4
	random := rand.New(rand.NewPCG(max(*seedFlag, 1), 0))
	j := startHvdrun(b, nil, []string{"-np", strconv.Itoa(ranks), "--min-np", "2", "--blacklist-cooldown-range", "1,1"},
		"elastic-steps", stateVariable+"=100000000", "HVD_LIVENESS_SECONDS=5")
	var stops []time.Duration
	b.ResetTimer()
	for range b.N {
		before := j.awaitBegun(ranks)
		time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond)
		victim, at := random.IntN(ranks), time.Now()
		send(b, before[victim].pid, signal)
		stop := time.Duration(0)
		for slot, f := range j.awaitBegun(ranks - 1) {
			if f.pid != before[slot].pid {
				b.Fatalf("slot %d: got process %d, want the survivor %d", slot, f.pid, before[slot].pid)
			}
			stop = max(stop, f.at.Sub(at))
		}
		stops = append(stops, stop)
	}
	b.StopTimer()
	b.ReportMetric(0, "ns/op")
	reportStops(b, stops, "")
}

// reportStops reports the median and the longest of stops, with suffix in the names.
func reportStops(b *testing.B, stops []time.Duration, suffix string) {
	b.Helper()
	slices.Sort(stops)
	b.ReportMetric(stops[len(stops)/2].Seconds(), "s-median"+suffix)
	b.ReportMetric(stops[len(stops)-1].Seconds(), "s-slowest"+suffix)
}

// startAlone does alone what a new rank does before it trains: it makes its state, copies one of the same
// size into it, and saves it. No other process sends it the state.
func startAlone(ctx context.Context) error {
	size, err := strconv.Atoi(os.Getenv(stateVariable))
	if err != nil {
		return err
	}
	if err := hvd.Init(ctx); err != nil {
		return err
	}
	s := &weights{data: make([]byte, size)}
	saved, err := s.Save()
	if err == nil {
		err = s.Restore(saved)
	}
	if err == nil {
		_, err = s.Save()
	}
	return errors.Join(err, hvd.Shutdown(ctx))
}

// BenchmarkElasticLeave measures how long the ranks do not train when one of them leaves and when it is
// replaced, as hvdrun prints it: from the end of the training in one generation to its beginning in the next
// one. A new rank gets 100 MB of state. It also measures the steps other than the first of each generation,
// and those of a job whose ranks stay: the 99th percentile at the slowest rank. Beside this job, processes
// that do not belong to it start as often as the new ranks, and do alone what these do before they train: the
// other ranks miss the processors and the memory that this takes in any case.
func BenchmarkElasticLeave(b *testing.B) {
	const ranks = 4
	list := filepath.Join(b.TempDir(), "hosts")
	host, err := os.Hostname()
	if err != nil {
		b.Fatal(err)
	}
	offer := func(slots int) {
		if err := os.WriteFile(list+".new", fmt.Appendf(nil, "%s:%d\n", host, slots), 0o600); err != nil {
			b.Fatal(err)
		}
		if err := os.Rename(list+".new", list); err != nil {
			b.Fatal(err)
		}
	}
	offer(ranks)
	flags := []string{"-np", strconv.Itoa(ranks), "--min-np", "2", "--host-discovery-script", "cat " + list}
	folder := b.TempDir()
	run := func() *job {
		j := startHvdrun(b, nil, flags, "elastic-steps", stateVariable+"=100000000", folderVariable+"="+folder)
		j.awaitBegun(ranks)
		return j
	}
	j, began := run(), time.Now()
	stops := make(map[int][]time.Duration) // by the number of ranks after the change
	for i := range 2 * b.N {
		size := ranks - 1 + i%2
		offer(size)
		line := fmt.Sprintf("generation %d: trains after a stop of ", i+2)
		j.untilError(line, func(text string) bool {
			_, rest, _ := strings.Cut(text, line)
			seconds, _, found := strings.Cut(rest, " s\n")
			if stop, err := time.ParseDuration(seconds + "s"); found && err == nil {
				stops[size] = append(stops[size], stop)
			}
			return found
		})
	}
	lasted := time.Since(began)
	b.ReportMetric(0, "ns/op")
	reportStops(b, stops[ranks-1], "-leave")
	reportStops(b, stops[ranks], "-add")
	b.ReportMetric(j.endSteps(b, folder), "s-p99-step")
	j = run()
	next := time.NewTicker(lasted / time.Duration(b.N))
	defer next.Stop()
	ctx, cancel := context.WithTimeout(b.Context(), lasted+jobLimit)
	defer cancel()
	for range b.N {
		alone := exec.CommandContext(ctx, testnet.Self(b))
		alone.Env = append(os.Environ(), programVariable+"=elastic-alone", stateVariable+"=100000000", "HVD_SIZE=1")
		if out, err := alone.CombinedOutput(); err != nil {
			b.Fatalf("%v\n%s", err, out)
		}
		<-next.C
	}
	b.ReportMetric(j.endSteps(b, folder), "s-p99-same-load")
}

// endSteps ends a job of the program "elastic-steps", and returns the largest 99th percentile of a rank's
// steps in seconds.
func (j *job) endSteps(b *testing.B, folder string) (seconds float64) {
	b.Helper()
	end := filepath.Join(folder, "end")
	testnet.WriteFile(b, end, "")
	if status := j.wait(); status != 0 {
		b.Fatalf("hvdrun ended with status %d, want 0", status)
	}
	for text := range strings.Lines(j.out()) {
		if _, ns, ok := strings.Cut(strings.TrimSpace(text), ">:p99 "); ok {
			n, _ := strconv.Atoi(ns)
			seconds = max(seconds, time.Duration(n).Seconds())
		}
	}
	if err := os.Remove(end); err != nil {
		b.Fatal(err)
	}
	return seconds
}

// BenchmarkElasticHostLost is like BenchmarkElasticDeath for the host of rank 0, with 2 of 4 ranks and the
// agent there.
func BenchmarkElasticHostLost(b *testing.B) {
	c := startCluster(b, "h1:2 h2:2", []string{"-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "1,1"},
		`exec "$0"`, "elastic-steps", stateVariable+"=100000000")
	benchmarkHost(b, c, func(host string, pids []int) (undo func()) {
		c.kill(append(pids, c.agentOf(pids[0]))...)
		return func() {}
	})
}

// BenchmarkElasticCut is like BenchmarkElasticHostLost for a cut cable, which also cuts ssh. The others find
// that only after HVD_LIVENESS_SECONDS, which is 5 s here.
func BenchmarkElasticCut(b *testing.B) {
	hosts, command, flags := sshHosts(b, 3)
	c := &cluster{job: startHvdrun(b, command, append(flags, "-H", list(hosts[1:], layout{2, 2}, true), "--min-np",
		"2", "--blacklist-cooldown-range", "1,1"), "elastic-steps", stateVariable+"=100000000",
		"HVD_LIVENESS_SECONDS=5")}
	benchmarkHost(b, c, func(host string, _ []int) (undo func()) {
		i := slices.IndexFunc(hosts, func(h *testnet.Host) bool { return h.Addr.String() == host })
		hosts[i].SetLink(false)
		return func() { hosts[i].SetLink(true) }
	})
}

// benchmarkHost measures how long 2 ranks on a host do not train after fault has made them lose the other
// host, which has 2 ranks, one of which is rank 0.
func benchmarkHost(b *testing.B, c *cluster, fault func(host string, pids []int) (undo func())) {
	var stops []time.Duration
	for range b.N {
		var host string // of rank 0
		var pids []int  // there
		ranks := c.begun(4)
		for at, f := range ranks {
			if f.rank == 0 {
				host, _, _ = strings.Cut(at, ":")
			}
		}
		for at, f := range ranks {
			if strings.HasPrefix(at, host+":") {
				pids = append(pids, f.pid)
			}
		}
		at, stop := time.Now(), time.Duration(0)
		undo := fault(host, pids)
		for _, f := range c.begun(2) {
			stop = max(stop, f.at.Sub(at))
		}
		stops = append(stops, stop)
		undo()
	}
	b.ReportMetric(0, "ns/op")
	reportStops(b, stops, "")
}

// TestElasticFaults lets random faults happen in an elastic job, one after the other: deaths at every point
// of the program, two at once or one shortly after the other, slots that come and go, and scripts that fail.
// After each, all slots train again. With -whole it lets 60 of them happen.
func TestElasticFaults(t *testing.T) {
	t.Parallel()
	const ranks = 4
	rounds, kinds := 3, 9
	if *whole > 0 {
		rounds, kinds = 60**whole, 10
	}
	random := draws(t)
	folder := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(folder, name)
		testnet.WriteScript(t, path+".new", text)
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	offer := func(slots int) { write("hosts", fmt.Sprintf("echo %s:%d", host, slots)) }
	offer(ranks)
	j := startHvdrun(t, nil, []string{"-np", strconv.Itoa(ranks), "--min-np", "1", "--max-np", strconv.Itoa(ranks),
		"--blacklist-cooldown-range", "1,1", "--host-discovery-script", "sh " + filepath.Join(folder, "hosts")},
		"elastic-steps", stateVariable+"=100000", folderVariable+"="+folder, "HVD_LIVENESS_SECONDS=10")
	now := j.awaitBegun(ranks)
	guilty := make(map[int]bool) // by process IDs
	kill := func(signal unix.Signal, slots ...int) {
		for _, s := range slots {
			guilty[now[s].pid] = true
			_ = unix.Kill(now[s].pid, signal) // it may have ended because of an earlier fault
		}
	}
	for round := range rounds {
		victims := random.Perm(ranks)
		pause := time.Duration(random.IntN(100)) * time.Millisecond
		var what string
		switch random.IntN(kinds) {
		case 0:
			what = "two die at once"
			kill(unix.SIGKILL, victims[:2]...)
		case 1, 2:
			what = fmt.Sprintf("one dies, and another one after %v", pause)
			kill(unix.SIGKILL, victims[0])
			time.Sleep(pause)
			kill(unix.SIGKILL, victims[1])
		case 3, 4, 5, 6:
			point := points[random.IntN(len(points))]
			what = fmt.Sprintf("one dies at the point %s", point)
			write("die."+point, "")
			if point == "start" || point == "restore" || point == "train" { // at the start of a generation
				what += ", after another one"
				kill(unix.SIGKILL, victims[0])
			}
		case 9:
			what = "one is stopped"
			kill(unix.SIGSTOP, victims[0])
		case 7:
			what = fmt.Sprintf("slots go, and come back after %v", pause)
			offer(1 + random.IntN(ranks-1))
			time.Sleep(pause * 20)
			offer(ranks)
			kill(unix.SIGKILL, victims[0]) // hvdrun may not have noticed that the slots were away
		case 8:
			what = "the script fails, and one dies"
			write("hosts", []string{"exit 1", "echo a:b:c", "echo " + host + ":none", "kill -9 $$"}[random.IntN(4)])
			kill(unix.SIGKILL, victims[0])
			time.Sleep(pause * 10)
			offer(ranks)
		}
		t.Logf("round %d: %s", round, what)
		now = j.awaitBegun(ranks)
		for len(left(folder)) > 0 { // the point is only reached in another generation
			now = j.awaitBegun(ranks)
		}
	}
	write("end", "")
	j.ends(0)
	checkFaults(t, j, host, ranks, guilty)
	tellJob(t, j)
}

// TestElasticResets kills a rank of an elastic job again and again. The memory and the descriptors of the
// first rank do not grow. With -whole it does so 100 times, for 200 resets.
func TestElasticResets(t *testing.T) {
	t.Parallel()
	const ranks = 3
	kills := 3
	if *whole > 0 {
		kills = 100 * *whole
	}
	folder := t.TempDir()
	j := startHvdrun(t, nil, []string{"-np", strconv.Itoa(ranks), "--min-np", "2", "--blacklist-cooldown-range", "1,1"},
		"elastic-steps", stateVariable+"=100000", folderVariable+"="+folder)
	random := draws(t)
	now := j.awaitBegun(ranks)
	var early begun
	for i := range kills {
		send(t, now[1+random.IntN(ranks-1)].pid, unix.SIGKILL)
		if now = j.awaitBegun(ranks); i == 1 { // at first the process opens files that it keeps
			early = now[0]
		}
	}
	last := now[0]
	t.Logf("from %+v to %+v after %d resets", early, last, 2*kills-4)
	if last.pid != early.pid || last.fds > early.fds+8 || last.goroutines > early.goroutines+8 ||
		last.heap > early.heap+8<<20 {
		t.Errorf("descriptors, goroutines or memory grow: got %+v, then %+v after %d resets", early, last, 2*kills-4)
	}
	testnet.WriteFile(t, filepath.Join(folder, "end"), "")
	j.ends(0)
	tellJob(t, j)
}

// TestElasticSpare kills a rank of an elastic job with a spare. The spare takes its place in the same change,
// and the timeline shows why.
func TestElasticSpare(t *testing.T) {
	t.Parallel()
	const ranks = 3
	folder := t.TempDir()
	j := startHvdrun(t, nil, []string{"-np", strconv.Itoa(ranks), "--min-np", "2", "--spares", "1"},
		"elastic-steps", stateVariable+"=100000", folderVariable+"="+folder,
		"HOROVOD_TIMELINE="+filepath.Join(folder, "t.json"))
	before := j.awaitBegun(ranks)
	spare := -1
	j.untilError("a spare", func(text string) bool {
		where, _, _ := strings.Cut(text, " is ready as a spare")
		_, slot, found := strings.Cut(strings.TrimPrefix(where, "hvdrun: "), ":")
		spare, _ = strconv.Atoi(slot)
		return found && where != text
	})
	victim := draws(t).IntN(ranks + 1)
	for before[victim].pid == 0 || victim == spare {
		victim = (victim + 1) % (ranks + 1)
	}
	send(t, before[victim].pid, unix.SIGKILL)
	after := j.awaitBegun(ranks)
	for slot, f := range before {
		if slot != victim && after[slot].pid != f.pid {
			t.Errorf("slot %d: got %+v, want the survivor %+v", slot, after[slot], f)
		}
	}
	if after[spare].pid == 0 {
		t.Errorf("got the ranks %+v, want one at the slot %d of the spare", after, spare)
	}
	testnet.WriteFile(t, filepath.Join(folder, "end"), "")
	j.ends(0)
	if got := strings.Count(j.err(), "hvdrun: generation 2: 3 ranks: rank "); got != 1 {
		t.Errorf("got %d lines about generation 2 with 3 ranks, want 1", got)
	}
	events, err := os.ReadFile(filepath.Join(folder, "t.epoch2.json"))
	if err != nil || !bytes.Contains(events, []byte(`"generation 2: rank `)) {
		t.Errorf("got error %v, and a timeline of %d bytes without generation 2", err, len(events))
	}
	tellJob(t, j)
}

// TestElasticStoppedSpare stops the spare of an elastic job and kills a rank. The others do not wait for the
// spare for the time limit of Init.
func TestElasticStoppedSpare(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	j := startHvdrun(t, nil, []string{"-np", "2", "--min-np", "1", "--spares", "1", "--blacklist-cooldown-range",
		"3600,3600"}, "elastic-steps", stateVariable+"=100000", folderVariable+"="+folder, "HVD_LIVENESS_SECONDS=3",
		"HOROVOD_GLOO_TIMEOUT_SECONDS=3600")
	before := j.awaitBegun(2)
	const ready = " is ready as a spare"
	j.untilError("a spare", func(text string) bool { return strings.Contains(text, ready) })
	where, _, _ := strings.Cut(j.err(), ready)
	slot := where[strings.LastIndex(where, ":")+1:]
	spare := 0
	for text := range strings.Lines(j.out()) {
		if number, found := strings.CutPrefix(strings.TrimSpace(text), "["+slot+"]<stdout>:pid "); found {
			spare, _ = strconv.Atoi(number)
		}
	}
	if spare == 0 {
		t.Fatalf("got no process ID of the spare at slot %s in %q", slot, j.out())
	}
	stop(t, spare)
	for _, rank := range before {
		if rank.pid != 0 {
			send(t, rank.pid, unix.SIGKILL)
			break
		}
	}
	j.awaitBegun(1)
	testnet.WriteFile(t, filepath.Join(folder, "end"), "")
	j.ends(0)
	if want := "): did not answer hvdrun within 3s\n"; !strings.Contains(j.err(), want) {
		t.Errorf("got %q, want %q", j.err(), want)
	}
	tellJob(t, j)
}

// stop stops a process and returns when all of its threads have stopped. On a busy machine, the others run on
// until one of them has been given a processor to handle the signal.
func stop(t *testing.T, pid int) {
	t.Helper()
	send(t, pid, unix.SIGSTOP)
	running := func() bool {
		stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil || len(stats) == 0 {
			t.Fatalf("process %d has no threads: %v", pid, err)
		}
		return slices.ContainsFunc(stats, func(name string) bool {
			text, err := os.ReadFile(name)
			_, state, _ := bytes.Cut(text, []byte(") "))
			return err == nil && !bytes.HasPrefix(state, []byte("T"))
		})
	}
	for end := time.Now().Add(jobLimit); running(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("process %d has not stopped within %v", pid, jobLimit)
		}
	}
}

// left returns the points at which no process has died yet.
func left(folder string) []string {
	names, _ := filepath.Glob(filepath.Join(folder, "die.*"))
	return names
}

// blame matches a process that has failed in the reason of a change. A process that leaves does not match.
var blame = regexp.MustCompile(`rank \d+ \(([^ ()]+(?: \(process \d+\))?)\): `)

// blamedForChange returns the processes that hvdrun has blamed for a change of the ranks in a line.
func blamedForChange(text string) (names []string) {
	if strings.HasPrefix(text, "hvdrun: generation ") {
		for _, m := range blame.FindAllStringSubmatch(text, -1) {
			names = append(names, m[1])
		}
	}
	return names
}

// checkFaults checks that all ranks have the same result, and that hvdrun has blamed only processes that are
// in guilty, or that have printed that they die.
func checkFaults(t *testing.T, j *job, host string, ranks int, guilty map[int]bool) {
	t.Helper()
	numbers, pids, failed := make(map[int]int), make(map[int]int), make(map[string]bool)
	var results []string
	for text := range strings.Lines(j.out()) {
		m := prefix.FindStringSubmatch(strings.TrimSpace(text))
		if m == nil {
			continue
		}
		slot, _ := strconv.Atoi(m[1])
		name := func() string {
			if numbers[slot] == 1 {
				return fmt.Sprintf("%s:%d", host, slot)
			}
			return fmt.Sprintf("%s:%d (process %d)", host, slot, numbers[slot])
		}
		switch kind, rest, _ := strings.Cut(m[3], " "); kind {
		case "pid":
			numbers[slot]++
			pids[slot], _ = strconv.Atoi(rest)
			failed[name()] = guilty[pids[slot]]
		case "dies":
			failed[name()] = true
		case "done":
			results = append(results, rest)
		}
	}
	if len(results) != ranks || len(slices.Compact(results)) != 1 || !strings.HasSuffix(results[0], " 0") {
		t.Errorf("got results %q, want %d equal ones", results, ranks)
	}
	for text := range strings.Lines(j.err()) {
		for _, name := range blamedForChange(text) {
			if !failed[name] {
				t.Errorf("hvdrun blames %s, which has not failed: %s", name, text)
			}
		}
	}
}
