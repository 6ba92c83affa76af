package controller_test

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

type setModel struct {
	controller.Set
	cache      responsecache.Cache // the cache after the last issued cycle
	asked      map[string][]*message.Request
	complete   map[string]bool // the names in asked that are in ready or in held
	ready      []readyName
	held       map[string]*groupModel
	joined     []bool
	empty      []bool
	joins      int
	leaving    func(topo.Rank) bool
	unfinished int
	log        []issuedGrant
	digests    map[uint64]uint64
	gone       bool // whether the set was removed
	// founding has by name the requests to add sets by their members. Only the global set has them.
	founding map[string]map[topo.Rank]*message.Request
	// byMembers is set if the members have asked to add the set. founded is set in such a set until its first
	// grant, and refused if this grant is an error.
	byMembers, founded, refused bool
}

// groupModel is a group of which some tensors are neither ready nor answered.
type groupModel struct {
	names    []readyName // the complete names that wait for the rest of the group
	failed   bool        // whether the ranks disagree about a name, so that every name fails
	answered int
}

// readyName is a name that every member has requested. Members that have joined, or agree by their shutdown,
// do not count.
type readyName struct {
	name   string
	frame  int         // the news frame that completed the name or its group
	absent []topo.Rank // members that have not requested it
	group  string      // the name and the size of the group
	fails  bool        // whether the answer must be an error
	join   bool        // whether this is the answer to the joins and not a name
}

func newSetModel(s controller.Set, leaving func(topo.Rank) bool) *setModel {
	return &setModel{
		Set: s, leaving: leaving, asked: make(map[string][]*message.Request), complete: make(map[string]bool),
		held:     make(map[string]*groupModel),
		founding: make(map[string]map[topo.Rank]*message.Request),
		joined:   make([]bool, len(s.Ranks)), empty: make([]bool, len(s.Ranks)),
		digests: make(map[uint64]uint64),
	}
}

// ask records a member's request that was in the given news frame.
func (s *setModel) ask(member int, q *message.Request, frame int) {
	if q.Kind == message.Join {
		s.join(member, q, frame)
		return
	}
	if s.asked[q.Name] == nil {
		s.asked[q.Name] = make([]*message.Request, len(s.Ranks))
	}
	s.asked[q.Name][member] = q
	s.check(q.Name, frame)
}

func (s *setModel) join(member int, q *message.Request, frame int) {
	s.joined[member], s.empty[member] = true, q.Empty
	s.joins++
	s.checkAll(frame)
	if s.joins < len(s.Ranks) {
		return
	}
	for group, g := range s.held {
		for _, x := range g.names {
			x.frame, x.fails = frame, true
			s.ready = append(s.ready, x)
		}
		delete(s.held, group)
	}
	s.ready = append(s.ready, readyName{frame: frame, join: true})
}

// checkAll calls check for every name.
func (s *setModel) checkAll(frame int) {
	for name := range s.asked {
		s.check(name, frame)
	}
}

// agrees reports whether a member agrees to the requests by its shutdown: all are to remove a set.
func (s *setModel) agrees(member int, qs []*message.Request) bool {
	return s.leaving(s.Ranks[member]) && !slices.ContainsFunc(qs, func(q *message.Request) bool {
		return q != nil && q.Kind != message.RemoveProcessSet
	})
}

// check moves a name to the list of ready or of held names if no member is missing for it.
func (s *setModel) check(name string, frame int) {
	x := readyName{name: name, frame: frame}
	var first *message.Request
	qs := s.asked[name]
	for m, q := range qs {
		switch {
		case q == nil && !s.joined[m] && !s.agrees(m, qs):
			return
		case q == nil:
			x.absent = append(x.absent, s.Ranks[m])
		case first == nil:
			first = q
		}
	}
	if s.complete[name] {
		return
	}
	s.complete[name] = true
	disagree := !agree(s.Set, qs, s.joined, s.empty)
	x.fails = disagree || first.DType == refusedType && first.Kind.Reduces()
	x.group = groupText(first)
	if x.group == "" {
		s.ready = append(s.ready, x)
	} else {
		s.group(first).names = append(s.group(first).names, x)
		s.settle(first, disagree, 0, frame)
	}
	// Other members may have named other groups for the tensor. These groups fail too.
	lost := map[string]bool{x.group: true}
	for _, q := range qs {
		if q != nil && q.Group != "" && !lost[groupText(q)] {
			lost[groupText(q)] = true
			s.settle(q, true, 1, frame)
		}
	}
}

func groupText(q *message.Request) string {
	if q.Group == "" {
		return ""
	}
	return fmt.Sprint(q.Group, q.GroupSize)
}

// group returns the group that a request names. If the group does not exist, it creates the group.
func (s *setModel) group(q *message.Request) *groupModel {
	g := s.held[groupText(q)]
	if g == nil {
		g = &groupModel{}
		s.held[groupText(q)] = g
	}
	return g
}

// settle moves the names of a group to the ready names if the group is complete or has failed. If fails is
// set, the group fails now. elsewhere is the number of tensors of the group that have just been answered
// outside the group.
func (s *setModel) settle(q *message.Request, fails bool, elsewhere, frame int) {
	g := s.group(q)
	g.failed = g.failed || fails
	g.answered += elsewhere
	complete := g.answered+len(g.names) == int(q.GroupSize)
	if complete {
		delete(s.held, groupText(q))
	}
	if !complete && !g.failed {
		return
	}
	failed := g.failed || slices.ContainsFunc(g.names, func(x readyName) bool { return x.fails })
	for _, x := range g.names {
		x.frame, x.fails = frame, failed
		s.ready = append(s.ready, x)
	}
	g.answered += len(g.names)
	g.names = nil
}

