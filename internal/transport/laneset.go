package transport

import "slices"

// LaneSet is a set of lanes. Meshes use it to record which lanes were released. The zero value is an empty
// set. A LaneSet is not safe for concurrent use.
//
// A LaneSet takes 8 bytes for each run of consecutive lanes. Each gap of lanes that are not in the set adds
// at most one run. Lane numbers rise and are not reused. So if every removed process set is released, the
// size of the LaneSet depends on how many process sets exist at the same time, not on how many have ever
// existed. Has takes time logarithmic in the number of runs, and Add takes time linear in it.
type LaneSet struct {
	runs []laneRun // ascending, with a gap between neighbours
}

// laneRun is a run of consecutive lanes. It includes first and last.
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
	from, to := i, i // the new run replaces runs[from:to]
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

// find looks up the run that contains lane. If there is one, find returns its index and true. Otherwise it
// returns false and the index of the first run above lane.
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
