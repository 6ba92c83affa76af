package topo

// Leaders has for each rank the rank to which it sends its control frames, which passes them on: its leader,
// or the rank itself if it has a control connection to rank 0. A leader may have a leader. Leaders is nil if
// every rank has a control connection to rank 0.
type Leaders []Rank

// Of returns the leader of rank r, or r.
func (l Leaders) Of(r Rank) Rank {
	if l == nil {
		return r
	}
	return l[r]
}

// Lead reports whether the frames of rank r pass through another rank, leader.
func (l Leaders) Lead(leader, r Rank) bool {
	for next := l.Of(r); next != r; r, next = next, l.Of(next) {
		if next == leader {
			return true
		}
	}
	return false
}

// Hop returns the rank to which rank 0 or the leader from sends a frame for rank r: r itself, or the leader
// that passes on the frames of r to from. Rank r must be from or behind it.
func (l Leaders) Hop(from, r Rank) Rank {
	for next := l.Of(r); r != from && next != r && next != from; next = l.Of(r) {
		r = next
	}
	return r
}

// Upstream returns the rank to which rank r has its control connection: its leader, or rank 0.
func (l Leaders) Upstream(r Rank) Rank {
	if leader := l.Of(r); leader != r {
		return leader
	}
	return 0
}

// Levels returns the greatest number of leaders through which the frames of a rank pass.
func (l Leaders) Levels() int {
	levels := 0
	for f := range l {
		n := 0
		for r := Rank(f); l[r] != r; r = l[r] {
			n++
		}
		levels = max(levels, n)
	}
	return levels
}

// HostLeaders returns leaders of all hosts except that of rank 0, and the list of them.
func HostLeaders(hosts []string) (leaders Leaders, list []Rank) {
	first := map[string]Rank{}
	leaders = make(Leaders, len(hosts))
	for i, host := range hosts {
		r := Rank(i)
		leader, found := first[host]
		if !found || host == hosts[0] {
			leader = r
		}
		first[host], leaders[i] = leader, leader
		if !found && host != hosts[0] {
			list = append(list, r)
		}
	}
	return leaders, list
}

// Group divides the given ranks, which have no leader, into groups of at most most ranks, and makes the first
// rank of each group the leader of the others. It does the same with these leaders, and so on, as often as is
// needed so that no group is too large, and with groups of about the same size on all levels. The ranks that
// have no leader afterwards are no more than the size of a group. most must be at least 2.
func (l Leaders) Group(ranks []Rank, most int) {
	levels := 2
	for !covers(most, levels, len(ranks)) {
		levels++
	}
	size := 1
	for !covers(size, levels, len(ranks)) {
		size++
	}
	for ; levels > 1; levels-- {
		var leaders []Rank
		for i, r := range ranks {
			l[r] = ranks[i-i%size]
			if l[r] == r {
				leaders = append(leaders, r)
			}
		}
		ranks = leaders
	}
}

// covers reports whether so many levels of groups of the given size have room for n ranks.
func covers(size, levels, n int) bool {
	room := 1
	for ; levels > 0 && room < n; levels-- {
		room *= size
	}
	return room >= n
}
