package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/testnet"
	timelines "github.com/gohvd/gohvd/timeline/report"
	"github.com/gohvd/gohvd/timeline/view"
)

// herdVariable is the number of ranks that the process runs. It is empty if the process is one rank.
const herdVariable = "GOHVD_E2E_HERD"

const (
	// The training of BenchmarkView reduces small tensors in each step, in every fourth step also one with a
	// name of its own. It does so watchedOperations times, and then a rank is late watchedStalls times.
	watchedEvery      = 4
	watchedOperations = 20
	watchedStalls     = 4
	// The processes reduce as many tensors as ResNet-50 has. The ranks of one process share its few
	// processors, and reduce fewer.
	tensorsOfProcess, tensorsOfHerd = 161, 8
)

// watched is the program of BenchmarkView.
func watched(ctx context.Context) error {
	herd, err := strconv.Atoi(os.Getenv(herdVariable))
	if err != nil {
		return train(ctx, tensorsOfProcess)
	}
	const perHost = 8
	errs := make([]error, herd)
	var running sync.WaitGroup
	for r := range herd {
		running.Go(func() {
			var opts []hvd.InitOption
			host := fmt.Sprint("host", r/perHost)
			for name, value := range map[string]any{"HOROVOD_RANK": r, "HOROVOD_HOSTNAME": host,
				"HVD_HOSTID": host, "HOROVOD_LOCAL_RANK": r % perHost, "HOROVOD_LOCAL_SIZE": perHost,
				"HOROVOD_CROSS_RANK": r / perHost, "HOROVOD_CROSS_SIZE": herd / perHost} {
				opts = append(opts, hvd.WithSetting(name, fmt.Sprint(value)))
			}
			errs[r] = train(ctx, tensorsOfHerd, opts...)
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// train is a rank of the program "watched", which never ends. Rank 0 prints when a watched operation has
// ended, and when the engine has warned that a rank is late.
func train(ctx context.Context, tensors int, opts ...hvd.InitOption) error {
	e, err := hvd.New(ctx, append(opts, hvd.OnStall(func(s hvd.Stall) {
		fmt.Println("at", s.Tensor, time.Now().UnixNano())
	}))...)
	if err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(0, 0)) // all ranks compute for the same time
	gradients := make([][]float32, tensors)
	for i := range gradients {
		gradients[i] = make([]float32, 256)
	}
	for step := 1; ; step++ {
		e.MarkStep(uint64(step))
		time.Sleep(time.Duration(50+random.IntN(100)) * time.Millisecond)
		var all []*hvd.Handle[[]float32]
		for i, g := range gradients {
			h, err := hvd.AllreduceAsync(g, hvd.InPlace(), hvd.Name(fmt.Sprint("grad/", i)), hvd.On(e))
			if err != nil {
				return err
			}
			all = append(all, h)
		}
		for _, h := range all {
			if _, err := h.Wait(ctx); err != nil {
				return err
			}
		}
		if step%watchedEvery != 0 {
			continue
		}
		name := fmt.Sprint("seen/", step)
		if step > watchedEvery*watchedOperations {
			name = fmt.Sprint("late/", step)
		}
		if strings.HasPrefix(name, "late/") && e.Rank() == e.Size()-2 {
			for awaited := filepath.Join(os.Getenv(folderVariable), strconv.Itoa(step)); ; {
				if _, err := os.Stat(awaited); err == nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
		if _, err := hvd.Allreduce(ctx, []float32{1}, hvd.Name(name), hvd.On(e)); err != nil {
			return err
		}
		if strings.HasPrefix(name, "seen/") && e.Rank() == 0 {
			fmt.Println("at", name, time.Now().UnixNano())
		}
	}
}

// BenchmarkView measures for how long a page that follows a job does not show what has happened: from the end
// of an operation until the page has the report and the pictures with it, and from the warning about a stall
// until it names the tensor and the missing rank. One job has 4 processes. In the other one, which has 256
// ranks on what the ranks take for 32 hosts, all ranks are in the process of rank 0.
//
//	go test ./internal/e2e -run '^$' -bench View -benchtime 1x
func BenchmarkView(b *testing.B) {
	b.Run("processes=4", func(b *testing.B) {
		measureView(b, 4, func(flags []string, env ...string) *job {
			return startHvdrun(b, nil, flags, "watched", env...)
		})
	})
	b.Run("ranks=256", func(b *testing.B) {
		self := testnet.Self(b)
		const only = `test "$HOROVOD_RANK" = 0 && exec "$0"; exec sleep 3600`
		measureView(b, 256, func(flags []string, env ...string) *job {
			return startCommand(b, slices.Concat([]string{hvdrunPath}, flags, []string{"sh", "-c", only, self}),
				append(env, programVariable+"=watched", herdVariable+"=256")...)
		})
	})
}

func measureView(b *testing.B, ranks int, start func(flags []string, env ...string) *job) {
	folder := b.TempDir()
	j := start([]string{"-np", strconv.Itoa(ranks), "--view", "--stall-check-warning-time-seconds", "2",
		"--start-timeout", "120"}, folderVariable+"="+folder)
	p := j.page()
	states := p.newest()
	stall := regexp.MustCompile(fmt.Sprintf(`^STALLED: Rank %d has not called allreduce "(late/(\d+))", `, ranks-2))
	happened, seen := make(map[string]time.Time), make(map[string]time.Time)
	// see reports whether the page shows something for the first time.
	see := func(name string) bool {
		first := seen[name].IsZero()
		if first {
			seen[name] = time.Now()
		}
		return first
	}
	event := regexp.MustCompile(`^at ((?:seen|late)/\d+) (\d+)$`)
	shown, limit := "", time.After(jobLimit)
	for stalls := 0; stalls < watchedStalls || len(happened) < watchedOperations+watchedStalls; {
		select {
		case l, open := <-j.lines:
			if !open {
				b.Fatalf("the job ended with status %d:\n%s%s", j.wait(), j.out(), j.err())
			}
			if m := event.FindStringSubmatch(l.text); m != nil && happened[m[1]].IsZero() {
				ns, _ := strconv.ParseInt(m[2], 10, 64)
				happened[m[1]] = time.Unix(0, ns)
			}
		case s, open := <-states:
			if !open {
				b.Fatalf("the stream of states has ended; standard error:\n%s", j.err())
			}
			for _, problem := range s.Problems {
				m := stall.FindStringSubmatch(problem.Text)
				if m == nil || !slices.Contains(s.Missing, ranks-2) {
					continue
				}
				if see(m[1]) {
					stalls++
				}
				testnet.WriteFile(b, filepath.Join(folder, m[2]), "")
			}
			if s.Run == shown {
				continue
			}
			shown = s.Run
			for _, t := range p.load(s).TensorTable {
				if strings.HasPrefix(t.Name, "seen/") {
					see(t.Name)
				}
			}
		case <-limit:
			b.Fatalf("after %v the page has shown %d of %d operations and stalls; standard error:\n%s", jobLimit,
				len(seen), len(happened), j.err())
		}
	}
	j.signal(os.Interrupt)
	j.wait()
	b.ReportMetric(0, "ns/op")
	delays := make(map[string][]time.Duration)
	for name, at := range happened {
		if what, _, _ := strings.Cut(name, "/"); !seen[name].IsZero() {
			delays[what] = append(delays[what], seen[name].Sub(at))
		}
	}
	b.ReportMetric(float64(watchedOperations-len(delays["seen"])), "missed-operations")
	for what, all := range delays {
		slices.Sort(all)
		b.ReportMetric(all[len(all)/2].Seconds(), "s-median-"+what)
		b.ReportMetric(all[len(all)-1].Seconds(), "s-greatest-"+what)
	}
	load, err := os.ReadFile("/proc/loadavg")
	b.Logf("%d CPUs, load %s, %v", runtime.NumCPU(), strings.TrimSpace(string(load)), err)
}

// newest returns a channel with the newest state of the stream. As on the page, a state that comes while the
// data of an earlier one are loaded replaces one that waits.
func (p *livePage) newest() <-chan *view.State {
	states := make(chan *view.State, 1)
	go func() {
		defer close(states)
		for {
			line, err := p.lines.ReadString('\n')
			if err != nil {
				return
			}
			text, has := strings.CutPrefix(line, "data: ")
			s := new(view.State)
			if !has || json.Unmarshal([]byte(text), s) != nil {
				continue
			}
			select {
			case <-states:
			default:
			}
			states <- s
		}
	}()
	return states
}

// load loads what the page loads for a state of which it shows the whole time, and returns the report.
func (p *livePage) load(s *view.State) *timelines.Report {
	p.t.Helper()
	p.get("info?", s)
	r := p.report(s)
	for _, part := range []string{"grid?name=caused&", "grid?name=waits&", "window?",
		"tile?rows=ranks&level=1&index=0&", "tile?rows=ranks&level=1&index=1&"} {
		p.get(part, s)
	}
	return r
}
