package report

import (
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
)

// stepFinder infers steps from names that come again. These rules end a step:
//
//   - A name comes that the step has had already, and the step has at least half as many names as the step
//     before. A name that comes several times in a step, as for micro-batches, ends no step by itself.
//   - Half of the step's names have come again, and they are not few. Then the step before was of another
//     kind, such as the broadcasts at the beginning.
//   - In the first step after the start-up, a name comes for the fourth time.
type stepFinder struct {
	// last is, by nameID, four times the number of the step, from 1, in which a name was last seen, plus how
	// often it came again in that step, at most 3.
	last                   []int64
	step                   int64
	names, again, previous int
	fresh                  int // number of names that had not occurred in an earlier step
	begin                  time.Duration
	lengths                analysis.Sketch
	// The first complete step begins at firstBegin and has the number firstStep; 0 if there is none yet.
	firstBegin time.Duration
	firstStep  int64
}

// startupSteps limits the number of steps before the first complete one: names may come again before the
// training begins.
const startupSteps = 10

// see processes a name, in the order of the file, that was submitted at a time. It reports whether the name
// came for the first time.
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

// end ends a step and begins the next.
func (f *stepFinder) end(at time.Duration) {
	f.lengths.Add(int64(at - f.begin))
	f.step++
	// The first step includes what a program does once, and so does another step with many new names.
	if f.firstStep == 0 || 4*f.fresh >= f.names && f.step <= startupSteps {
		f.firstStep, f.firstBegin = f.step, at
		f.lengths = analysis.Sketch{Bits: f.lengths.Bits}
	}
	f.begin, f.previous = at, f.names
	f.names, f.again, f.fresh = 0, 0, 0
}

// steps returns the number of steps from the first complete one on, including the last; 0 if no name came
// again.
func (f *stepFinder) steps() int64 {
	if f.firstStep == 0 {
		return 0
	}
	return f.step - f.firstStep + 1
}
