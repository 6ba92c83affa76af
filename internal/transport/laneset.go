package transport

import "slices"

// LaneSet is a set of lanes. Meshes use it to remember released lanes. The zero value is empty. It is not
// safe for concurrent use.
//
// It takes 8 bytes per run of consecutive lanes, and there is at most one run more than there are lanes
// missing below the greatest. Lane numbers rise and are not reused, so if all removed process sets are
// released its size depends on the number of sets that exist at a time, and not on how many ever existed. Has
// takes time logarithmic in the number of runs, Add linear.
type LaneSet struct {
	runs []laneRun // ascending, with a gap between each and the next
}

// laneRun stands for the lanes from first to last, inclusive.
type laneRun struct{ first, last Lane }

// Has reports whether lane is in the set.
func (s *LaneSet) Has(lane Lane) bool {
	_, found := s.find(lane)
	return found
}

// Add puts lane into the set.
func (s *LaneSet) Add(lane Lane) {
	i, found := s.find(lane)
	if found {
		return
	}
	run := laneRun{lane, lane}
	from, to := i, i // runs[from:to] are merged into the new one
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

// find returns the index of the run that contains lane, or of the first run above it.
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
