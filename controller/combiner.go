package controller

import (
	"bytes"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Combiner is the state of a leader, which passes on the frames of the ranks behind it to rank 0: of the
// other ranks of its host, and of the leaders of other hosts and the ranks behind these. It delays only votes
// and requests, until all these ranks that belong to the process set have made them, and heartbeats. No other
// frame of a rank overtakes them if that could change its meaning. It passes on frames that it cannot decode,
// so that rank 0 finds the sender at fault. It is not safe for concurrent use.
//
// In each turn, call Tick, then Up, Relay, Lost and Fault for what has arrived from the ranks and Down for
// frames from rank 0, then Ready. Send the frames that Ready returns to rank 0, or to the leader of this
// leader, and call Advance. Send a frame from rank 0 to the ranks only after Down.
type Combiner struct {
	ranks []ledRank // the leader, the ranks behind it, and then the leaders behind it as groups
	size  int       // number of ranks without groups
	sets  []*heldSet
	now   time.Duration
	due   time.Duration // the time at which held votes or heartbeats must be passed on, or never
	told  bool          // whether the ranks were sent a verdict
	brief bool          // whether rank 0 does not need the time of each vote and request

	parts []part          // the parts of the next frame to rank 0, in order
	next  part            // the ranks and times of votes or requests that are to be added to parts
	in    message.Up      // the frame that is being applied
	from  []int           // the ranks or the group that have sent it, as indexes in ranks, in any order
	at    []time.Duration // the times at which it has arrived, by element of from
	times askTimes        // those of a group
	asks  []int           // the members of a process set that have sent it, as indexes in heldSet.local
	rest  message.Up      // the content of that frame without the votes that are held
	frame []byte
	own   []int // memory for passOwn
	ownAt []time.Duration

	// Ready reuses the memory of the fields below.
	out    []message.Part
	quiet  []topo.Rank
	sorted []uint64 // ranks and times of a part
}

// ledRank is the leader or a rank behind it. The first one is the leader. It is also a group: a leader with a
// connection to this leader together with the ranks behind it. Votes and requests that all ranks of a group
// have made are held for the group, so that the cost does not depend on the number of its ranks.
type ledRank struct {
	rank     topo.Rank
	members  []int         // of a group: its ranks, as indexes in ascending order
	group    int           // the index of the rank's group, or 0
	direct   bool          // whether the rank has a connection to the leader
	seen     uint64        // the last cycle that the rank had applied when it sent its last frame
	part     int           // the index in parts of the rank's last part, or -1
	inner    int           // of a group: the greatest part of its ranks
	beat     bool          // whether a heartbeat of the rank waits to be passed on
	bye      bool          // whether the rank has sent bye
	closed   bool          // whether the rank was closed or its connection has ended
	lastSent time.Duration // the time at which the last frame was sent to the rank
}

// part is a frame to rank 0, or votes and requests in a process set. It stands for several ranks.
type part struct {
	ranks []int           // indexes in Combiner.ranks
	at    []time.Duration // the time at which the frame, or the votes and requests, of each rank arrived
	times []askTimes      // those of the groups among ranks
	count int             // number of ranks, with those in groups
	frame []byte
	// If asks is set, the part has the votes hits and the requests.
	asks     bool
	set      topo.ProcessSetID
	seen     uint64 // a cycle that all the ranks have applied, at which hits stand for what they voted for
	hits     message.Bits
	requests []message.Request
}

// heldSet is a process set with members behind the leader, and the votes and requests that the leader holds.
type heldSet struct {
	Set
	// local are the members among Combiner.ranks, as indexes: first the ranks, then the groups, if all ranks
	// behind the leader are members. size is the number of ranks in it. alone are the positions of groups and
	// of ranks that are in no group, and every all positions.
	local        []int
	size         int
	alone, every []int
	votes        []message.Bits // the held votes, by element of local
	joined       bool           // whether one of these members has joined
	bits         []heldBit
	// requests are the names that members have requested in full, in the order of their first requests.
	// byName has the same, without names that all members have requested.
	requests []*heldRequest
	byName   map[string]*heldRequest
	erasures []erasure
	bound    uint32 // greater than every bit that has had an entry
	cycle    uint64 // the last cycle with decisions about the set
	erased   uint64 // the last cycle that has erased entries of the set
}

// erasure says which name a bit stood for until a cycle. It is kept until all members behind the leader have
// seen that cycle.
type erasure struct {
	bit   uint32
	cycle uint64
	name  string
}

type heldBit struct {
	name string // the name of the last entry of the bit
	held
	// open says that votes are not held until the next grant of the bit, because some were passed on already.
	open bool
}

// held has the times of held votes or requests for a tensor.
type held struct {
	count   int             // number of ranks whose votes or requests are held
	grouped int             // number of those of ranks in groups that are not held for the group
	at      []time.Duration // the times at which they arrived, by element of heldSet.local
	times   []askTimes      // those of groups, by element of heldSet.local after the ranks
}

func (s *heldSet) newHeld() held {
	return held{at: make([]time.Duration, len(s.local)), times: make([]askTimes, len(s.local)-s.size)}
}

// holders returns the positions in local of ranks and groups for which something may be held.
func (s *heldSet) holders(h *held) []int {
	if h.grouped > 0 {
		return s.every
	}
	return s.alone
}

// heldRequest is a name that members of a process set have requested in full.
type heldRequest struct {
	// made are the held requests, by element of heldSet.local, nil if there is none. Equal requests that have
	// arrived in one frame share one.
	made []*message.Request
	held
	open bool // as in heldBit, until the name is granted
	done bool // whether the name is no longer in byName
}

// NewCombiner returns the Combiner of a leader for an epoch that begins at the time now. It returns nil if no
// rank is behind the given rank. The sets are the process sets with which the job begins.
func NewCombiner(leader topo.Rank, leaders topo.Leaders, sets []Set, now time.Duration) *Combiner {
	c := &Combiner{now: now, due: Never, ranks: []ledRank{{rank: leader, part: -1, lastSent: now}}}
	for f := range leaders {
		if r := topo.Rank(f); leaders.Lead(leader, r) {
			c.ranks = append(c.ranks, ledRank{rank: r, direct: leaders.Of(r) == leader, part: -1,
				lastSent: now})
		}
	}
	if len(c.ranks) == 1 {
		return nil
	}
	c.size = len(c.ranks)
	groups := make(map[topo.Rank]int)
	for i := range c.size {
		hop := leaders.Hop(leader, c.ranks[i].rank)
		if hop == leader || hop == c.ranks[i].rank {
			continue
		}
		if groups[hop] == 0 {
			groups[hop] = len(c.ranks)
			first := c.index(hop)
			c.ranks = append(c.ranks, ledRank{rank: hop, members: []int{first}, part: -1, inner: -1})
			c.ranks[first].group = groups[hop]
		}
		c.ranks[i].group = groups[hop]
		c.ranks[groups[hop]].members = append(c.ranks[groups[hop]].members, i)
	}
	for _, s := range sets {
		c.addSet(s)
	}
	return c
}

func (c *Combiner) addSet(s Set) {
	h := &heldSet{Set: s, byName: make(map[string]*heldRequest)}
	for i := range c.size {
		if s.index(c.ranks[i].rank) >= 0 {
			h.local = append(h.local, i)
		}
	}
	h.size = len(h.local)
	if h.size == c.size {
		for i := c.size; i < len(c.ranks); i++ {
			h.local = append(h.local, i)
		}
	}
	for m, i := range h.local {
		h.every = append(h.every, m)
		if h.size < c.size || c.ranks[i].group == 0 {
			h.alone = append(h.alone, m)
		}
	}
	if len(h.local) > 0 {
		h.votes = make([]message.Bits, len(h.local))
		c.sets = append(c.sets, h)
	}
}

// Tick sets the current time to now.
func (c *Combiner) Tick(now time.Duration) { c.now = now }

// Up applies a frame from a rank that has a connection to the leader, or from the leader itself.
func (c *Combiner) Up(from topo.Rank, frame []byte) {
	c.from, c.at = append(c.from[:0], c.index(from)), append(c.at[:0], c.now)
	c.apply(frame)
}

// Relay applies a part of a combined frame. A leader behind this leader has sent it, and leads its ranks.
func (c *Combiner) Relay(leader topo.Rank, p *message.Part) {
	c.from, c.at = c.from[:0], c.at[:0]
	if !p.All {
		for j, r := range p.Ranks {
			c.from, c.at = append(c.from, c.index(r)), append(c.at, c.arrival(p.Held[j]))
		}
		c.apply(p.Frame)
		return
	}
	group := c.ranks[c.index(leader)].group
	if group == 0 {
		c.Fault(leader, "protocol error: got a frame of all ranks behind it, but it leads no rank")
		return
	}
	c.times = askTimes{first: c.arrival(p.First), latest: c.arrival(p.Held[0]), latestBy: p.Ranks[0],
		second: c.arrival(p.Held[1]), secondBy: p.Ranks[1]}
	c.from, c.at = append(c.from, group), append(c.at, c.times.first)
	c.apply(p.Frame)
}

// of returns the time of rank r. Only those of the last two ranks are known, and the others count as the
// first.
func (t *askTimes) of(r topo.Rank) time.Duration {
	switch r {
	case t.latestBy:
		return t.latest
	case t.secondBy:
		return t.second
	}
	return t.first
}

// isGroup reports whether a group has sent the current frame.
func (c *Combiner) isGroup() bool { return len(c.from) > 0 && c.ranks[c.from[0]].members != nil }

// ungroup replaces a group in from by its ranks.
func (c *Combiner) ungroup() {
	if !c.isGroup() {
		return
	}
	members := c.ranks[c.from[0]].members
	c.from, c.at = c.from[:0], c.at[:0]
	for _, i := range members {
		c.from, c.at = append(c.from, i), append(c.at, c.times.of(c.ranks[i].rank))
	}
}

// arrival returns the time at which a frame arrived at the leader that has held it for so many microseconds.
func (c *Combiner) arrival(held uint32) time.Duration {
	return max(0, c.now-time.Duration(held)*time.Microsecond)
}

// apply applies a frame of the ranks c.from. It may stand for frames of several ranks, some of which have
// applied later cycles than the frame says.
func (c *Combiner) apply(frame []byte) {
	if message.IsProbe(frame) || message.DecodeUp(frame, &c.in) != nil {
		c.ungroup()
		c.pass(frame)
		return
	}
	if c.isGroup() && !c.holdsGroup() {
		c.ungroup()
	}
	for _, i := range c.from {
		k := &c.ranks[i]
		k.seen = max(k.seen, c.in.Seen)
		k.bye = k.bye || c.in.Type == message.UpBye
	}
	switch {
	case c.in.Type == message.UpHeartbeat && c.in.Tensor == "":
		for _, i := range c.from {
			c.ranks[i].beat = true
		}
		c.due = min(c.due, c.now+holdPeriod)
	case c.in.Type != message.UpNews:
		for _, i := range c.from {
			c.passBeat(i) // it must not overtake a heartbeat that names a grant
		}
		c.pass(frame)
	case c.ordered():
		for _, i := range c.from {
			c.release(i)
		}
		c.pass(frame)
	default:
		c.hold()
	}
}

// holdsGroup reports whether the frame may be held for a group: it has nothing but votes and requests in sets
// with all ranks behind the leader.
func (c *Combiner) holdsGroup() bool {
	if c.in.Type != message.UpNews || c.in.Shutdown {
		return false
	}
	for j := range c.in.Sets {
		u := &c.in.Sets[j]
		s := c.members(u.Set)
		if s == nil || s.joined || u.Invalid.Any() || u.Done > 0 || uint32(len(u.Hits)) > (s.bound+63)/64 ||
			slices.ContainsFunc(u.Requests, func(q message.Request) bool {
				return q.Kind == message.Join || q.MembersOnly
			}) {
			return false
		}
	}
	return true
}

func (c *Combiner) index(r topo.Rank) int {
	if r == c.ranks[0].rank {
		return 0
	}
	i, found := slices.BinarySearchFunc(c.ranks[1:c.size], r, func(k ledRank, r topo.Rank) int {
		return int(k.rank - r)
	})
	if !found {
		return -1
	}
	return 1 + i
}

// ordered reports whether the news that have arrived must not overtake held votes of their senders: they have
// a shutdown, a join or invalid bits. It records joins.
func (c *Combiner) ordered() bool {
	ordered := c.in.Shutdown
	for j := range c.in.Sets {
		u := &c.in.Sets[j]
		joins := slices.ContainsFunc(u.Requests, func(q message.Request) bool {
			return q.Kind == message.Join
		})
		if s := c.members(u.Set); s != nil && joins {
			s.joined = true
		}
		ordered = ordered || joins || u.Invalid.Any()
	}
	return ordered
}

// members returns a process set, and stores in asks the indexes in local of the ranks that have sent the
// current frame. It returns nil if the leader does not know the set or if one of the ranks is not a member.
func (c *Combiner) members(id topo.ProcessSetID) *heldSet {
	s := c.set(id)
	if s == nil {
		return nil
	}
	c.asks = c.asks[:0]
	for _, i := range c.from {
		m, found := slices.BinarySearch(s.local, i)
		if !found {
			return nil
		}
		c.asks = append(c.asks, m)
	}
	return s
}

// release passes on what is held in all sets that contain rank i. Votes and requests for what the news from
// the rank mention are not held until the next grant.
func (c *Combiner) release(i int) {
	for _, s := range c.sets {
		if _, found := slices.BinarySearch(s.local, i); found {
			c.releaseSet(s)
		}
	}
	for j := range c.in.Sets {
		u := &c.in.Sets[j]
		s := c.members(u.Set)
		if s == nil {
			continue
		}
		for _, bits := range []message.Bits{u.Hits, u.Invalid} {
			for bit, ok := bits.Next(0); ok && bit < s.bound; bit, ok = bits.Next(bit + 1) {
				s.bit(bit).open = true
				c.openErased(s, bit, c.in.Seen)
			}
		}
		for _, q := range u.Requests {
			if q.Kind != message.Join {
				s.request(q.Name).open = true
			}
		}
	}
}

func (c *Combiner) releaseSet(s *heldSet) {
	for bit := range s.bits {
		c.releaseBit(s, uint32(bit))
	}
	for _, h := range s.requests {
		c.releaseRequest(s, h)
	}
}

// releaseRequest passes on the held requests for a name, and from now on all of them until its next grant.
func (c *Combiner) releaseRequest(s *heldSet, h *heldRequest) {
	if h.count > 0 {
		h.open = true
		c.sendRequests(s, h)
	}
}

// openName passes on the held requests for a name, and from now on all of them until its next grant, because
// rank 0 turns a vote of another rank behind the leader into a request for the name.
func (c *Combiner) openName(s *heldSet, name string) {
	h := s.request(name)
	c.releaseRequest(s, h)
	h.open = true
}

// openErased calls openName if a vote for the bit, of a rank that has applied the cycle seen, is for an entry
// that was erased.
func (c *Combiner) openErased(s *heldSet, bit uint32, seen uint64) {
	for _, e := range s.erasures {
		if e.bit == bit && seen < e.cycle {
			c.openName(s, e.name)
			return
		}
	}
}

// request returns what is held for a name.
func (s *heldSet) request(name string) *heldRequest {
	h := s.byName[name]
	if h == nil {
		h = &heldRequest{made: make([]*message.Request, len(s.local)), held: s.newHeld()}
		s.requests, s.byName[name] = append(s.requests, h), h
	}
	return h
}

// forget removes a name because it was granted or because all members have requested it.
func (s *heldSet) forget(name string) {
	if h := s.byName[name]; h != nil {
		h.done = true
		delete(s.byName, name)
	}
}

// releaseBit passes on the held votes for a bit, and from now on all votes for it until its next grant.
func (c *Combiner) releaseBit(s *heldSet, bit uint32) {
	if s.bits[bit].count > 0 {
		s.bits[bit].open = true
		c.send(s, bit)
	}
}

func (s *heldSet) bit(bit uint32) *heldBit {
	for len(s.bits) <= int(bit) {
		s.bits = append(s.bits, heldBit{held: s.newHeld()})
	}
	return &s.bits[bit]
}

// hold holds the votes and requests in the news that have arrived, and passes on what else they contain.
func (c *Combiner) hold() {
	c.rest.Reset()
	c.rest.Type, c.rest.Seen = message.UpNews, c.in.Seen
	for j := range c.in.Sets {
		u := c.in.Sets[j]
		if s := c.members(u.Set); s != nil && uint32(len(u.Hits)) <= (s.bound+63)/64 {
			for bit, ok := u.Hits.Next(0); ok; bit, ok = u.Hits.Next(bit + 1) {
				for j, m := range c.asks {
					c.vote(s, m, bit, c.at[j])
				}
			}
			for _, q := range u.Requests {
				for j, m := range c.asks {
					c.request(s, m, &q, c.at[j])
				}
			}
			u.Hits, u.Requests = nil, nil
		}
		if u.Hits.Any() || u.Done > 0 || len(u.Requests) > 0 {
			c.rest.Sets = append(c.rest.Sets, u)
		}
	}
	if len(c.rest.Sets) > 0 {
		c.passUp(&c.rest)
	}
	clear(c.rest.Sets) // they share memory with c.in
}

// vote holds a vote of the member m, which has arrived at the given time, or passes it on.
func (c *Combiner) vote(s *heldSet, m int, bit uint32, at time.Duration) {
	b := s.bit(bit)
	voted := func(m int) bool { return s.votes[m].Has(bit) }
	if members := c.apart(s, &b.held, m, voted); members != nil {
		for _, m := range members {
			c.vote(s, m, bit, c.times.of(c.ranks[m].rank))
		}
		return
	}
	c.split(s, &b.held, m, voted, func(group, m int) {
		s.votes[group].Clear(bit)
		s.votes[m].Set(bit)
	})
	// A vote that may be for an erased entry is passed on alone, with the cycle that its sender had applied.
	// So is a second vote of a rank for the same entry, so that rank 0 finds the rank at fault.
	if c.in.Seen < s.erased || s.votes[m].Has(bit) {
		c.releaseBit(s, bit)
		b.open = true
		c.openErased(s, bit, c.in.Seen)
	}
	s.votes[m].Set(bit)
	c.add(s, &b.held, m, at)
	b.open = b.open || s.joined // a member that has joined will not vote
	if b.open || b.count == s.size {
		c.send(s, bit)
		return
	}
	c.due = min(c.due, at+holdPeriod)
}

// request holds a request of the member m, which has arrived at the given time, or passes it on.
func (c *Combiner) request(s *heldSet, m int, q *message.Request, at time.Duration) {
	h := s.request(q.Name)
	made := func(m int) bool { return h.made[m] != nil }
	if members := c.apart(s, &h.held, m, made); members != nil {
		for _, m := range members {
			c.request(s, m, q, c.times.of(c.ranks[m].rank))
		}
		return
	}
	c.split(s, &h.held, m, made, func(group, m int) { h.made[m] = h.made[group] })
	if h.made[m] != nil {
		c.releaseRequest(s, h) // rank 0 finds the rank, which has made the request twice, at fault
	}
	h.made[m] = q
	c.add(s, &h.held, m, at)
	h.open = h.open || s.joined
	switch {
	case h.open:
		c.sendRequests(s, h)
	case h.count == c.askers(s, q):
		c.sendRequests(s, h)
		s.forget(q.Name)
	default:
		c.due = min(c.due, at+holdPeriod)
	}
}

// askers returns how many of the members behind the leader make the request q.
func (c *Combiner) askers(s *heldSet, q *message.Request) int {
	if !q.MembersOnly {
		return s.size
	}
	n := 0
	for _, i := range s.local[:s.size] {
		if _, found := slices.BinarySearch(q.Ranks, c.ranks[i].rank); found {
			n++
		}
	}
	return n
}

// apart returns the ranks of a group, if m is one, something is held for ranks of groups, and the vote or
// request of the group cannot be held as one, because a rank of it has made the same before. The result is
// also the list of their positions in s.local. Otherwise apart returns nil.
func (c *Combiner) apart(s *heldSet, h *held, m int, has func(m int) bool) []int {
	members := c.ranks[s.local[m]].members
	if h.grouped > 0 && slices.ContainsFunc(members, has) {
		return members
	}
	return nil
}

// split is called before something is held for the rank m. If the same is held for the whole group of m,
// which is a fault of the rank, split holds it for each rank of the group instead.
func (c *Combiner) split(s *heldSet, h *held, m int, has func(m int) bool, move func(group, m int)) {
	group := c.ranks[s.local[m]].group
	if len(s.local) == s.size || group == 0 || !has(group) {
		return
	}
	for _, m := range c.ranks[group].members {
		move(group, m)
		h.at[m] = h.times[group-s.size].of(c.ranks[m].rank)
		h.grouped++
	}
}

// add records that a vote or a request of m, which has arrived at the given time, is held.
func (c *Combiner) add(s *heldSet, h *held, m int, at time.Duration) {
	k := &c.ranks[s.local[m]]
	h.at[m] = at
	switch {
	case k.members != nil:
		h.times[m-s.size] = c.times
		h.count += len(k.members)
		return
	case k.group != 0:
		h.grouped++
	}
	h.count++
}

// sendRequests passes on the held requests for a name. Equal requests share a part.
func (c *Combiner) sendRequests(s *heldSet, h *heldRequest) {
	holders := s.holders(&h.held)
	for i, first := range holders {
		q := h.made[first]
		if q == nil {
			continue
		}
		c.beginAsk(s)
		for _, m := range holders[i:] {
			if other := h.made[m]; other == q || other != nil && other.Equal(q) {
				c.addAsk(s, m, &h.held)
				h.made[m] = nil
			}
		}
		x := c.asked()
		x.requests = append(x.requests, *q)
	}
	h.count, h.grouped = 0, 0
}

// send passes on the held votes for a bit.
func (c *Combiner) send(s *heldSet, bit uint32) {
	c.beginAsk(s)
	b := &s.bits[bit]
	for _, m := range s.holders(&b.held) {
		if s.votes[m].Has(bit) {
			s.votes[m].Clear(bit)
			c.addAsk(s, m, &b.held)
		}
	}
	b.count, b.grouped = 0, 0
	c.asked().hits.Set(bit)
}

// beginAsk begins to collect the ranks for a part with votes and requests in next.
func (c *Combiner) beginAsk(s *heldSet) {
	p := &c.next
	*p = part{asks: true, set: s.ID, seen: 1<<64 - 1, ranks: p.ranks[:0], at: p.at[:0], times: p.times[:0]}
}

// addAsk adds a member or a group whose vote or request is held in h to next.
func (c *Combiner) addAsk(s *heldSet, m int, h *held) {
	i, p := s.local[m], &c.next
	p.ranks, p.at, p.seen = append(p.ranks, i), append(p.at, h.at[m]), min(p.seen, c.seen(i))
	if k := &c.ranks[i]; k.members != nil {
		p.times = append(p.times, h.times[m-s.size])
		p.count += len(k.members)
	} else {
		p.count++
	}
}

// seen returns the last cycle that the rank or all ranks of the group i had applied when they sent their last
// frame.
func (c *Combiner) seen(i int) uint64 {
	k := &c.ranks[i]
	if k.group != 0 {
		return max(k.seen, c.ranks[k.group].seen)
	}
	return k.seen
}

// lastPart returns the index in parts of the last part with the rank or with a rank of the group i, or -1.
func (c *Combiner) lastPart(i int) int {
	k := &c.ranks[i]
	switch {
	case k.members != nil:
		return max(k.part, k.inner)
	case k.group != 0:
		return max(k.part, c.ranks[k.group].part)
	}
	return k.part
}

// setPart records that a part has the rank or the group i.
func (c *Combiner) setPart(i, part int) {
	k := &c.ranks[i]
	k.part = part
	if k.group != 0 {
		g := &c.ranks[k.group]
		g.inner = max(g.inner, part)
	}
}

// asked returns the part for the ranks in next. Votes and requests of the same ranks that arrived at the same
// times share a part.
func (c *Combiner) asked() *part {
	p := &c.next
	for i := range c.parts {
		if x := &c.parts[i]; x.sameAsks(p) && !slices.ContainsFunc(x.ranks, func(r int) bool {
			return c.lastPart(r) != i
		}) {
			return x
		}
	}
	x := c.newPart()
	x.asks, x.set, x.seen = true, p.set, p.seen
	x.ranks, x.at, x.times = append(x.ranks, p.ranks...), append(x.at, p.at...), append(x.times, p.times...)
	x.count = p.count
	for _, i := range x.ranks {
		c.setPart(i, len(c.parts)-1)
	}
	return x
}

func (x *part) sameAsks(p *part) bool {
	return x.asks && x.set == p.set && x.seen == p.seen && slices.Equal(x.ranks, p.ranks) &&
		slices.Equal(x.at, p.at) && slices.Equal(x.times, p.times)
}

// newPart appends an empty part. It reuses the memory of an earlier part if there is one.
func (c *Combiner) newPart() *part {
	x := extend(&c.parts)
	x.hits.Reset()
	clear(x.requests)
	*x = part{ranks: x.ranks[:0], at: x.at[:0], times: x.times[:0], frame: x.frame[:0], hits: x.hits,
		requests: x.requests[:0]}
	return x
}

// extend appends an element to *s and returns it. If *s has capacity for it, the element has the value of an
// earlier use, whose memory the caller may reuse.
func extend[T any](s *[]T) *T {
	if len(*s) == cap(*s) {
		*s = slices.Grow(*s, 1)
	}
	*s = (*s)[:len(*s)+1]
	return &(*s)[len(*s)-1]
}

// pass passes on a frame of the ranks c.from, not of a group. If other ranks have sent the same frame in this
// turn, and later frames of none of the ranks were passed on, they share a part.
func (c *Combiner) pass(frame []byte) {
	first := 0
	for _, i := range c.from {
		first = max(first, c.lastPart(i)+1)
	}
	at := slices.IndexFunc(c.parts[first:], func(x part) bool {
		return !x.asks && bytes.Equal(x.frame, frame)
	})
	if at < 0 {
		x := c.newPart()
		x.frame = append(x.frame, frame...)
		at = len(c.parts) - 1
	} else {
		at += first
	}
	x := &c.parts[at]
	for j, i := range c.from {
		c.setPart(i, at)
		x.ranks, x.at = append(x.ranks, i), append(x.at, c.at[j])
	}
}

// passUp passes on a frame of the ranks c.from that the leader has made.
func (c *Combiner) passUp(u *message.Up) {
	c.frame = c.appendUp(c.frame[:0], u)
	c.pass(c.frame)
}

// passOwn passes on a frame that the leader has made in the name of rank i.
func (c *Combiner) passOwn(i int, u *message.Up) {
	from, at := c.from, c.at
	c.from, c.at = append(c.own[:0], i), append(c.ownAt[:0], c.now)
	c.passUp(u)
	c.own, c.ownAt, c.from, c.at = c.from, c.at, from, at
}

func (c *Combiner) appendUp(b []byte, u *message.Up) []byte {
	b, err := message.AppendUp(b, u)
	if err != nil {
		panic(err) // cannot happen, because the leader has decoded everything in the frame
	}
	return b
}

// passBeat passes on the heartbeat of rank i that is held, if there is one.
func (c *Combiner) passBeat(i int) {
	if k := &c.ranks[i]; k.beat {
		k.beat = false
		c.passOwn(i, &message.Up{Type: message.UpHeartbeat, Seen: k.seen})
	}
}

// Lost records that the connection to a rank behind the leader has ended.
func (c *Combiner) Lost(r topo.Rank, reason string) {
	if k := &c.ranks[c.index(r)]; !k.closed {
		k.closed = true
		c.passOwn(0, &message.Up{Type: message.UpLost, Seen: c.ranks[0].seen, Suspect: r, Reason: reason})
	}
}

// Fault records that a rank behind the leader has broken the protocol on its connection, which still works,
// so that the rank receives the verdict too.
func (c *Combiner) Fault(r topo.Rank, reason string) {
	c.passOwn(0, &message.Up{Type: message.UpFault, Seen: c.ranks[0].seen, Suspect: r, Reason: reason})
}

// leads reports whether a rank behind the leader has not sent bye.
func (c *Combiner) leads() bool {
	return slices.ContainsFunc(c.ranks[1:c.size], func(k ledRank) bool { return !k.bye && !k.closed })
}

// Down applies a frame from rank 0, which the caller then sends to the given ranks, or to the leader and all
// ranks behind it if none are given.
func (c *Combiner) Down(to []topo.Rank, d *message.Down) {
	sent := func(k *ledRank) {
		k.lastSent = c.now
		k.closed = k.closed || d.Type == message.DownClose
	}
	for _, r := range to {
		if i := c.index(r); i >= 0 {
			sent(&c.ranks[i])
		}
	}
	if len(to) == 0 {
		for i := range c.size {
			sent(&c.ranks[i])
		}
	}
	c.told = c.told || d.Type == message.DownFail
	if d.Type != message.DownCycle {
		return
	}
	c.brief = d.Brief
	for i := range d.Sets {
		ds := &d.Sets[i]
		s := c.set(ds.Set)
		if s == nil {
			s = c.found(ds)
		}
		if s == nil || d.Cycle <= s.cycle { // the ranks may get different frames of one cycle
			continue
		}
		s.cycle = d.Cycle
		c.decided(s, ds)
	}
}

func (c *Combiner) set(id topo.ProcessSetID) *heldSet {
	for _, s := range c.sets {
		if s.ID == id {
			return s
		}
	}
	return nil
}

// found applies the answer to the addition of a process set by its members. If the set was added, found
// returns it. Otherwise it returns nil.
func (c *Combiner) found(ds *message.DownSet) *heldSet {
	r := foundingOf(ds)
	if r == nil {
		return nil
	}
	// If this is the second frame of the cycle, a rank may have made the next request for the name already.
	if global := c.set(topo.Global); global.byName[r.Name] != nil && global.byName[r.Name].count == 0 {
		global.forget(r.Name)
	}
	if r.Kind == message.AddProcessSet {
		c.addSet(Set{ID: r.Set, Ranks: r.Ranks})
	}
	return c.set(r.Set)
}

// decided applies the decisions of a cycle about a process set.
func (c *Combiner) decided(s *heldSet, ds *message.DownSet) {
	for g := range ds.Grants {
		for _, bit := range ds.Grants[g].Bits {
			if int(bit) < len(s.bits) {
				s.bits[bit].open = false
			}
		}
		for _, r := range ds.Grants[g].Full {
			s.forget(r.Name)
			switch r.Kind {
			case message.Join:
				s.joined = false
			case message.AddProcessSet:
				if s.ID == topo.Global {
					c.addSet(Set{ID: r.Set, Ranks: r.Ranks})
				}
			case message.RemoveProcessSet:
				c.removeSet(r.Set)
			}
		}
	}
	for _, bit := range ds.Erase {
		c.erase(s, bit)
	}
	for _, p := range ds.Puts {
		s.bound = max(s.bound, p.Bit+1)
		s.bit(p.Bit).name = ds.Grants[p.Grant].Full[p.Tensor].Name
	}
}

// erase passes on the held votes for a bit that the current cycle of the set erases.
func (c *Combiner) erase(s *heldSet, bit uint32) {
	s.erased = s.cycle
	s.erasures = slices.DeleteFunc(s.erasures, func(e erasure) bool {
		return !slices.ContainsFunc(s.local[:s.size], func(i int) bool { return c.seen(i) < e.cycle })
	})
	b := s.bit(bit)
	s.erasures = append(s.erasures, erasure{bit, s.cycle, b.name})
	if b.count > 0 || b.open { // a vote for the name is held or was passed on
		c.openName(s, b.name)
	}
	c.releaseBit(s, bit)
	b.open = false
}

// removeSet passes on the held votes of a set, which rank 0 ignores, and forgets the set.
func (c *Combiner) removeSet(id topo.ProcessSetID) {
	if s := c.set(id); s != nil {
		c.releaseSet(s)
		c.sets = slices.DeleteFunc(c.sets, func(x *heldSet) bool { return x == s })
	}
}

// Ready returns the parts of the frames to send to rank 0, in order, and the ranks with a connection to the
// leader to which a heartbeat must be sent. The parts are valid until Advance, and the ranks until the next
// Ready.
func (c *Combiner) Ready() (parts []message.Part, quiet []topo.Rank) {
	expired := c.now >= c.due
	if expired {
		c.expire()
	}
	if expired || len(c.parts) > 0 {
		for i := range c.size {
			c.passBeat(i)
		}
	}
	c.out = c.out[:0]
	for i := range c.parts {
		c.encode(&c.parts[i], extend(&c.out))
	}
	c.quiet = c.quiet[:0]
	for i := range c.size {
		if k := &c.ranks[i]; k.direct && !k.closed && !c.told && c.now-k.lastSent >= heartbeatPeriod {
			k.lastSent = c.now
			c.quiet = append(c.quiet, k.rank)
		}
	}
	return c.out, c.quiet
}

// expire passes on the votes and requests that were held for holdPeriod.
func (c *Combiner) expire() {
	c.due = Never
	for _, s := range c.sets {
		for bit := range s.bits {
			if s.bits[bit].count == 0 {
				continue
			}
			oldest := Never
			for _, m := range s.holders(&s.bits[bit].held) {
				if s.votes[m].Has(uint32(bit)) {
					oldest = min(oldest, s.bits[bit].at[m])
				}
			}
			if c.now-oldest >= holdPeriod {
				c.releaseBit(s, uint32(bit))
			} else {
				c.due = min(c.due, oldest+holdPeriod)
			}
		}
		for _, h := range s.requests {
			c.expireRequest(s, h)
		}
	}
}

// expireRequest passes on the requests for a name if one of them was held for holdPeriod.
func (c *Combiner) expireRequest(s *heldSet, h *heldRequest) {
	if h.count == 0 {
		return
	}
	oldest := Never
	for _, m := range s.holders(&h.held) {
		if h.made[m] != nil {
			oldest = min(oldest, h.at[m])
		}
	}
	if c.now-oldest >= holdPeriod {
		c.releaseRequest(s, h)
	} else {
		c.due = min(c.due, oldest+holdPeriod)
	}
}

// encode writes a part to p.
func (c *Combiner) encode(x *part, p *message.Part) {
	if x.asks {
		c.rest.Reset()
		c.rest.Type, c.rest.Seen = message.UpNews, x.seen
		u := c.rest.At(x.set)
		u.Hits.Or(x.hits)
		u.Requests = append(u.Requests, x.requests...)
		x.frame = c.appendUp(x.frame[:0], &c.rest)
	}
	p.Ranks, p.Held, p.Frame = p.Ranks[:0], p.Held[:0], x.frame
	groups := x.times
	p.All, p.First = x.asks && c.brief && x.count == c.size, 0
	if p.All {
		var times askTimes
		for j, i := range x.ranks {
			if c.ranks[i].members == nil {
				times.add(c.ranks[i].rank, x.at[j])
				continue
			}
			times.add(groups[0].latestBy, groups[0].latest)
			times.add(groups[0].secondBy, groups[0].second)
			times.first, groups = min(times.first, groups[0].first), groups[1:]
		}
		p.First = c.heldFor(times.first)
		p.Ranks = append(p.Ranks, times.latestBy, times.secondBy)
		p.Held = append(p.Held, c.heldFor(times.latest), c.heldFor(times.second))
		return
	}
	for j, i := range x.ranks {
		if c.ranks[i].members == nil {
			p.Ranks, p.Held = append(p.Ranks, c.ranks[i].rank), append(p.Held, c.heldFor(x.at[j]))
			continue
		}
		for _, i := range c.ranks[i].members {
			r := c.ranks[i].rank
			p.Ranks, p.Held = append(p.Ranks, r), append(p.Held, c.heldFor(groups[0].of(r)))
		}
		groups = groups[1:]
	}
	if len(x.times) > 0 { // sort the ranks
		c.sorted = c.sorted[:0]
		for j, r := range p.Ranks {
			c.sorted = append(c.sorted, uint64(r)<<32|uint64(p.Held[j]))
		}
		slices.Sort(c.sorted)
		for j, both := range c.sorted {
			p.Ranks[j], p.Held[j] = topo.Rank(both>>32), uint32(both)
		}
	}
}

// heldFor returns the time in microseconds for which a frame has been held that arrived at the given time.
func (c *Combiner) heldFor(at time.Duration) uint32 {
	return uint32(min((c.now-at)/time.Microsecond, 1<<32-1))
}

// Advance drops what the last Ready has returned.
func (c *Combiner) Advance() {
	c.parts = c.parts[:0]
	for i := range c.ranks {
		c.ranks[i].part, c.ranks[i].inner = -1, -1
	}
	for _, s := range c.sets {
		s.requests = slices.DeleteFunc(s.requests, func(h *heldRequest) bool { return h.done })
	}
}

// Fail returns the ranks behind the leader that must be sent the verdict of the leader, because the leader
// has found a verdict itself. It returns none if they were sent a verdict before.
func (c *Combiner) Fail() []topo.Rank {
	c.quiet = c.quiet[:0]
	for i := range c.size {
		if k := &c.ranks[i]; i > 0 && !k.closed && !c.told {
			c.quiet = append(c.quiet, k.rank)
		}
	}
	c.told = true
	return c.quiet
}

// Next returns the time by which Tick and Ready must be called again, even if nothing arrives before.
func (c *Combiner) Next() time.Duration {
	next := c.due
	for i := range c.size {
		if k := &c.ranks[i]; k.direct && !k.closed && !c.told {
			next = min(next, k.lastSent+heartbeatPeriod)
		}
	}
	return next
}
