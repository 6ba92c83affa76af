package e2e

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// In the middle of an operation, a rank is stopped forever or loses its network. All other ranks report the
// number of this rank, at the liveness limit or at the timeout of the operation, whichever is earlier.
func TestFaults(t *testing.T) {
	for _, negotiation := range []string{"event", "lockstep"} {
		for name, fault := range map[string]func(t *testing.T, rng *rand.Rand, negotiation string){
			"stopped": func(t *testing.T, rng *rand.Rand, negotiation string) {
				// With a limit of 3 s, a busy machine can make another rank silent for too long.
				stopped(t, rng, drawProgram(rng), 8*time.Second, "failed: silent", "HVD_NEGOTIATION="+
					negotiation, "HVD_LIVENESS_SECONDS=8")
			},
			"timeout": func(t *testing.T, rng *rand.Rand, negotiation string) {
				// The program "large" cannot be used here. On a busy machine one of its operations may take 5
				// s, and 5 s is the timeout of an operation in this test.
				program := []string{"small", "steady"}[rng.IntN(2)]
				stopped(t, rng, program, 5*time.Second, "timed out after 5s", "HVD_NEGOTIATION="+negotiation,
					"HVD_OPERATION_TIMEOUT_SECONDS=5", "HVD_LIVENESS_SECONDS=60")
			},
			"cut": func(t *testing.T, rng *rand.Rand, negotiation string) {
				c := linkDown{drawProgram(rng), evenly(2, 1+rng.IntN(2)), rng.IntN(2), rng.IntN(2) == 0,
					negotiation, drawLeaders(rng)}
				t.Log(c.String())
				c.run(t)
			},
		} {
			t.Run(name+"/"+negotiation, func(t *testing.T) {
				t.Parallel()
				for range max(1, *whole) {
					if fault(t, draws(t), negotiation); t.Failed() {
						return
					}
				}
			})
		}
	}
}

// drawProgram returns the name of a program, chosen at random from the list.
func drawProgram(rng *rand.Rand) string {
	return []string{"large", "small", "steady"}[rng.IntN(3)]
}

// stopped stops a random rank forever. Soon after the limit, every other rank must print an error that names
// this rank and contains the given text.
func stopped(t *testing.T, rng *rand.Rand, what string, limit time.Duration, text string, env ...string) {
	const grace = 30 * time.Second // if it takes longer, the job hangs
	n, memory := 2+rng.IntN(3), []string{"shm", "tcp"}[rng.IntN(2)]
	victim := rng.IntN(n)
	t.Logf("rank %d of %d, %s over %s", victim, n, what, memory)
	j := start(t, n, what, append(env, "HOROVOD_CPU_OPERATIONS="+memory, staysVariable+"=1")...)
	pids := j.ready(n)
	<-time.After(time.Duration(rng.IntN(50)) * time.Millisecond) // waits until a random point of an operation
	send(t, pids[victim], syscall.SIGSTOP)
	j.named(victim, n-1, text, time.Now(), limit+grace)
	j.signal(syscall.SIGTERM)
	if status := j.wait(); status == 0 {
		t.Error("hvdrun ended with status 0")
	}
}
