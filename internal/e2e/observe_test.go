package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// report has those fields of the output of hvdrun timeline --json that the tests read.
type report struct {
	Size      int   `json:"size"`
	WithFiles []int `json:"ranks_with_files"`
	Dropped   int   `json:"dropped"`
	Errors    int   `json:"errors"`
	Steps     int   `json:"steps"`
	Lateness  struct {
		Verdict string `json:"verdict"`
		Ranks   []struct {
			Rank  int     `json:"rank"`
			Last  int     `json:"last"`
			Share float64 `json:"share"`
		} `json:"ranks"`
	} `json:"lateness"`
	Cache struct {
		Hits   int `json:"hits"`
		Misses int `json:"misses"`
	} `json:"cache"`
}

// reportOf runs hvdrun timeline on a file and returns the report.
func reportOf(t *testing.T, file string) (r report) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), hvdrunPath, "timeline", "--json", file).Output()
	if err != nil {
		t.Fatalf("hvdrun timeline: %v\n%s", err, out)
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("hvdrun timeline --json: %v in\n%s", err, out)
	}
	return r
}

// checkTimeline checks that exactly want files match the pattern and that each of them follows the rules of
// the format.
func checkTimeline(t *testing.T, pattern string, want int) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) != want {
		t.Fatalf("files are %q, %v, want %d", files, err, want)
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := timelinetest.Check(f); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		f.Close()
	}
}

// hvdrun timeline names a slow rank. In the second case all requests are cached, so that only bits are
// negotiated, because hvdrun top starts the timeline in the middle of the training.
func TestSlowRankIsNamed(t *testing.T) {
	digits := buildDigits(t)
	for _, switched := range []bool{false, true} {
		// The four ranks share the processors with other tests, so each of them sometimes waits. If the slow
		// rank is not found because of these waits, the test makes it slower.
		var share float64
		for _, slow := range []string{"15ms", "60ms", "240ms", "960ms"} {
			if share = slowRank(t, digits, slow, switched); share >= 0.9 || t.Failed() {
				break
			}
		}
		if share < 0.9 {
			t.Errorf("switched %v: rank 2 caused %.1f %% of the waiting by the verdict, want at least 90",
				switched, 100*share)
		}
	}
}

// slowRank runs a job in which rank 2 is slow, and checks its timeline, the report on it and the merged
// trace. It returns rank 2's share of the waiting, or 0 if the verdict does not name rank 2.
func slowRank(t *testing.T, digits, slow string, switched bool) (share float64) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "whole.json")
	flags := []string{"--timeline-filename", file}
	if switched {
		flags = []string{"--timeline-filename", "DYNAMIC", "--timeline-mark-cycles"}
	}
	// On an idle machine fewer than six epochs would be enough.
	command := append([]string{hvdrunPath, "-np", "4"}, flags...)
	command = append(command, digits, "-epochs", "6", "-slow-rank", "2", "-slow", slow)
	j := startIn(t, dir, command)
	if switched {
		j.until("two epochs", func(l line) bool { return strings.HasPrefix(l.text, "epoch 2/") })
		top := exec.Command(hvdrunPath, "top", "--start-timeline", file, strconv.Itoa(j.cmd.Process.Pid))
		out, err := top.CombinedOutput()
		if want := "4 of 4 ranks have started a timeline: rank 0 to " + file + ".\n"; string(out) != want || err != nil {
			t.Errorf("got %q, %v, want %q", out, err, want)
		}
	}
	if status := j.wait(); status != 0 {
		t.Fatalf("exit status %d\n%s%s", status, j.out(), j.err())
	}
	checkTimeline(t, strings.TrimSuffix(file, ".json")+"*.json", 4)
	r := reportOf(t, file)
	if r.Size != 4 || len(r.WithFiles) != 4 || r.Dropped != 0 || r.Errors != 0 || r.Steps < 20 {
		t.Errorf("%+v", r)
	}
	for _, l := range r.Lateness.Ranks {
		if l.Rank == 2 && strings.HasPrefix(r.Lateness.Verdict, "rank 2 ") {
			share = l.Share
		}
	}
	t.Logf("switched %v, %s: %s", switched, slow, r.Lateness.Verdict)
	if switched && (r.Cache.Hits == 0 || r.Cache.Misses > 4) {
		t.Errorf("%d tensors were cached and %d not, want only the one at the end to be new, at four ranks",
			r.Cache.Hits, r.Cache.Misses)
	}

	merged := filepath.Join(dir, "merged", "all.json")
	if err := os.MkdirAll(filepath.Dir(merged), 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(hvdrunPath, "timeline", "--merge", merged,
		file).CombinedOutput(); err != nil {
		t.Fatalf("merge: %v\n%s", err, out)
	}
	checkMerged(t, merged, 4)
	return share
}

