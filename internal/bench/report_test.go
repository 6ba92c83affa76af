package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// folder has small results of two rounds, in the form of scripts/bench-peers.sh.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	rows := map[string]string{}
	add := func(peer, op string, numBytes int, us ...float64) {
		for round, v := range us {
			name := fmt.Sprintf("%s-np2-round%d.csv", strings.Split(peer, "@")[0], round+1)
			rows[name] += fmt.Sprintf("%s,%s,2,%d,20,%.3f,1.0,1.0,1.0\n", strings.TrimPrefix(peer[strings.Index(peer, "@")+1:], "@"), op, numBytes, v)
		}
	}
	add("ours@ours", "allreduce", 1024, 2, 3)
	add("ours@ours-arena-raw", "allreduce", 1024, 1, 1)
	add("ompi", "allreduce", 1024, 4, 10)
	add("ompi-spin", "allreduce", 1024, 5, 2)
	add("mpich", "allreduce", 1024, 40, 100)
	add("gloo@gloo-ring", "allreduce", 1024, 0.5, 0.25) // not what the ratios are about
	add("gloo@gloo-hd", "allreduce", 1024, 0.125, 8)
	add("ours@ours", "resnet50_async", 102228128, 10000, 10000)
	add("ompi", "resnet50_pertensor", 102228128, 40000, 20000)
	add("ompi", "resnet50_async", 102228128, 80000, 80000)
	add("gloo@gloo-ring", "resnet50_pertensor", 102228128, 30000, 50000)
	add("ours@ours", "barrier", 0, 1.5) // in the first round alone
	add("ompi", "barrier", 0, 1, 1)
	rows["mpich-np2-round2.csv"] += "# FAILED,mpich,2,status 124\n"
	rows["about.txt"] = "Machine: a test\n"
	rows["commands.txt"] = "make bench-peers\n"
	rows["limits.csv"] = "memcpy,64KiB,median=1,best=1,worst=1,GB/s\n"
	for name, text := range rows {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReport(t *testing.T) {
	chart := filepath.Join(t.TempDir(), "chart.svg")
	page, err := Report(folder(t), chart)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "report.md", string(page))
	for _, want := range []string{
		// Round 1: 2 and 1 of ompi's 4. Round 2: 3 and 1 of ompi-spin's 2.
		"| allreduce 1 KiB | 3.00 ompi | **1.00** (0.50–1.50) | **0.38** (0.25–0.50) |",
		// In each round against the best of all others in any mode: 30 ms of gloo, then 20 of ompi.
		"| resnet50 async | 25.0 ompi | **0.42** (0.33–0.50) | – |",
		"| barrier | 1.00 ompi | **1.50** (1.50–1.50) of 1 | – |",
		"- round 2: mpich,2,status 124",
		"- Machine: a test",
		"![bus bandwidth of allreduce](chart.svg)",
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	svg, err := os.ReadFile(chart)
	if err != nil {
		t.Fatal(err)
	}
	if count, _, texts := elements(t, svg); count["polyline"] != 6 { // gloo's algorithms are one
		t.Errorf("%d series, want 6: %v", count["polyline"], texts)
	}
}

func TestReportOfNothing(t *testing.T) {
	if _, err := Report(t.TempDir(), ""); err == nil || !strings.Contains(err.Error(), "no results") {
		t.Errorf("got error %v", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ompi-np2-round1.csv"), []byte("ompi,allreduce\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Report(dir, ""); err == nil || !strings.Contains(err.Error(), "ompi-np2-round1.csv, line 1") {
		t.Errorf("got error %v, want one that names file and line", err)
	}
}

func FuzzReadPoints(f *testing.F) {
	f.Add(harnessColumns + "\nours,allreduce,2,4,10,6.5,6,1,1\n")
	f.Add(strings.Join(csvColumns, ",") + "\n# comment\n\n\"\n")
	f.Fuzz(func(t *testing.T, text string) {
		points, err := readPoints("x.csv", strings.NewReader(text))
		if err == nil && len(points) > strings.Count(text, "\n")+1 {
			t.Errorf("%d points in %q", len(points), text)
		}
	})
}
