package report

import (
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
)

// stepFinder finds training steps. If the program has marked them, a step begins with each mark. The time
// until the second mark is the start-up, because a program does things in the first step that it does only
// once.
//
// Otherwise stepFinder infers steps from tensor names that occur again. A step ends when one of these rules
// applies:
//
//   - A name occurs that has already occurred in the step, and the step has at least half as many names as
//     the previous step. A name that occurs several times in each step, as with micro-batches, does not end
//     a step by itself.
//   - At least half of the names of the step have occurred again, and their number is at least an eighth of
//     the number of names in the previous step. Then the previous step was of another kind, such as the
//     broadcasts at the beginning.
//   - In the first step after the start-up, a name occurs for the fourth time.
type stepFinder struct {
	marked bool // whether the program has marked its steps
	marks  int  // the number of marks so far
	empty  bool // whether no name was submitted since the last mark
	// last is indexed by nameStats.id. Its value is 4 * step + repeats: step is the number of the step in
	// which the name occurred last, counted from 1, and repeats is how often the name occurred again in this
	// step, at most 3.
	last                   []int64
	step                   int64
	names, again, previous int
	fresh                  int // the number of names that did not occur in an earlier step
	begin                  time.Duration
	lengths                analysis.Sample
	// firstBegin is the time at which the first complete step begins. firstStep is the number of this step,
	// or 0 if it has not begun.
	firstBegin time.Duration
	firstStep  int64
}

// startupSteps limits the number of steps before the first complete one. There may be several, because names
// may occur more than once before the training begins.
const startupSteps = 10

// mark processes the mark of the beginning of a step at the given time.
func (f *stepFinder) mark(at time.Duration) {
	if f.step > 0 {
		f.lengths.Add(int64(at - f.begin))
	}
	f.step++
	f.marks++
	if f.marks == 2 {
		f.firstStep, f.firstBegin = f.step, at
		f.lengths = analysis.Sample{}
	}
	f.begin, f.empty = at, true
}

// see processes the id of a name that was submitted at the given time. Names must be passed in the order in
// which the file has them. see reports whether the name has not occurred before.
func (f *stepFinder) see(name int, at time.Duration) (first bool) {
	if f.step == 0 {
		f.step, f.begin = 1, at
	}
	if name >= len(f.last) {
		f.last = append(f.last, make([]int64, name+1-len(f.last))...)
	}
	first = f.last[name] == 0
	if f.marked {
		f.last[name] = 1
		f.empty = f.empty && at < f.begin
		return first
	}
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
	// The first step counts as start-up, because a program does things in it that it does only once. A later
	// step counts as start-up if at least a quarter of its names are new and startupSteps is not reached.
	if f.firstStep == 0 || 4*f.fresh >= f.names && f.step <= startupSteps {
		f.firstStep, f.firstBegin = f.step, at
		f.lengths = analysis.Sample{}
	}
	f.begin, f.previous = at, f.names
	f.names, f.again, f.fresh = 0, 0, 0
}

// steps returns the number of steps from the first complete step to the last step, including both. It returns
// 0 if there are none.
func (f *stepFinder) steps() int64 {
	switch {
	case f.firstStep == 0:
		return 0
	case f.empty: // the last mark is at the end of the last step
		return f.complete()
	}
	return f.complete() + 1
}

// complete returns the number of steps after the start-up whose end is known.
func (f *stepFinder) complete() int64 { return f.step - f.firstStep }
