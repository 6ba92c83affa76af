package doctor

import (
	"context"
	"time"

	"github.com/gohvd/gohvd/internal/logs"
)

// Check is a check of one subject.
type Check struct {
	// Section is the section of all lines that the check returns. Name is assigned to the lines that the
	// check returns without a name.
	Section, Name string
	// Look returns the lines. It should return soon after ctx ends. It may run concurrently with other
	// checks.
	Look func(ctx context.Context, s *System) []Line
}

// grace is how long a check may take to return after its context has ended.
const grace = time.Second

// Run runs the checks concurrently and returns their lines in the order of the checks. It returns within
// limit, which must be more than a second. If ctx ends, it returns soon after that. If a check has not
// returned by then, Run adds a line that says so. The goroutine of that check remains, because a system call
// that hangs cannot be ended.
func Run(ctx context.Context, s *System, checks []Check, limit time.Duration) []Line {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit-grace)
	defer cancel()
	late, stop := context.WithCancel(context.Background())
	defer stop()
	context.AfterFunc(ctx, func() { time.AfterFunc(grace, stop) })
	answers := make([]chan []Line, len(checks))
	for i, c := range checks {
		answers[i] = make(chan []Line, 1)
		go func() { answers[i] <- c.Look(ctx, s) }()
	}

	var all []Line
	for i, c := range checks {
		lines, ended := await(late, answers[i])
		if !ended {
			lines = []Line{warn("",
				"find out why it hangs: a file system, a device or a name server may not respond",
				"the check has not ended within %v", time.Since(start).Round(100*time.Millisecond))}
		}
		for _, l := range lines {
			l.Section = c.Section
			if l.Name == "" {
				l.Name = c.Name
			}
			// The texts may come from other hosts or from the environment, so they may contain control
			// characters.
			l.Name, l.Text, l.Fix = logs.Plain(l.Name), logs.Plain(l.Text), logs.Plain(l.Fix)
			all = append(all, l)
		}
	}
	return all
}

// await waits until a check has returned its lines or the context late ends. If the check has not returned by
// then, the result ended is false.
func await(late context.Context, answer <-chan []Line) (lines []Line, ended bool) {
	select {
	case lines = <-answer:
		return lines, true
	case <-late.Done():
	}
	select { // the lines may have arrived while Run waited for earlier checks
	case lines = <-answer:
		return lines, true
	default:
		return nil, false
	}
}

// Checks returns all checks. Checks of the same section follow each other.
func Checks() []Check {
	return []Check{
		{"build", "build", built},
		{"found at run time", "nvidia", nvidia},
		{"found at run time", "nccl", nccl},
		{"python", "python", python},
		{"processor", "simd", simd},
		{"processor", "cores", cores},
		{"processor", "topology", topology},
		{"processor", "quota", quota},
		{"memory", "memory", memory},
		{"memory", "cgroup", memoryLimit},
		{"memory", "/dev/shm", devShm},
		{"memory", "memfd", memfdWorks},
		{"limits", "file size", fileSize},
		{"limits", "locked memory", lockedMemory},
		{"limits", "open files", openFiles},
		{"limits", "ranks", ranks},
		{"network", "interfaces", interfaces},
		{"network", "host name", hostName},
		{"clock", "clock", clock},
		{"hosts", "agent", agent},
		{"hosts", "hosts", hosts},
		{"launch environment", "launcher", launcher},
		{"launch environment", "variables", variables},
	}
}
