package e2e

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// While the ranks of several hosts run operations on two levels, a rank is killed, a rank is stopped forever,
// or a host loses its link. In some of the jobs, leaders pass on the control frames of hosts. All other ranks
// end with errors that name the right ranks: soon after a death, and at the liveness limit in the other
// cases. With -whole, there are so many rounds of each.
func TestFailuresOnTwoLevels(t *testing.T) {
	for _, c := range []struct {
		name   string
		rounds int
		fault  func(t *testing.T, rng *rand.Rand) time.Duration
	}{
		{"kill", 5, killOnHosts}, {"stop", 1, stopOnHosts}, {"cut", 1, cutHosts},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rounds := c.rounds
			if *whole > 0 {
				rounds = *whole
			}
			random := draws(t)
			var longest time.Duration
			for round := range rounds {
				took := c.fault(t, random)
				if longest = max(longest, took); t.Failed() {
					t.Fatalf("round %d failed", round)
				}
			}
			t.Logf("%d rounds; all survivors had reported within %v", rounds, longest.Round(time.Millisecond))
		})
	}
}

// drawLayout returns a layout with several ranks on one of the hosts at least, chosen at random from a list.
func drawLayout(rng *rand.Rand) layout {
	return []layout{{2, 2}, {2, 1}, {1, 2}, {3, 1}, {2, 2, 2}}[rng.IntN(5)]
}

// drawLoop returns the name of a program that runs operations on two levels without end, chosen at random.
func drawLoop(rng *rand.Rand) string { return []string{"large", "small", "mixed"}[rng.IntN(3)] }

// killOnHosts kills a random rank. It returns the time until all other ranks have named it.
func killOnHosts(t *testing.T, rng *rand.Rand) time.Duration {
	return signalOnHosts(t, rng, syscall.SIGKILL, "", survivorsDeadline)
}

// stopOnHosts stops a random rank forever. It returns the time until all other ranks have named it.
func stopOnHosts(t *testing.T, rng *rand.Rand) time.Duration {
	return signalOnHosts(t, rng, syscall.SIGSTOP, "silent for 3s", 3*time.Second+survivorsDeadline)
}

// drawLeaders returns, at random, variables with which a job has no leaders, or one or two levels of them.
func drawLeaders(rng *rand.Rand) []string {
	return [][]string{nil, {withLeaders}, {withLeaders, levelsVariable + "=1"}}[rng.IntN(3)]
}

func signalOnHosts(t *testing.T, rng *rand.Rand, signal syscall.Signal, text string,
	limit time.Duration) time.Duration {
	l, program := drawLayout(rng), drawLoop(rng)
	victim, after := rng.IntN(l.size()), time.Duration(rng.IntN(50))*time.Millisecond
	leaders := drawLeaders(rng)
	if len(leaders) > 0 {
		// The ranks behind a leader may notice that it is stopped, and end, before the others do. Then these
		// blame it because the frames of the ended ranks came through it.
		text = ""
	}
	t.Logf("rank %d of %v, %s, after %v, %s", victim, l, program, after, leaders)
	s := startOn(t, testnet.NewHosts(t, len(l)), l, program, append([]string{"HVD_LIVENESS_SECONDS=3"}, leaders...)...)
	pids := s.ready(l.size())
	<-time.After(after) // waits until a random point of an operation
	send(t, pids[victim], signal)
	took := s.named(victim, l.size()-1, text, time.Now(), limit)
	if err := s.ranks[victim].Process.Kill(); signal == syscall.SIGSTOP && err != nil {
		t.Fatal(err)
	}
	s.end()
	s.tell()
	return took
}

// cutHosts takes the link of a random host down. It returns the time until all ranks have reported.
func cutHosts(t *testing.T, rng *rand.Rand) time.Duration {
	l := drawLayout(rng)
	c := linkDown{drawLoop(rng), l, rng.IntN(len(l)), rng.IntN(2) == 0,
		[]string{"event", "lockstep"}[rng.IntN(2)], drawLeaders(rng)}
	t.Log(c.String())
	return c.run(t)
}