// checkMerged checks a merged trace: it must have events of all ranks, the times on a track must not
// decrease, and each begin event must have an end event.
func checkMerged(t *testing.T, file string, ranks int) {
	t.Helper()
	text := testnet.ReadFile(t, file)
	var events []struct {
		Phase string  `json:"ph"`
		Pid   int     `json:"pid"`
		Tid   int     `json:"tid"`
		Ts    float64 `json:"ts"`
	}
	if err := json.Unmarshal(text, &events); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	type track struct{ pid, tid int }
	last, open, pids := make(map[track]float64), make(map[track]int), make(map[int]bool)
	for i, e := range events {
		at := track{e.Pid, e.Tid}
		if e.Phase == "M" {
			continue
		}
		if e.Ts < last[at] {
			t.Fatalf("%s: event %d goes back on %v", file, i, at)
		}
		last[at] = e.Ts
		switch e.Phase {
		case "B":
			open[at]++
			pids[e.Pid] = true
		case "E":
			if open[at]--; open[at] < 0 {
				t.Fatalf("%s: event %d ends what has not begun on %v", file, i, at)
			}
		}
	}
	for at, n := range open {
		if n != 0 {
			t.Errorf("%s: %d are open on %v", file, n, at)
		}
	}
	if len(pids) != ranks {
		t.Errorf("%s has events of %d ranks, want %d", file, len(pids), ranks)
	}
}

// clockOf has the data about a rank's clock from its timeline file.
type clockOf struct {
	start         float64 // the time of day at which the rank's times begin, in microseconds
	offset, bound float64 // the last measured offset and its error bound, in microseconds
	measured      int
}

func readClock(t *testing.T, file string) (c clockOf) {
	t.Helper()
	text := testnet.ReadFile(t, file)
	var events []struct {
		Name string `json:"name"`
		Args struct {
			Start  float64 `json:"start_time_since_epoch_in_micros"`
			Offset float64 `json:"offset_us"`
			Error  float64 `json:"error_us"`
		} `json:"args"`
	}
	if err := json.Unmarshal(text, &events); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, e := range events {
		switch {
		case e.Name == "process_name" && e.Args.Start != 0:
			c.start = e.Args.Start
		case e.Name == "hvd_clock":
			c.offset, c.bound = e.Args.Offset, e.Args.Error
			c.measured++
		}
	}
	return c
}

// The monotonic clocks of the ranks differ. The offset in each timeline file has an error of at most the
// error bound in the file. The test knows the exact offsets, because the time of day is the same for all
// ranks.
func TestClocksSetApart(t *testing.T) {
	if err := exec.Command("unshare", "-T", "--monotonic", "1", "true").Run(); err != nil {
		t.Skip("this machine makes no time namespaces: ", err)
	}
	self := testnet.Self(t)
	dir := t.TempDir()
	file, end := filepath.Join(dir, "t.json"), filepath.Join(dir, "end")
	script := `HVD_HOSTID=h$HOROVOD_RANK exec unshare -T --monotonic $((HOROVOD_RANK * 1000)) "$0"`
	j := startCommand(t, []string{hvdrunPath, "-np", "3", "--timeline-filename", file, "sh", "-c", script,
		self}, programVariable+"=steps", "E2E_END="+end)
	j.ready(3)
	testnet.WriteFile(t, end, "")
	if status := j.wait(); status != 0 {
		t.Fatalf("exit status %d\n%s%s", status, j.out(), j.err())
	}
	checkTimeline(t, filepath.Join(dir, "t*.json"), 3)
	zero := readClock(t, file)
	for rank := 1; rank < 3; rank++ {
		c := readClock(t, filepath.Join(dir, fmt.Sprintf("t.rank%d.json", rank)))
		truth := c.start - zero.start
		t.Logf("rank %d: %.1f us from rank 0's, by the files %.1f within %.1f", rank, truth, c.offset,
			c.bound)
		// The sum has 2 us more, because each of the two start times is in whole microseconds.
		if c.measured == 0 || c.bound <= 0 || math.Abs(c.offset-truth) > c.bound+2 {
			t.Errorf("rank %d: its clock is %.1f us from rank 0's, by the files %.1f within %.1f, measured %d times", rank, truth, c.offset, c.bound, c.measured)
		}
	}
	if r := reportOf(t, file); len(r.WithFiles) != 3 || r.Errors != 0 {
		t.Errorf("%+v", r)
	}
}

