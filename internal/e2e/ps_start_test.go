package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/ps"
)

const (
	// lateVariable has the name of a node, such as worker 1, that does not call Start before the file exists
	// that openVariable names.
	lateVariable = "GOHVD_E2E_LATE"
	openVariable = "GOHVD_E2E_OPEN"
	// silenceTime is the heartbeat timeout in tests in which a node is stopped.
	silenceTime = 3 * time.Second
)

// nodeName returns the name that this node will have.
func nodeName() string {
	if role := os.Getenv("DMLC_ROLE"); role != "scheduler" {
		return role + " " + os.Getenv("DMLC_RANK")
	}
	return "scheduler"
}

// starting is a node like returning. It prints which steps of Start it has passed: "up", "registered",
// "connected" and "started".
func starting(ctx context.Context) error {
	fmt.Println("pid", os.Getpid())
	fmt.Println("up")
	if nodeName() == os.Getenv(lateVariable) {
		for {
			if _, err := os.Stat(os.Getenv(openVariable)); err == nil {
				break
			}
			<-time.After(5 * time.Millisecond)
		}
	}
	steps := map[string]string{"ps: registered, waiting until all nodes have registered": "registered",
		"ps: connected": "connected"}
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()),
		zapcore.AddSync(io.Discard), zap.InfoLevel)
	log := zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
		if step := steps[e.Message]; step != "" {
			fmt.Println(step)
		}
		return nil
	}))
	node, err := ps.Join(ctx, ps.Config{Logger: logs.ToSlog(log), Settings: map[string]string{"PS_VERBOSE": "1"}})
	if err != nil {
		return err
	}
	fmt.Println("started", node.IsRecovery())
	if node.Role() == ps.Server {
		_, err = ps.NewKVServer(node, ps.Sum[float64]())
	}
	if err == nil && node.Role() == ps.Worker {
		err = returningRounds(ctx, node)
	}
	return finalize(ctx, node, err)
}

// startingJob is a job of nodes with the program starting.
type startingJob struct {
	*job
	open    string         // the file for which the late node waits
	pids    map[string]int // of the newest processes
	steps   map[string][]string
	killed  map[string]bool // nodes whose new processes have printed nothing yet
	errors  []line          // the errors that nodes have printed
	started time.Time
}

// startStarting starts a job. late is the name of the late node, or "".
func startStarting(t *testing.T, late string, restarts int, env ...string) *startingJob {
	t.Helper()
	flags := []string{"--servers", strconv.Itoa(servers), "--workers", strconv.Itoa(workers)}
	if restarts > 0 {
		flags = append(flags, "--restarts", strconv.Itoa(restarts))
	}
	s := &startingJob{open: filepath.Join(t.TempDir(), "open"), pids: make(map[string]int),
		steps: make(map[string][]string), killed: make(map[string]bool), started: time.Now()}
	s.job = startHvdrun(t, nil, flags, "starting", append(env, lateVariable+"="+late, openVariable+"="+s.open,
		fmt.Sprint("PS_HEARTBEAT_TIMEOUT=", silenceTime.Seconds()))...)
	return s
}

// follow records what a line says.
func (s *startingJob) follow(l line) {
	if text, ok := strings.CutPrefix(l.text, "pid "); ok {
		s.pids[l.node], _ = strconv.Atoi(text)
		s.steps[l.node] = nil
		delete(s.killed, l.node)
		return
	}
	if s.killed[l.node] {
		return
	}
	if strings.HasPrefix(l.text, "error ") {
		s.errors = append(s.errors, l)
	}
	step, _, _ := strings.Cut(l.text, " ")
	s.steps[l.node] = append(s.steps[l.node], step)
}

// await waits until the newest processes of the nodes have passed a step of Start.
func (s *startingJob) await(step string, nodes ...string) {
	s.t.Helper()
	s.until(fmt.Sprint(nodes, " had passed the step ", step), func(l line) bool {
		s.follow(l)
		return !slices.ContainsFunc(nodes, func(n string) bool { return !slices.Contains(s.steps[n], step) })
	})
}

