package report

import (
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
)

// stepFinder infers training steps from tensor names that occur again. A step ends by one of these rules:
//
//   - A name occurs that has occurred in the step already, and the step has at least half as many names as
//     the previous step. A name that occurs several times in each step, as with micro-batches, does not end a
//     step by itself.
//   - Half of the names of the step, and more than a few, have occurred again. Then the previous step was of
//     another kind, such as the broadcasts at the beginning.
//   - In the first step after the start-up, a name occurs for the fourth time.
type stepFinder struct {
	// last has a number for each nameID: four times the number of the step, from 1, in which the name
	// occurred last, plus how often it occurred again in that step, at most 3.
	last                   []int64
	step                   int64
	names, again, previous int
	fresh                  int // the number of names that did not occur in an earlier step
	begin                  time.Duration
	lengths                analysis.Sketch
	// firstBegin is the time at which the first complete step begins. firstStep is its number, or 0 if there
	// is none yet.
	firstBegin time.Duration
	firstStep  int64
}

// startupSteps limits the number of steps before the first complete one. There may be several, because names
// may occur again before the training begins.
const startupSteps = 10

// see processes a name that was submitted at the given time. Names must be passed in the order of the file.
// see reports whether the name occurs for the first time.
func (f *stepFinder) see(name nameID, at time.Duration) (first bool) {
	if f.step == 0 {
		f.step, f.begin, f.lengths.Bits = 1, at, 5
	}
	if int(name) >= len(f.last) {
		f.last = append(f.last, make([]int64, int(name)+1-len(f.last))...)
	}
	first = f.last[name] == 0
	if f.last[name]>>2 == f.step {
		before := f.last[name] & 3
		if before == 0 {
			f.again++
		}
		if before < 3 {
			f.last[name]++
		}
		if 2*f.names >= f.previous || 2*f.again >= f.names && 8*f.again >= f.previous ||
			before >= 2 && f.step == f.firstStep {
			f.end(at)
		}
	}
	if f.last[name]>>2 != f.step {
		f.last[name] = f.step << 2
		f.names++
		if first {
			f.fresh++
		}
	}
	return first
}

// end ends the current step at the given time and begins the next.
func (f *stepFinder) end(at time.Duration) {
	f.lengths.Add(int64(at - f.begin))
	f.step++
	// A step is start-up if it is the first, because it includes what a program does only once. One of the
	// next steps is start-up too if many of its names are new.
	if f.firstStep == 0 || 4*f.fresh >= f.names && f.step <= startupSteps {
		f.firstStep, f.firstBegin = f.step, at
		f.lengths = analysis.Sketch{Bits: f.lengths.Bits}
	}
	f.begin, f.previous = at, f.names
	f.names, f.again, f.fresh = 0, 0, 0
}

// steps returns the number of steps from the first complete step on, including the last one. It returns 0 if
// no name occurred again.
func (f *stepFinder) steps() int64 {
	if f.firstStep == 0 {
		return 0
	}
	return f.step - f.firstStep + 1
}
