package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

// lagging is a node of a job in which server 1 answers late, and the other workers wait in a barrier for
// worker 1, until it receives SIGUSR1.
func lagging(ctx context.Context) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	po, err := ps.Start(ctx, ps.Options{})
	if err != nil {
		return err
	}
	switch {
	case po.IsServer():
		delay := time.Duration(po.Rank()) * 300 * time.Millisecond
		handler := func(meta ps.KVMeta, _ ps.KVPairs[float64], s *ps.KVServer[float64]) {
			time.AfterFunc(delay, func() {
				if err := s.Response(meta, ps.KVPairs[float64]{}); err != nil {
					fmt.Println("error", err)
				}
			})
		}
		_, err = ps.NewKVServer(po, 0, ps.KVHandler[float64](handler), ps.SimpleHandlers{})
	case po.IsWorker():
		err = laggingWorker(ctx, po, signals)
	}
	return errors.Join(err, po.Finalize(ctx, err == nil))
}

func laggingWorker(ctx context.Context, po *ps.Postoffice, signals <-chan os.Signal) error {
	w, err := ps.NewKVWorker[float64](po, 0, 0, ps.SimpleHandlers{})
	if err != nil {
		return err
	}
	for range 3 {
		r, err := w.Push(ctx, []uint64{1, ps.MaxKey - 10}, []float64{1, 1})
		if err == nil {
			err = r.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	if po.Rank() == 1 {
		fmt.Println("worker 1 has pushed")
		<-signals
	}
	return po.Barrier(ctx, 0, ps.WorkerGroup)
}

// heldUp returns the metric hvd_ps_held_up_seconds_total of a node, as hvdrun serves it.
func heldUp(t *testing.T, url, node string) float64 {
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`hvd_ps_held_up_seconds_total{[^}]*peer="` + node + `",rank="0"} (\S+)`).
		FindSubmatch(text)
	if m == nil {
		return 0
	}
	seconds, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return seconds
}

// A server answers late, and a worker enters a barrier late. hvdrun says so when it is asked by SIGQUIT, and
// at the end of the job.
func TestLateNodes(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	dir := t.TempDir()
	j := startHvdrun(t, nil, []string{"--metrics-addr", ":0", "--dump-dir", dir, "--servers", "2", "--workers",
		"3"}, "lagging")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("hvdrun has written:\n%s", j.err())
		}
	})
	url := ""
	testnet.Eventually(t, "hvdrun says where metrics are", func() bool {
		if at := regexp.MustCompile(`metrics at (http://\S+)`).FindStringSubmatch(j.err()); at != nil {
			url = at[1]
		}
		return url != ""
	})
	// On a busy machine worker 1 holds up the others before it has the last response.
	testnet.Eventually(t, "worker 1 has pushed", func() bool { return strings.Contains(j.out(), "worker 1 has pushed") })
	testnet.Eventually(t, "worker 1 has held up the others", func() bool { return heldUp(t, url, "worker 1") > 0.5 })
	if err := j.cmd.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	server := "Server 1 was late: workers waited .* for its responses on average, and .* for those of other servers"
	late := `([3-9]\d\dms|[1-9][\d.]*s)` // at least 300 ms
	worker := "Worker 1 was late: others waited .* only for it, in barriers or in Clock"
	for _, want := range []string{"hvdrun: SIGQUIT: 6 of 6 nodes answered",
		"Barrier of group 4: worker 0 and worker 2 have waited .* for worker 1", server, worker,
		`server 1 +9 +` + late + ` +` + late + ` .* - *\n`} {
		testnet.Eventually(t, "the report has "+want, func() bool { return regexp.MustCompile(want).MatchString(j.err()) })
	}
	if text, err := os.ReadFile(dir + "/report.txt"); err != nil || !strings.Contains(j.err(), string(text)) {
		t.Errorf("got the file\n%s\nand the error %v", text, err)
	}
	before := len(j.err())
	if err := j.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if status := j.wait(); status != 0 {
		t.Errorf("hvdrun ended with status %d", status)
	}
	end := j.err()[before:]
	for _, want := range []string{"hvdrun: the nodes of the job, of which 6 of 6 have reported at their end", server, worker,
		"scheduler +0 ", "server 0 +9 ", "server 1 +9 ", "worker 0 +3 ", "worker 1 +3 ", "worker 2 +3 "} {
		if !regexp.MustCompile(want).MatchString(end) {
			t.Errorf("got the report\n%s\nwant %q in it", end, want)
		}
	}
	if strings.Contains(end, "Server 0 was") || strings.Contains(end, "Barrier of group") {
		t.Errorf("got the report\n%s", end)
	}
}