// One rank never submits a tensor. The log, the metrics, the automatic report, the report after SIGQUIT and
// the dump files name the tensor and this rank.
func TestForgottenTensorIsNamed(t *testing.T) {
	t.Parallel()
	dumps := filepath.Join(t.TempDir(), "dumps")
	addr := freeAddress(t)
	j := startHvdrun(t, nil, []string{"-np", "4", "--stall-check-warning-time-seconds", "1", "--metrics-addr",
		addr, "--dump-dir", dumps}, "stalls")
	pids := j.ready(4)
	logged := regexp.MustCompile(
		`stalled: allreduce \\?"grad/7\\?" of process set 0 has waited \S+ for rank 2`)
	j.untilError("line in the log", logged.MatchString)
	named := func(text string) bool {
		return strings.Contains(text,
			`Rank 2 has not called allreduce "grad/7", for which ranks 0, 1 and 3 have waited`)
	}
	j.untilError("report by itself", named)
	text := get(t, "http://"+addr+"/metrics")
	if !regexp.MustCompile(`(?m)^hvd_stalled_tensors\{[^}]*rank="0"[^}]*\} 1$`).MatchString(text) {
		t.Errorf("the metrics do not say that a tensor has stalled:\n%s", text)
	}
	for r := range 4 {
		if !strings.Contains(text, fmt.Sprintf(`hvd_up{rank="%d"} 1`, r)) &&
			!regexp.MustCompile(fmt.Sprintf(`(?m)^hvd_up\{[^}]*rank="%d"[^}]*\} 1$`, r)).MatchString(text) {
			t.Errorf("the metrics do not say that rank %d is up", r)
		}
	}

	before := len(j.err())
	j.signal(syscall.SIGQUIT)
	j.untilError("report after SIGQUIT", func(text string) bool { return named(text[before:]) })
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("process %d: %v, want it to go on", pid, err)
		}
	}
	for _, name := range []string{"rank0.json", "rank1.json", "rank2.json", "rank3.json"} {
		b, err := os.ReadFile(filepath.Join(dumps, name))
		if err != nil || !json.Valid(b) || strings.Contains(string(b), `"grad/7"`) != true {
			t.Errorf("%s: %v, %d bytes, valid: %v", name, err, len(b), json.Valid(b))
		}
	}
	j.signal(os.Interrupt)
	if status := j.wait(); status != 130 {
		t.Errorf("exit status %d, want 130", status)
	}
}

// The stall inspector ends the job. The report names the tensor and the rank that has not submitted it.
func TestStallShutdownIsExplained(t *testing.T) {
	t.Parallel()
	j := startHvdrun(t, nil, []string{"-np", "3", "--stall-check-warning-time-seconds", "1",
		"--stall-check-shutdown-time-seconds", "2"}, "stalls")
	if status := j.wait(); status == 0 {
		t.Error("exit status 0")
	}
	_, report, found := strings.Cut(j.err(), "what the ranks did when the job failed")
	if !found || !strings.Contains(report,
		`Rank 2 has not called allreduce "grad/7", for which ranks 0 and 1 have waited for 2.0 s`) {
		t.Errorf("got\n%s", j.err())
	}
}

// All processes of each kind of job answer hvdrun: /metrics shows them, and so does the report after SIGQUIT.
// torchrun has no such report, and hvdrun asks nothing of a job that has only some of its processes.
func TestEachProcessAnswers(t *testing.T) {
	self := testnet.Self(t)
	for _, k := range tableKinds(t) {
		if strings.HasSuffix(k.name, "torchrun") || strings.HasSuffix(k.name, "ranks 1 and 2") {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			hosts, command, env := k.command(t, k.hosts)
			at := slices.Index(command, hvdrunPath)
			j := startCommand(t, slices.Insert(slices.Clone(command), at+1, "--metrics-addr", "127.0.0.1:0"),
				slices.Concat(env, k.env, []string{faultVariable + "=none", victimVariable + "=none",
					fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", jobLimit.Seconds())})...)
			processes := len(k.victims)
			if slices.Contains(k.victims, "server 0") {
				processes = 1 + servers + workers
			}
			j.awaitLines(processes, "ready")
			url := j.metricsURL()
			metrics := func() (text string) {
				if !k.hosts {
					return get(t, url)
				}
				cmd := hosts[0].Command(t.Context(), self, url)
				cmd.Env = append(os.Environ(), programVariable+"=get")
				out, err := cmd.Output()
				if err != nil {
					t.Fatal(err)
				}
				return string(out)
			}
			up := regexp.MustCompile(`(?m)^hvd_up\{[^}]*\} 1$`)
			testnet.Eventually(t, fmt.Sprintf("hvd_up is 1 for %d processes", processes), func() bool {
				return len(up.FindAllString(metrics(), -1)) == processes
			})
			if report := j.quit(processes); !strings.Contains(report,
				fmt.Sprintf("SIGQUIT: %d of %[1]d ", processes)) {
				t.Errorf("%d processes have not answered:\n%s", processes, report)
			}
			j.signal(syscall.SIGTERM)
			j.ends(128 + int(syscall.SIGTERM))
		})
	}
}

// freeAddress returns a loopback address with a port on which nothing listens.
func freeAddress(t *testing.T) string {
	l := testnet.Listen(t)
	defer l.Close()
	return l.Addr().String()
}

func get(t testing.TB, url string) string {
	t.Helper()
	text, err := testnet.Get(testnet.Context(t), url)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
