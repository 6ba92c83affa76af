package transport

import "slices"

// LaneSet is a set of lanes. Meshes use it to remember released lanes. The zero value is an empty set. A
// LaneSet is not safe for concurrent use.
//
// A LaneSet takes 8 bytes for each run of consecutive lanes. A gap of lanes that are not in the set adds at
// most one run. Lane numbers rise and are not reused. So if every removed process set is released, the size
// of the LaneSet depends on the number of process sets that exist at a time, and not on the number that ever
// existed. The time of Has is logarithmic in the number of runs, and the time of Add linear.
type LaneSet struct {
	runs []laneRun // ascending, with a gap between neighbours
}

// laneRun is the run of lanes from first to last, both included.
type laneRun struct{ first, last Lane }

// Has reports whether lane is in the set.
func (s *LaneSet) Has(lane Lane) bool {
	_, found := s.find(lane)
	return found
}

// Add adds lane to the set.
func (s *LaneSet) Add(lane Lane) {
	i, found := s.find(lane)
	if found {
		return
	}
	run := laneRun{lane, lane}
	from, to := i, i // runs[from:to] are replaced by run
	if i > 0 && s.runs[i-1].last+1 == lane {
		from--
		run.first = s.runs[from].first
	}
	if i < len(s.runs) && s.runs[i].first-1 == lane {
		run.last = s.runs[i].last
		to++
	}
	s.runs = slices.Replace(s.runs, from, to, run)
}

// find returns the index of the run that contains lane, and true. If no run contains lane, it returns the
// index of the first run above lane, and false.
func (s *LaneSet) find(lane Lane) (int, bool) {
	return slices.BinarySearchFunc(s.runs, lane, func(r laneRun, lane Lane) int {
		switch {
		case r.last < lane:
			return -1
		case r.first > lane:
			return 1
		default:
			return 0
		}
	})
}
