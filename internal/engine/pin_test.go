package engine_test

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"testing"

	"github.com/gohvd/gohvd/internal/engine"
)

// If Config.Cores is set, the threads of the loop and of the lane of each rank may run only on these
// processors.
func TestKeepsToItsProcessors(t *testing.T) {
	if runtime.NumCPU() == 1 {
		t.Skip("on one processor all threads keep to it")
	}
	const ranks = 2
	c := start(t, ranks, func(cfg *engine.Config) { cfg.Cores = []int{0} })
	c.each(func(r int) {
		c.succeeds(c.allreduce(r, "x", make([]byte, 8<<20)))
	})
	// There may be more such threads than expected, because some threads of an earlier run may not have ended
	// yet.
	if got, want := threadsOn(t, "0"), 2*ranks; got < want {
		t.Errorf("%d threads keep to processor 0, want %d", got, want)
	}
	c.shutdown()
}

// threadsOn returns the number of threads of this process that may run only on the given processors.
func threadsOn(t *testing.T, processors string) int {
	t.Helper()
	allowed := regexp.MustCompile(`(?m)^Cpus_allowed_list:\t` + regexp.QuoteMeta(processors) + `$`)
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, task := range tasks {
		status, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		if allowed.Match(status) {
			n++
		}
	}
	return n
}