// hit sends a signal to a node.
func (s *startingJob) hit(node string, sig syscall.Signal) {
	s.t.Helper()
	s.t.Logf("%v: %v to %s", time.Since(s.started).Round(time.Millisecond), sig, node)
	send(s.t, s.pids[node], sig)
	delete(s.steps, node)
	s.killed[node] = true
}

// release lets the late node start.
func (s *startingJob) release() {
	s.t.Helper()
	testnet.WriteFile(s.t, s.open, "")
}

// ended waits for the end of the job, which must have failed because of the given node, with the given
// status. It tells how long after the time hit the first and the last error of a node came.
func (s *startingJob) ended(culprit string, status int, hit time.Time) {
	s.t.Helper()
	for l := range s.lines {
		s.follow(l)
	}
	got := s.wait()
	cause := regexp.MustCompile(`Root cause .*\n  (.*?): `).FindStringSubmatch(s.err())
	if cause == nil || cause[1] != culprit || got != status {
		s.t.Errorf("hvdrun ended with status %d, and names %q, want %d and %s; standard error:\n%s", got, cause,
			status, culprit, s.err())
		return
	}
	var times []string
	for _, l := range s.errors {
		if l.at.After(hit) {
			times = append(times, fmt.Sprint(l.node, " ", l.at.Sub(hit).Round(10*time.Millisecond)))
		}
	}
	s.t.Logf("took %v; errors: %s", time.Since(hit).Round(10*time.Millisecond), strings.Join(times, ", "))
}

// goesOn waits until both workers make rounds, and then ends the job.
func (s *startingJob) goesOn() {
	s.t.Helper()
	for _, worker := range []string{"worker 0", "worker 1"} {
		s.steps[worker] = slices.DeleteFunc(s.steps[worker], func(step string) bool { return step == "round" })
	}
	s.await("round", "worker 0", "worker 1")
	s.signal(os.Interrupt)
	if status := s.wait(); status != 128+int(syscall.SIGINT) {
		s.t.Errorf("hvdrun ended with status %d, want %d:\n%s", status, 128+int(syscall.SIGINT), s.err())
	}
	if strings.Contains(s.out(), "wrong") {
		s.t.Error("a worker has got wrong values")
	}
}

