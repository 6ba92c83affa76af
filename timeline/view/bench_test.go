package view

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/report"
)

// benchJobs are the jobs that the benchmarks read.
var benchJobs = map[string]testJob{
	"4 ranks, 2 million events": {ranks: 4, tensors: 161, steps: 240, compute: 20000, late: 2,
		lateBy: 5000},
	"256 ranks, 161 tensors, 12 steps": {ranks: 256, hosts: 32, tensors: 161, steps: 12, compute: 100000,
		late: 137, lateBy: 20000},
}

// BenchmarkRead measures the time, the processor time and the memory that it takes to read timelines: first
// to survey the files, and then to read them. Both are before the first picture.
func BenchmarkRead(b *testing.B) {
	for name, j := range benchJobs {
		b.Run(name, func(b *testing.B) {
			dir := j.write(b, b.TempDir())
			for b.Loop() {
				// This sets the peak of the memory to what the process has now.
				if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
					b.Fatal(err)
				}
				begun := processorTime()
				job, bad, err := report.Open([]string{dir})
				if err != nil || bad != nil {
					b.Fatal(err, bad)
				}
				opened := processorTime()
				if _, err := Read(job, report.Options{CacheCapacity: 1024}, dir); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric((opened - begun).Seconds(), "cpu-s-survey")
				b.ReportMetric((processorTime() - opened).Seconds(), "cpu-s-read")
				b.ReportMetric(peakMemory(b), "MiB-peak")
			}
			machine(b)
		})
	}
}

// peakMemory returns the most memory that this process has had, in MiB.
func peakMemory(b *testing.B) float64 {
	text := testnet.ReadFile(b, "/proc/self/status")
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	var kib float64
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		b.Fatal(err)
	}
	return kib / 1024
}

// machine prints the number of processors and the load.
func machine(b *testing.B) {
	load, err := os.ReadFile("/proc/loadavg")
	b.Logf("%d CPUs, load %s, %v", runtime.NumCPU(), strings.TrimSpace(string(load)), err)
}

// BenchmarkAnalysis measures the analysis of a running job of which minLiveBytes are known. In each step, the
// ranks reduce 8 tensors as one operation, which they submit at random times. Of many ranks, the operations
// of 8 are known, and the arrivals of all requests at rank 0.
func BenchmarkAnalysis(b *testing.B) {
	for _, ranks := range []int{4, 64, 256} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			random, at := rand.New(rand.NewPCG(1, 2)), time.Second
			all := make([]*live.Records, min(ranks, 8))
			for r := range all {
				all[r] = &live.Records{Rank: r, Size: ranks, Epoch: 1, Clock: trace.Clock{Domain: "d"}}
			}
			for bytes, number := 0, uint64(1); bytes < minLiveBytes; number++ {
				granted := at + 150*time.Millisecond
				arrivals := make([]time.Duration, ranks)
				for i := range arrivals {
					arrivals[i] = at + time.Duration(random.IntN(1e8))
				}
				for _, r := range all {
					o := new(trace.Operation)
					for i := range 8 {
						o.Records = append(o.Records, trace.Record{Number: number,
							Name: fmt.Sprint("grad/", i), Bytes: 1024, Kind: message.Allreduce, Cached: true,
							Submitted: arrivals[r.Rank], Granted: granted, Begun: granted,
							Ended: granted + 3000})
					}
					e := live.Entry{Operation: o}
					if r.Rank == 0 {
						e.Arrivals = arrivals
					}
					r.Entries, bytes = append(r.Entries, e), bytes+e.Size()
				}
				at = granted + 4000
			}
			for b.Loop() {
				if _, err := Read(report.OfRecords(ranks, all), report.Options{}, "a job"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFrames measures the time between frames while the timeline is zoomed and moved, the time until the
// first picture, and the memory of the server and of the scripts.
// It prints the machine and its load. Run it with
//
//	go test -run '^$' -bench Frames -benchtime 1x ./timeline/view
func BenchmarkFrames(b *testing.B) {
	for name, j := range benchJobs {
		b.Run(name, func(b *testing.B) {
			dir := j.write(b, b.TempDir())
			for b.Loop() {
				begun := time.Now()
				run := readRun(b, dir)
				p := openTab(b, serve(b, run).URL())
				p.wait(`document.documentElement.dataset.ready === "true" && drawn.frames > 0`)
				b.ReportMetric(time.Since(begun).Seconds(), "s-to-picture")
				p.measure(b)
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				b.ReportMetric(float64(m.HeapAlloc)/(1<<20), "MiB-server")
				var heap float64
				p.list("performance.memory.usedJSHeapSize", &heap)
				b.ReportMetric(heap/(1<<20), "MiB-script")
			}
			machine(b)
		})
	}
}

// measure moves the timeline by keys for some seconds and reports the times between frames.
func (p *tab) measure(b *testing.B) {
	p.text(`(() => {
		globalThis.times = [];
		let last = performance.now();
		const next = now => { times.push(now - last); last = now; requestAnimationFrame(next); };
		requestAnimationFrame(next);
		document.getElementById("timeline").focus();
		return "";
	})()`)
	for _, keys := range []string{"wwwwwwww", "dddddddddd", "aaaaaaaaaa", "ssssssss", "....", "0"} {
		p.do(chromedp.KeyEvent(keys))
		p.still()
	}
	var times []float64
	p.list("times", &times)
	slices.Sort(times)
	for name, share := range map[string]float64{"ms-median": 0.5, "ms-p99": 0.99, "ms-max": 1} {
		b.ReportMetric(times[int(share*float64(len(times)-1))], name)
	}
}
