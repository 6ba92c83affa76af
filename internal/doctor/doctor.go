// Package doctor looks at the machine that ranks are to run on and says what stands in their way.
//
// Invariants:
//
//  1. A check changes nothing on the machine, and knows it only through a System.
//  2. Run returns in time, whatever hangs.
//  3. A line is a fact (ok), a hint (warn) or what will break a job (fail). What is not fine has a fix.
package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
)

// Status is how good what a Line tells is.
type Status string

const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Line is one finding. Its keys in JSON stay as they are.
type Line struct {
	// Section is the heading that it stands under, and Name what was looked at.
	Section string `json:"section"`
	Name    string `json:"name"`
	Status  Status `json:"status"`
	// Text is what was found, printable and bounded.
	Text string `json:"text"`
	// Fix is what to do about it, empty if there is nothing to do.
	Fix string `json:"fix"`
}

// Check looks at one thing.
type Check struct {
	// Section is that of its lines, and Name that of those without one.
	Section, Name string
	// Look gives the lines. It should end with ctx. It may run beside the others.
	Look func(ctx context.Context, s *System) []Line
}

// grace is how long a check that heeds its context has after the context's end.
const grace = time.Second

// Run runs the checks side by side and gives their lines in the order of the checks. It takes no longer than limit, which is
// more than a second, and ends soon after ctx. For a check that has not ended by then there is a line that says so; its
// goroutine is left behind, for nothing can end a system call that hangs.
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
			lines = []Line{warn("", "look at what it waits for: a file system, a device or a name server",
				"it has not ended within %v", time.Since(start).Round(100*time.Millisecond))}
		}
		for _, l := range lines {
			l.Section = c.Section
			if l.Name == "" {
				l.Name = c.Name
			}
			// Texts may come from other hosts and from the environment.
			l.Name, l.Text, l.Fix = analysis.Plain(l.Name), analysis.Plain(l.Text), analysis.Plain(l.Fix)
			all = append(all, l)
		}
	}
	return all
}

// await waits for the lines of a check until the end of late.
func await(late context.Context, answer <-chan []Line) (lines []Line, ended bool) {
	select {
	case lines = <-answer:
		return lines, true
	case <-late.Done():
	}
	select { // it may have come while others were waited for
	case lines = <-answer:
		return lines, true
	default:
		return nil, false
	}
}

func ok(name, format string, args ...any) Line {
	return Line{Name: name, Status: OK, Text: fmt.Sprintf(format, args...)}
}

func warn(name, fix, format string, args ...any) Line {
	return Line{Name: name, Status: Warn, Text: fmt.Sprintf(format, args...), Fix: fix}
}

func fail(name, fix, format string, args ...any) Line {
	return Line{Name: name, Status: Fail, Text: fmt.Sprintf(format, args...), Fix: fix}
}

// Checks returns all there are, in the order of their sections.
func Checks() []Check {
	return []Check{
		{"build", "build", built},
		{"found at run time", "libraries", libraries},
		{"found at run time", "nvidia", nvidia},
		{"found at run time", "mpirun", mpirun},
		{"python", "python", python},
		{"processor", "simd", simd},
		{"processor", "cores", cores},
		{"processor", "quota", quota},
		{"memory", "memory", memory},
		{"memory", "cgroup", memoryLimit},
		{"memory", "/dev/shm", devShm},
		{"memory", "memfd", memfdWorks},
		{"limits", "file size", fileSize},
		{"limits", "locked memory", lockedMemory},
		{"limits", "open files", openFiles},
		{"network", "interfaces", interfaces},
		{"network", "host name", hostName},
		{"clock", "clock", clock},
		{"hosts", "agent", agent},
		{"hosts", "hosts", hosts},
		{"launch environment", "launcher", launcher},
		{"launch environment", "variables", variables},
	}
}
