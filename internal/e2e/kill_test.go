package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

const (
	ranks = 4
	// survivorsDeadline limits the time from a death until all pending calls of the survivors have failed.
	survivorsDeadline = 20 * time.Second
)

// One of four ranks is killed while all ranks execute or negotiate. Within survivorsDeadline every other rank
// gets an error that names the victim. hvdrun's report names it too, and hvdrun exits with the victim's
// status.
func TestKill(t *testing.T) {
	type death struct {
		program, memory, negotiation string
		victim                       int
		after                        time.Duration // random, to kill at any point of an operation
	}
	random := draws(t)
	var deaths []death
	for _, program := range []string{"large", "arena", "small", "waiting", "mixed", "groups", "joined",
		"messages"} {
		for _, memory := range []string{"shm", "tcp"} {
			if program == "arena" && memory == "tcp" {
				continue // over TCP, the programs "arena" and "large" do the same
			}
			for _, negotiation := range []string{"event", "lockstep"} {
				for victim := range ranks {
					deaths = append(deaths, death{program, memory, negotiation, victim,
						time.Duration(random.IntN(50)) * time.Millisecond})
				}
			}
		}
	}
	for _, d := range sample(random, deaths, 8) {
		t.Run(fmt.Sprintf("%s/%s/%s/%d", d.program, d.memory, d.negotiation, d.victim), func(t *testing.T) {
			t.Parallel()
			kill(t, d.program, d.victim, d.after, "HVD_NEGOTIATION="+d.negotiation, "HOROVOD_CPU_OPERATIONS="+
				d.memory)
		})
	}
}

// A rank is killed while the ranks send each other messages.
func TestKillDuringMessages(t *testing.T) { kill(t, "messages", 2, 5*time.Millisecond) }

// A rank is killed while the ranks add, use and remove overlapping process sets by themselves.
func TestKillDuringGroups(t *testing.T) { kill(t, "groups", 1, 20*time.Millisecond) }

// Many ranks share the memory of a host, and one is killed. The lowest rank tells the others that it has
// gone.
func TestKillOneOfMany(t *testing.T) {
	n := *many
	victim := []int{1, n / 2, n - 1}[draws(t).IntN(3)]
	j := start(t, n, "small", fmt.Sprint("HOROVOD_GLOO_TIMEOUT_SECONDS=", jobLimit.Seconds()))
	j.killed(j.ready(n), victim)
}

// kill runs a job of four ranks and kills the victim some time after all ranks are ready (see killed).
func kill(t *testing.T, program string, victim int, after time.Duration, env ...string) {
	j := start(t, ranks, program, env...)
	pids := j.ready(ranks)
	<-time.After(after)
	j.killed(pids, victim)
}

// In a job on three simulated hosts, in which leaders pass on the control frames of their hosts, a rank is
// killed, or is stopped forever: rank 0, a rank on its host, a leader, or a rank behind a leader. With two
// levels of leaders, the leader behind a leader and the rank behind both are killed too. Every other rank
// gets an error that names the victim.
func TestFailuresWithLeaders(t *testing.T) {
	const (
		// With a limit of 3 s, a busy machine can make another rank silent for too long.
		liveness = 8 * time.Second

		// Ranks 0 to 2 are on the first host. Rank 3 leads rank 4, and rank 5 rank 6. With two levels, rank 3
		// also leads rank 5.
		size  = 7
		setup = `h=h$((HOROVOD_RANK * 3 / 7)); unset HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE ` +
			`HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE; HOROVOD_HOSTNAME=$h HVD_HOSTID=$h exec "$0"`
	)
	self := testnet.Self(t)
	type fault struct {
		signal  syscall.Signal
		program string
		victim  int
		levels  int
	}
	random := draws(t)
	var faults []fault
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		for _, program := range []string{"small", "waiting", "mixed", "groups", "joined", "messages"} {
			for _, victim := range []int{0, 1, 3, 4} {
				faults = append(faults, fault{signal, program, victim, 1 + random.IntN(2)})
			}
			if signal == syscall.SIGKILL {
				faults = append(faults, fault{signal, program, 5, 2}, fault{signal, program, 6, 2})
			}
		}
	}
	for _, f := range sample(random, faults, 5) {
		t.Run(fmt.Sprintf("%v/%s/%d/%d", f.signal, f.program, f.victim, f.levels), func(t *testing.T) {
			t.Parallel()
			levels, leaderOf5 := "", 5
			if f.levels == 2 {
				levels, leaderOf5 = "1", 3
			}
			j := startCommand(t, []string{hvdrunPath, "-np", strconv.Itoa(size), "sh", "-c", setup, self},
				programVariable+"="+f.program, withLeaders, levelsVariable+"="+levels,
				"HOROVOD_LOG_LEVEL=debug", fmt.Sprint("HVD_LIVENESS_SECONDS=", liveness.Seconds()))
			pids := j.ready(size)
			for rank, leader := range []int{0, 1, 2, 3, 3, leaderOf5, 5} {
				if !regexp.MustCompile(fmt.Sprintf(`leaders pass on control frames.*"rank": ?%d,.*"leader": ?%d\b`,
					rank, leader)).MatchString(j.err()) {
					t.Errorf("rank %d does not say that its leader is rank %d", rank, leader)
				}
			}
			if f.signal == syscall.SIGKILL {
				j.killed(pids, f.victim)
				return
			}
			send(t, pids[f.victim], f.signal)
			text := "silent for 8s"
			if f.victim == 3 {
				// The ranks behind it may notice it and end before the others do. Then these blame it because
				// the frames of the ended ranks came through it.
				text = ""
			}
			j.named(f.victim, size-1, text, time.Now(), liveness+survivorsDeadline)
			send(t, pids[f.victim], syscall.SIGKILL)
			j.ended(f.victim)
		})
	}
}

