package report

// stepFinder infers steps from names that come again. A step ends with a name that it has had already, if it had at least half as
// many names as the one before: what comes several times in a step, as for micro-batches, ends none. If half of its names have come
// again, and they are not few, the step before was of another sort, as the broadcasts at the beginning, and the step ends too.
type stepFinder struct {
	// last is, by nameID, twice the number of the step, from 1, in which a name was last seen, and 1 more if it came again in it.
	last                   []int64
	step                   int64
	names, again, previous int
	begin                  int64
	lengths                sketch
	repeats                int64 // names that came again, in any step
}

// see takes a name, in the order of the file, and when it was submitted. It returns whether that was for the first time.
func (f *stepFinder) see(name nameID, at int64) (first bool) {
	if f.step == 0 {
		f.step, f.begin, f.lengths.bits = 1, at, 5
	}
	if int(name) >= len(f.last) {
		f.last = append(f.last, make([]int64, int(name)+1-len(f.last))...)
	}
	first = f.last[name] == 0
	if !first {
		f.repeats++
	}
	if f.last[name]>>1 == f.step {
		if f.last[name]&1 == 0 {
			f.again++
			f.last[name]++
		}
		if 2*f.names >= f.previous || 2*f.again >= f.names && 8*f.again >= f.previous {
			f.lengths.add(at - f.begin)
			f.begin, f.previous = at, f.names
			f.step++
			f.names, f.again = 0, 0
		}
	}
	if f.last[name]>>1 != f.step {
		f.last[name] = f.step << 1
		f.names++
	}
	return first
}

// steps is how many there were, the last one too; 0 if no name came again.
func (f *stepFinder) steps() int64 {
	if f.lengths.n == 0 {
		return 0
	}
	return int64(f.lengths.n) + 1
}
