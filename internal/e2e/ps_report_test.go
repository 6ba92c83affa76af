package e2e

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

// lagging is a node of a job in which server 1 does not answer worker 1 until it receives SIGUSR1. So worker
// 1 waits for server 1, and the other workers wait in a barrier only for worker 1. A server prints when it
// has got all pushes of worker 1.
func lagging(ctx context.Context) error {
	signals, released := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		<-signals
		close(released)
	}()
	node, err := ps.Join(ctx, ps.Config{})
	if err != nil {
		return err
	}
	switch node.Role() {
	case ps.Server:
		got := 0
		handler := func(meta ps.KVMeta, _ ps.KVPairs[float64], s *ps.KVServer[float64]) {
			answer := func() {
				if err := s.Respond(meta, ps.KVPairs[float64]{}); err != nil {
					fmt.Println("error", err)
				}
			}
			late := meta.Sender == ps.NodeID(van.WorkerID(1))
			if late && node.Rank() == 1 {
				go func() {
					<-released
					answer()
				}()
			} else {
				answer()
			}
			if late {
				if got++; got == laggingPushes {
					fmt.Println("served worker 1")
				}
			}
		}
		_, err = ps.NewKVServer(node, ps.KVHandler[float64](handler))
	case ps.Worker:
		err = laggingWorker(ctx, node)
	}
	return finalize(ctx, node, err)
}

// laggingPushes is the number of pushes of each worker to each server.
const laggingPushes = 3

// laggingWorker pushes to both servers and enters a barrier when they have answered.
func laggingWorker(ctx context.Context, node *ps.Node) error {
	w, err := ps.NewKVWorker[float64](node)
	if err != nil {
		return err
	}
	var requests []*ps.Request
	for range laggingPushes {
		r, err := w.PushAsync(ctx, []uint64{1, ps.MaxKey - 10}, []float64{1, 1})
		if err != nil {
			return err
		}
		requests = append(requests, r)
	}
	for _, r := range requests {
		if err := r.Wait(ctx); err != nil {
			return err
		}
	}
	return node.Barrier(ctx, ps.WorkerGroup)
}

// heldUp returns the metric hvd_ps_held_up_seconds_total of a node, as hvdrun serves it.
func heldUp(t *testing.T, url, node string) float64 {
	m := regexp.MustCompile(`hvd_ps_held_up_seconds_total{[^}]*peer="` + node + `",rank="0"} (\S+)`).
		FindStringSubmatch(get(t, url))
	if m == nil {
		return 0
	}
	seconds, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return seconds
}

// quit sends SIGQUIT to hvdrun and returns its report. If not all processes have answered in time because the
// machine is busy, it asks again.
func (j *job) quit(processes int) string {
	j.t.Helper()
	for tries := 1; ; tries++ {
		before := len(j.err())
		j.signal(syscall.SIGQUIT)
		report := ""
		j.untilError("report", func(text string) bool {
			report = text[before:]
			return strings.Count(report, rule) == 2
		})
		if tries == 5 || strings.Contains(report, fmt.Sprintf("SIGQUIT: %d of %[1]d ", processes)) {
			return report
		}
		<-time.After(6 * time.Second) // hvdrun forwards a second signal within 5 s of the first
	}
}

// rule is the line before and after a report.
var rule = strings.Repeat("-", 72) + "\n"

// checkReport checks that a report contains matches of all regular expressions.
func checkReport(t *testing.T, report string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !regexp.MustCompile(w).MatchString(report) {
			t.Errorf("got the report\n%s\nwant %q in it", report, w)
		}
	}
}

// TestLateNodes checks what hvdrun reports on nodes, on SIGQUIT and at the end of the job. Server 1 answers
// worker 1 only when the test lets it. So the order of events decides who waits for whom, and what has been
// counted. Which node is called late depends on times. TestNodeReport in cmd/hvdrun checks that.
func TestLateNodes(t *testing.T) {
	dir := t.TempDir()
	j := startHvdrun(t, nil, []string{"--metrics-addr", ":0", "--dump-dir", dir, "--servers", "2", "--workers",
		"3"}, "lagging")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("hvdrun has written:\n%s", j.err())
		}
	})
	url := j.metricsURL()
	j.awaitLines(2, "served worker 1")
	// The barrier in which nodes start is over. A report shows a wait only if it has lasted 100 ms.
	before := heldUp(t, url, "worker 1")
	testnet.Eventually(t, "the others wait only for worker 1", func() bool { return heldUp(t, url, "worker 1") > before+0.1 })
	report := j.quit(6)
	checkReport(t, report, "hvdrun: SIGQUIT: 6 of 6 nodes answered",
		"\nBarrier of group 4: worker 0 and worker 2 have waited .* for worker 1\\.\n",
		"\nPush of .*: worker 1 has waited .* for server 1\\.\n",
		"\nscheduler +0 ", "\nserver 0 +9 ", "\nserver 1 +6 ", "\nworker 0 +3 ", "\nworker 1 +0 ", "\nworker 2 +3 ")
	if text, err := os.ReadFile(dir + "/report.txt"); err != nil || !strings.Contains(report, string(text)) {
		t.Errorf("got the file\n%s\nwant the report\n%s\nand the error %v", text, report, err)
	}
	length := len(j.err())
	j.signal(syscall.SIGUSR1)
	j.ends(0)
	end := j.err()[length:]
	checkReport(t, end, "hvdrun: the nodes of the job, of which 6 of 6 have reported at their end\n",
		"\nscheduler +0 ", "\nserver 0 +9 ", "\nserver 1 +9 ", "\nworker 0 +3 ", "\nworker 1 +3 ", "\nworker 2 +3 ")
	if strings.Contains(end, "Barrier of group") || strings.Contains(end, "Push of") {
		t.Errorf("at the end nodes wait:\n%s", end)
	}
}
