package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// A rank is stopped, or hangs, at a random point of Init. The ranks are on one host and use shared memory or
// TCP, or they are on two hosts. When the time limit of Init has passed, the errors of all other ranks name
// the victim and no other rank, and so does hvdrun.
func TestHangInInit(t *testing.T) {
	random := draws(t)
	var all []hang
	for _, how := range []string{stops, hangs} {
		for _, by := range []string{"shm", "tcp", "two hosts"} {
			for _, step := range initSteps[:len(initSteps)-1] {
				for _, zero := range []bool{true, false} {
					h := hang{how: how, by: by, step: step, ranks: 2 + random.IntN(3),
						delay: time.Duration(random.Int64N(int64(3 * time.Millisecond)))}
					if !zero {
						h.victim = 1 + random.IntN(h.ranks-1)
					}
					all = append(all, h)
				}
			}
		}
	}
	var mu sync.Mutex
	var longest time.Duration
	t.Run("hangs", func(t *testing.T) {
		for _, h := range sample(random, all, 4) {
			t.Run(h.String(), func(t *testing.T) {
				t.Parallel() // run in parallel, because the jobs mostly wait for the time limit
				took := h.run(t)
				mu.Lock()
				defer mu.Unlock()
				longest = max(longest, took)
			})
		}
	})
	t.Logf("the longest call of Init took %v, and the time limit was %v", longest, initTime)
	if *whole > 0 && longest > initTime+time.Second { // a sample may run on a busy machine
		t.Errorf("a call of Init took %v, want at most %v", longest, initTime+time.Second)
	}
}

// hang is a case of TestHangInInit.
type hang struct {
	how, by, step string
	ranks, victim int
	delay         time.Duration
}

func (h hang) String() string {
	return fmt.Sprintf("%s/%s/%s/rank %d of %d", h.how, h.by, h.step, h.victim, h.ranks)
}

// run runs a job in which a rank hangs, and checks what the other ranks and hvdrun say. It returns the
// longest time after which Init has failed at a rank.
func (h hang) run(t *testing.T) (longest time.Duration) {
	d := death{by: "hvdrun", memory: h.by, step: h.step, victim: h.victim, delay: h.delay}
	if h.by == "two hosts" {
		d.memory = "shm,tcp"
	}
	// The delay can be so long that Init has succeeded. Then the victim is silent for the liveness limit.
	const limit = "HOROVOD_GLOO_TIMEOUT_SECONDS="
	env := append(d.env(), fmt.Sprint("HVD_LIVENESS_SECONDS=", initTime.Seconds()), howVariable+"="+h.how,
		programVariable+"=dies", fmt.Sprint(limit, jobLimit.Seconds()))
	flags := []string{"-np", strconv.Itoa(h.ranks)}
	var enter []string
	if h.by == "two hosts" {
		hosts := testnet.NewHosts(t, 2)
		enter = on(t, hosts[0])
		flags = []string{"-H", list(hosts, layout{1, h.ranks - 1}, false), "--agent", enterHost}
	}
	self := testnet.Self(t)
	// Only the ranks have the short limit, because that of hvdrun is for the start of its agents.
	j := startCommand(t, slices.Concat(enter, []string{hvdrunPath}, flags,
		[]string{"env", fmt.Sprint(limit, initTime.Seconds()), self}), env...)
	told := 0
	for l := range j.lines {
		if text, ok := strings.CutPrefix(l.text, "took "); ok {
			took, err := time.ParseDuration(text)
			if err != nil {
				t.Error(err)
			}
			longest = max(longest, took)
		}
		text, ok := strings.CutPrefix(l.text, "failed ")
		if !ok || l.rank == h.victim {
			continue
		}
		told++
		if !strings.HasPrefix(text, fmt.Sprintf("[%d] ", h.victim)) && !(strings.HasPrefix(text, "[] ") &&
			d.isMissing(text)) {
			t.Errorf("rank %d does not name rank %d: %s", l.rank, h.victim, text)
		}
	}
	if told != h.ranks-1 {
		t.Errorf("%d ranks have failed, want %d", told, h.ranks-1)
	}
	// hvdrun ends a rank that hangs with SIGTERM, and a process that is stopped with SIGKILL.
	signal := map[string]syscall.Signal{hangs: syscall.SIGTERM, stops: syscall.SIGKILL}[h.how]
	status := j.wait()
	if status != 128+int(signal) {
		t.Errorf("hvdrun ended with status %d, want %d", status, 128+int(signal))
	}
	_, cause, _ := strings.Cut(j.err(), "Root cause")
	cause, _, _ = strings.Cut(cause, "Other ranks")
	if !strings.Contains(cause, fmt.Sprintf("\n  rank %d: ", h.victim)) || strings.Count(cause, "\n  rank ") != 1 {
		t.Errorf("hvdrun gives as the cause: %s", cause)
	}
	t.Logf("%d of %d ranks failed, within %v; hvdrun: status %d, root cause%.250s", told, h.ranks,
		longest.Round(time.Millisecond), status, cause)
	tellJob(t, j)
	return longest
}