type issuedGrant struct {
	text         string
	order        int
	segmentBytes int
}

// vote is a cache bit of a process set for which a rank has voted.
type vote struct {
	set topo.ProcessSetID
	bit uint32
}

type rankModel struct {
	fresh    []request          // requests that were submitted but have not been sent
	inFlight []request          // requests in full that are in flight from the rank
	votes    map[vote][]request // votes that are in flight from the rank, oldest first
	// caches are the caches of the sets after the cycles that the rank has applied.
	caches    map[topo.ProcessSetID]*responsecache.Cache
	submitted int
	finished  int  // number of finished grants that the rank must report
	news      int  // number of news frames that the rank has sent
	shutdown  bool // whether the rank's program has called Shutdown
	leaving   bool // whether the coordinator knows that the rank leaves
	stopSent  bool
	position  map[topo.ProcessSetID]int // number of grants of each set that the rank has applied
	order     int                       // the position of the last applied grant among all issued grants
	running   map[*controller.Grant]string
	stopped   bool
}

// namedBy returns all ranks that the requests name, in ascending order.
func namedBy(asked map[topo.Rank]*message.Request) (ranks []topo.Rank) {
	for _, q := range asked {
		ranks = append(ranks, q.Ranks...)
	}
	slices.Sort(ranks)
	return slices.Compact(ranks)
}

// cache returns the rank's cache of a set.
func (k *rankModel) cache(set topo.ProcessSetID) *responsecache.Cache {
	if k.caches[set] == nil {
		k.caches[set] = new(responsecache.Cache)
	}
	return k.caches[set]
}

// take returns the requests that the rank has meant with what arrives in u. They are no longer in flight.
func (k *rankModel) take(u *message.Up) (meant []request) {
	for i := range u.Sets {
		s := &u.Sets[i]
		for bit, ok := s.Hits.Next(0); ok; bit, ok = s.Hits.Next(bit + 1) {
			v := vote{s.Set, bit}
			meant = append(meant, k.votes[v][0])
			k.votes[v] = k.votes[v][1:]
		}
		for _, q := range s.Requests {
			at := slices.IndexFunc(k.inFlight, func(r request) bool {
				return r.set == s.Set && r.q.Name == q.Name
			})
			meant = append(meant, k.inFlight[at])
			k.inFlight = slices.Delete(k.inFlight, at, at+1)
		}
	}
	return meant
}

// awaited holds the ranks that wait for an operation, and the ranks that have not submitted it. If a rank has
// joined the set, it waits too, unless apart is set and it has not submitted the operation.
type awaited struct {
	waiting, missing []topo.Rank
	apart            bool
}

// awaited returns an element for each operation of the set, including joins, for which some ranks wait.
func (s *setModel) awaited() (all []awaited) {
	ranks := func(of func(member int) bool) (ranks []topo.Rank) {
		for m, r := range s.Ranks {
			if of(m) {
				ranks = append(ranks, r)
			}
		}
		return ranks
	}
	present := ranks(func(m int) bool { return !s.joined[m] })
	open := make(map[string]bool) // groups with a requested tensor that is not complete
	for name, qs := range s.asked {
		if s.complete[name] {
			continue
		}
		a := awaited{
			waiting: ranks(func(m int) bool { return qs[m] != nil && !s.joined[m] }),
			missing: ranks(func(m int) bool { return qs[m] == nil && !s.joined[m] && !s.agrees(m, qs) }),
		}
		if group := groupText(firstOf(qs)); group != "" {
			open[group] = true
			if g := s.held[group]; g != nil && len(g.names) > 0 {
				a.waiting = present
			}
		}
		all = append(all, a)
	}
	for group, g := range s.held {
		if len(g.names) > 0 && !open[group] {
			all = append(all, awaited{waiting: present, missing: present})
		}
	}
	for _, asked := range s.founding {
		named := namedBy(asked)
		a := awaited{apart: true}
		for _, r := range s.Ranks {
			switch {
			case asked[r] != nil:
				a.waiting = append(a.waiting, r)
			case slices.Contains(named, r) && slices.Contains(present, r):
				a.missing = append(a.missing, r)
			}
		}
		all = append(all, a)
	}
	if s.joins > 0 && s.joins < len(s.Ranks) {
		all = append(all, awaited{waiting: ranks(func(m int) bool { return s.joined[m] }), missing: present})
	}
	return all
}

// holds reports whether a name waits for the rest of its group.
func (s *setModel) holds(name string) bool {
	for _, g := range s.held {
		if slices.ContainsFunc(g.names, func(x readyName) bool { return x.name == name }) {
			return true
		}
	}
	return false
}

func firstOf(qs []*message.Request) *message.Request {
	return qs[slices.IndexFunc(qs, func(q *message.Request) bool { return q != nil })]
}

// grantKey returns a text that identifies what a grant contains. The texts for two grants are equal if and
// only if the grants have the same content.
func grantKey(set topo.ProcessSetID, b message.Backend, a message.Algorithm, absent []topo.Rank,
	responses []*message.Response) string {
	key := fmt.Sprintf("set %d %v/%v without %v", set, b, a, absent)
	for _, r := range responses {
		name := r.Name
		if r.Kind == message.Join {
			name = "" // the names of a join may differ between ranks
		}
		key += fmt.Sprintf(" %v %q %v%v%v %v %v %v %v %v %v %v %s/%d %d%v %q",
			r.Kind, name, r.DType, r.Shape, r.Parts, r.FirstDims, r.Devices, r.Op, r.Prescale, r.Postscale,
			r.Wire, r.Root, r.Group, r.GroupSize, r.Set, r.Ranks, r.Text)
	}
	return key
}