// killed kills the victim. It checks the errors of the survivors and the report and exit status of hvdrun.
func (j *job) killed(pids []int, victim int) {
	j.t.Helper()
	send(j.t, pids[victim], syscall.SIGKILL)
	j.named(victim, len(pids)-1, "", time.Now(), survivorsDeadline)
	j.ended(victim)
}

// ended waits until hvdrun has ended. The victim must be the root cause, and SIGKILL must have ended it.
func (j *job) ended(victim int) {
	j.t.Helper()
	if status := j.wait(); status != 128+int(syscall.SIGKILL) {
		j.t.Errorf("hvdrun ended with status %d, want %d", status, 128+int(syscall.SIGKILL))
	}
	_, cause, _ := strings.Cut(j.err(), "Root cause")
	if cause, _, _ = strings.Cut(cause, "Other ranks"); !strings.Contains(cause,
		fmt.Sprintf("\n  rank %d: killed by SIGKILL", victim)) || strings.Count(cause, "\n  rank ") != 1 {
		j.t.Errorf("hvdrun gives as the cause: %s", cause)
	}
	if j.t.Failed() {
		j.t.Logf("hvdrun said:\n%s", j.err())
	}
}

// named waits until the given number of survivors have printed their errors. Each of these errors must say
// that the victim has failed, must contain the given text, and must come within limit after the time began.
// named returns the time until the last error.
func (j *job) named(victim, survivors int, text string, began time.Time,
	limit time.Duration) (took time.Duration) {
	j.t.Helper()
	j.until("all survivors had reported", func(l line) bool {
		got, ok := strings.CutPrefix(l.text, "error ")
		if !ok {
			return false
		}
		survivors--
		if !strings.Contains(got, fmt.Sprintf(": rank %d failed:", victim)) || !strings.Contains(got, text) {
			j.t.Errorf("rank %d does not say that rank %d failed: %q: %s", l.rank, victim, text, got)
		}
		if took = l.at.Sub(began); took > limit {
			j.t.Errorf("rank %d took %v", l.rank, took)
		}
		return survivors == 0
	})
	return took
}

// All processes of a job are stopped and continue later, as when a scheduler suspends the job. The job goes
// on. In the second case, only one rank is stopped, for longer than the liveness limit. All ranks, including
// the stopped one, get an error that names it.
func TestStoppedProcesses(t *testing.T) {
	for _, victims := range [][]int{{0, 1, 2}, {1}} {
		t.Run(fmt.Sprint(victims), func(t *testing.T) {
			t.Parallel()
			stop := filepath.Join(t.TempDir(), "stop")
			j := start(t, 3, "steady", stopVariable+"="+stop, "HVD_LIVENESS_SECONDS=3")
			pids := j.ready(3)
			signal := func(s syscall.Signal) {
				for _, r := range victims {
					send(t, pids[r], s)
				}
			}
			signal(syscall.SIGSTOP)
			<-time.After(5 * time.Second)
			signal(syscall.SIGCONT)
			testnet.WriteFile(t, stop, "")
			status := j.wait()
			if len(victims) == 3 {
				if status != 0 || strings.Count(j.out(), ">:rounds ") != 3 {
					t.Errorf("the job ended with status %d:\n%s\n%s", status, j.out(), j.err())
				}
				return
			}
			if status != 1 || strings.Count(j.out(), ": rank 1 failed: silent for 3s") != 3 {
				t.Errorf("the job ended with status %d:\n%s\n%s", status, j.out(), j.err())
			}
		})
	}
}

// BenchmarkIdle measures the total processor time of four initialised ranks without work, in percent of one
// processor.
func BenchmarkIdle(b *testing.B) {
	const period = 10 * time.Second
	for b.Loop() {
		j := start(b, ranks, "idle")
		var pids []int
		j.until("all ranks were up", func(l line) bool {
			if text, ok := strings.CutPrefix(l.text, "pid "); ok {
				pid, _ := strconv.Atoi(text)
				pids = append(pids, pid)
			}
			return len(pids) == ranks
		})
		before := processorTime(b, pids)
		<-time.After(period)
		used := processorTime(b, pids) - before
		b.ReportMetric(100*used.Seconds()/period.Seconds(), "%cpu")
		j.signal(os.Interrupt)
		j.wait()
	}
}

// processorTime returns the user and system time that the processes have used so far. It is the sum of the
// nanoseconds in the schedstat files of their threads.
func processorTime(b *testing.B, pids []int) time.Duration {
	var total time.Duration
	for _, pid := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			b.Fatal(err)
		}
		for _, task := range tasks {
			text := testnet.ReadFile(b, fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, task.Name()))
			var ns int64
			if _, err := fmt.Sscan(string(text), &ns); err != nil {
				b.Fatal(err)
			}
			total += time.Duration(ns)
		}
	}
	return total
}