// repeat runs a test n times, or as often as the flag -whole says, each time with another source of random
// numbers.
func repeat(t *testing.T, n int, test func(t *testing.T, random *rand.Rand)) {
	random := draws(t)
	if *whole > 0 {
		n = *whole
	}
	for i := range n {
		seed := random.Uint64()
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			test(t, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

// others returns the names of the other nodes.
func others(names ...string) (all []string) {
	for _, n := range []string{"scheduler", "server 0", "server 1", "worker 0", "worker 1"} {
		if !slices.Contains(names, n) {
			all = append(all, n)
		}
	}
	return all
}

// A node hangs before it calls Start, or while it waits for a node that has not registered yet. The others
// fail at the time limit of Start, or when they notice the silence of the scheduler, and hvdrun names the
// node.
func TestNodeHangsInStart(t *testing.T) {
	random := draws(t)
	type hang struct{ victim, step string }
	var hangs []hang
	for _, victim := range others() {
		hangs = append(hangs, hang{victim, "up"}, hang{victim, "registered"})
	}
	for _, h := range sample(random, hangs, 3) {
		t.Run(h.victim+" "+h.step, func(t *testing.T) {
			t.Parallel()
			late := h.victim
			if h.step == "registered" {
				late = "worker 1"
				if h.victim == late {
					late = "server 1"
				}
			}
			s := startStarting(t, late, 0, "HOROVOD_GLOO_TIMEOUT_SECONDS=6")
			waiting := others(late, "scheduler")
			if h.step == "registered" {
				s.await("registered", waiting...)
			} else {
				s.await("up", others()...)
			}
			s.hit(h.victim, syscall.SIGSTOP)
			hit := time.Now()
			if h.step == "registered" && h.victim != "scheduler" {
				// The late node registers when the scheduler has noticed that the victim hangs.
				<-time.After(silenceTime + time.Second)
				s.release()
			}
			s.ended(h.victim, 128+int(syscall.SIGKILL), hit)
		})
	}
}

// A node is killed while the others register. hvdrun names it.
func TestNodeDiesInStart(t *testing.T) {
	random := draws(t)
	for _, victim := range sample(random, others("worker 1"), 2) {
		t.Run(victim, func(t *testing.T) {
			t.Parallel()
			s := startStarting(t, "worker 1", 0)
			s.await("registered", others("worker 1", "scheduler")...)
			s.hit(victim, syscall.SIGKILL)
			s.ended(victim, 128+int(syscall.SIGKILL), time.Now())
		})
	}
}

// With --restarts, nodes are killed at random times while all start, and one may hang. Their new processes
// take part from the beginning, and the job goes on. If the scheduler is killed, the job ends, and hvdrun
// names it.
func TestRestartsInStart(t *testing.T) {
	repeat(t, 2, restartInStart)
}

func restartInStart(t *testing.T, random *rand.Rand) {
	s := startStarting(t, "worker 1", 9)
	s.await("registered", others("worker 1", "scheduler")...)
	s.hit("server 1", []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP}[random.IntN(2)])
	s.await("registered", "server 1")
	s.release()
	victims := []string{"server 0", "server 1", "worker 0", "worker 1"}
	for range 3 {
		<-time.After(time.Duration(random.Int64N(int64(60 * time.Millisecond))))
		victim := victims[random.IntN(len(victims))]
		s.await("up", victim)
		s.hit(victim, syscall.SIGKILL)
	}
	s.await("started", others()...)
	if random.IntN(2) == 0 {
		s.hit("scheduler", syscall.SIGKILL)
		s.ended("scheduler", 128+int(syscall.SIGKILL), time.Now())
		return
	}
	s.goesOn()
}

// With --restarts, the scheduler is stopped. The job ends as without restarts, and no node is started in
// vain.
func TestSchedulerHangs(t *testing.T) { repeat(t, 1, schedulerHangs) }

func schedulerHangs(t *testing.T, _ *rand.Rand) {
	s := startStarting(t, "", 5)
	s.await("round", "worker 0", "worker 1")
	s.hit("scheduler", syscall.SIGSTOP)
	s.ended("scheduler", 128+int(syscall.SIGKILL), time.Now())
	if strings.Contains(s.err(), "restarts of nodes") {
		t.Errorf("nodes were started again:\n%s", s.err())
	}
	if !strings.Contains(s.err(), "hvdrun: scheduler: scheduler is gone: no message came from it for ") {
		t.Errorf("hvdrun does not say at once why the job fails:\n%s", s.err())
	}
}

// With --restarts, a server is stopped, and a worker that was killed returns meanwhile. hvdrun kills the
// server when the others have found out that it hangs, and starts it again. The job goes on.
func TestServerHangs(t *testing.T) { repeat(t, 1, serverHangs) }

func serverHangs(t *testing.T, _ *rand.Rand) {
	s := startStarting(t, "", 5)
	s.await("round", "worker 0", "worker 1")
	s.hit("server 1", syscall.SIGSTOP)
	s.hit("worker 0", syscall.SIGKILL)
	began := time.Now()
	s.await("started", "server 1", "worker 0")
	t.Logf("the server and the worker were back after %v", time.Since(began).Round(10*time.Millisecond))
	s.goesOn()
	testnet.WantText(t, s.err(), "hvdrun: server 1: server 1 is gone: no message came from it for ",
		"hvdrun: server 1: killed by SIGKILL from hvdrun; starting it again")
	if strings.Contains(s.err(), "scheduler is gone") {
		t.Errorf("a node says that the scheduler is gone:\n%s", s.err())
	}
}
