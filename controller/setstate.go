package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

// Planner is a function that chooses the backend and the algorithm for a response of the process set that has
// the given members. numBytes is the number of bytes to send for r and for the responses that are fused with
// r. t has the settings that were changed last, or is nil. A Planner must be pure.
// If it returns an error, the request is answered with that error.
type Planner func(members []topo.Rank, r *message.Response, numBytes int64,
	t *message.Tuning) (message.Backend, message.Algorithm, error)

// setState is the part of the coordinator for one process set. It holds the requests of the members in full
// (table) or as votes (cache), and the responses that will be granted next (ready).
type setState struct {
	Set
	// byMembers is set if only the members have added the set and only they may remove it.
	byMembers bool
	cache     *responsecache.Primary
	// table holds the full requests that have not been granted, by name. rows holds the same requests, in the
	// order in which each name was first requested.
	table map[string]*tableRow
	rows  []*tableRow
	// ready holds the tensors that every member has requested and that have not been granted. They are in the
	// order of the requests that completed them.
	ready  []readyItem
	held   heldGroups
	joined joinState
	// founded are the rows for process sets that only their members add, if all of these have requested it.
	// Only the global set has such rows.
	founded []*tableRow
	// granted is the number of grants so far. done is the number of grants that the lowest rank has finished.
	granted, done uint64
	// bitWaits holds the waits of cached tensors, by bit. The wait of a tensor begins with the first vote for
	// it.
	waits    *waits
	bitWaits []wait
	arrivals arrivals
	// leaving reports whether a rank has announced that it will submit nothing more.
	leaving func(topo.Rank) bool

	// fuse reuses the memory of the fields below.
	tensors []fusion.Tensor
	groups  [][]int
	plans   []plan
}

// maxShared is the largest number of different requests in a row with which a new one is compared. Requests
// for the same tensor differ by the device, of which a host has up to 16.
const maxShared = 16

type tableRow struct {
	wait
	// requests are by member, nil for a member without a request. Members whose requests are equal share one,
	// so that the row of a large job is small. shared has the requests that are shared, which are the first
	// maxShared different ones.
	requests []*message.Request
	shared   []*message.Request
	arrivals []time.Duration // by member; nil unless tracing is on
	count    int
	// named are the ranks that must make the request if it is for a process set that only its members add:
	// all ranks that the requests so far have named. It is nil if all members must make the request.
	named    message.Bits
	removal  bool // whether all requests are to remove a process set, to which ranks agree by their shutdown
	complete bool // whether the tensor is ready, held or founded
	granted  bool
}

// readyItem is a response that is ready to be granted.
type readyItem struct {
	response *message.Response
	// absent are the members that have not requested the tensor, but have joined or agree by their shutdown.
	absent []topo.Rank
	// group is the group to which the tensor belongs, or nil.
	group *group
	// row holds the requests for the tensor. It is nil if the item is cached or is a join. If cached is set,
	// the requests are the votes for bit.
	row    *tableRow
	cached bool
	bit    uint32
	// full is set if a cached item is granted in full, because response differs from the cached response.
	full bool
}

// kind returns the kind that the ranks requested. If they did not agree on a kind, it returns NoKind.
func (i *readyItem) kind() message.Kind {
	if i.response.Kind == message.Error {
		return message.NoKind
	}
	return i.response.Kind
}

// fail replaces the response of an item with an error that gives the reason.
func (i *readyItem) fail(reason string) {
	r := i.response
	i.response = &message.Response{Kind: message.Error, Name: r.Name, Text: fmt.Sprintf("%v %q: %s", r.Kind,
		r.Name, reason)}
	i.full = true
}

// policy determines how ready tensors become grants. All sets share it.
type policy struct {
	fusion fusion.Options
	plan   Planner
	sets   *setTable
	// tuning has the settings that were changed last. It is nil if none was changed.
	tuning *message.Tuning
	// cacheOff is set if no responses are cached.
	cacheOff bool
}

// plan is the backend and the algorithm for a fused response.
type plan struct {
	backend   message.Backend
	algorithm message.Algorithm
}

func newSetState(s Set, cacheCapacity int, w *waits, leaving func(topo.Rank) bool) *setState {
	return &setState{
		Set:     s,
		cache:   responsecache.NewPrimary(cacheCapacity),
		table:   make(map[string]*tableRow),
		joined:  newJoinState(len(s.Ranks)),
		waits:   w,
		leaving: leaving,
	}
}

// vote counts a member's vote for bit. seen is the last cycle that the member had applied when it voted. If
// vote returns an error, the member has broken the protocol.
func (s *setState) vote(member int, bit uint32, seen uint64) error {
	if s.joined.has(member) {
		return fmt.Errorf("got a vote for cache bit %d of process set %d after the rank had joined", bit,
			s.ID)
	}
	late, err := s.cache.Vote(member, bit, seen)
	switch {
	case err != nil:
		return err
	case late != nil:
		return s.addRequest(member, *late)
	}
	votes := s.cache.Votes(bit)
	w := s.bitWait(bit)
	if votes == 1 {
		*w = s.waits.begin(s.Ranks[member])
	} else {
		s.waits.arrived(s.Ranks[member], w)
	}
	if s.waits.trace {
		s.arrive(s.bitArrivals(bit), member)
	}
	// Compare the numbers first, because that is cheap and false for most votes.
	if votes+s.joined.count >= len(s.Ranks) && s.bitComplete(bit) {
		s.waits.over(w)
		s.completeBit(bit)
	}
	return nil
}

// canVote reports whether voteTogether can count the votes of several members for the given bits.
func (s *setState) canVote(g *responsecache.Members, bits message.Bits, seen uint64) bool {
	if s.joined.count > 0 {
		return false
	}
	for bit, ok := bits.Next(0); ok; bit, ok = bits.Next(bit + 1) {
		if !s.cache.CanVote(g, bit, seen) {
			return false
		}
	}
	return true
}

// voteTogether counts the votes of several members for the given bits, as vote does for each of them.
func (s *setState) voteTogether(g *responsecache.Members, bits message.Bits, times *askTimes) {
	for bit, ok := bits.Next(0); ok; bit, ok = bits.Next(bit + 1) {
		begun := s.cache.Votes(bit) > 0
		s.cache.VoteTogether(g, bit)
		w := s.bitWait(bit)
		s.waits.arrivedTogether(w, begun, times)
		if s.cache.Votes(bit) == len(s.Ranks) {
			s.waits.over(w)
			s.completeBit(bit)
		}
	}
}

// bitWait returns the wait of the cached tensor with the given bit.
func (s *setState) bitWait(bit uint32) *wait {
	for len(s.bitWaits) <= int(bit) {
		s.bitWaits = append(s.bitWaits, wait{})
	}
	return &s.bitWaits[bit]
}

// request applies a member's request that was sent in full. If it returns an error, the member has broken the
// protocol.
func (s *setState) request(member int, q message.Request) error {
	switch {
	case s.joined.has(member):
		return fmt.Errorf("got a request for %v %q of process set %d after the rank had joined", q.Kind,
			q.Name,
			s.ID)
	case changesSets(q.Kind) && s.checkChange(s.byMembers, &q) != nil:
		return fmt.Errorf("request for %v %q: %w", q.Kind, q.Name, s.checkChange(s.byMembers, &q))
	case q.MembersOnly && !s.mayFound(member, q.Ranks):
		return fmt.Errorf("request for %v %q: got ranks %v, want ranks of the job that include the sender", q.Kind,
			q.Name, q.Ranks)
	case q.Kind == message.Join:
		s.join(member, &q)
		return nil
	}
	// If the name is cached, turn the votes for it into requests, because a name must never be both in the
	// cache and in the table.
	if bit, ok := s.cache.BitOf(q.Name); ok {
		if s.cache.Voted(member, bit) {
			return fmt.Errorf("got a request for %v %q while a vote of the rank for it is pending", q.Kind,
				q.Name)
		}
		if err := s.invalidate(bit); err != nil {
			return err
		}
	}
	return s.addRequest(member, q)
}

// addRequest puts a request into the table. The request may be a vote that was converted, which the member
// may have sent before it joined.
func (s *setState) addRequest(member int, q message.Request) error {
	row := s.table[q.Name]
	if row == nil {
		row = &tableRow{wait: s.waits.begin(s.Ranks[member]),
			requests: make([]*message.Request, len(s.Ranks))}
		if q.MembersOnly {
			row.named = make(message.Bits, 0, 1)
		}
		s.table[q.Name] = row
		s.rows = append(s.rows, row)
	} else {
		s.waits.arrived(s.Ranks[member], &row.wait)
	}
	row.name(&q)
	if row.requests[member] != nil {
		return fmt.Errorf("got a second request for %v %q while the first is pending", q.Kind,
			q.Name)
	}
	row.requests[member] = row.share(q)
	row.count++
	s.arrive(&row.arrivals, member)
	if s.rowComplete(row) {
		s.waits.over(&row.wait)
		s.completeRow(row)
	}
	return nil
}

// canRequest reports whether requestTogether can count a request of several members.
func (s *setState) canRequest(members []topo.Rank, q *message.Request) bool {
	if q.Kind == message.Join || changesSets(q.Kind) || s.joined.count > 0 {
		return false
	}
	if _, cached := s.cache.BitOf(q.Name); cached {
		return false
	}
	row := s.table[q.Name]
	return row == nil || row.named == nil && !row.removal && !slices.ContainsFunc(members,
		func(r topo.Rank) bool { return row.requests[r] != nil })
}

// requestTogether counts a request of several members of the global set, as request does for each of them.
// canRequest must have reported true, but the members may have made the same request meanwhile, in the same
// frame, and so have broken the protocol.
func (s *setState) requestTogether(members []topo.Rank, q message.Request, times *askTimes) error {
	row := s.table[q.Name]
	switch {
	case row != nil && row.requests[members[0]] != nil:
		return fmt.Errorf("got a second request for %v %q while the first is pending", q.Kind, q.Name)
	case row == nil:
		row = &tableRow{requests: make([]*message.Request, len(s.Ranks))}
		s.table[q.Name] = row
		s.rows = append(s.rows, row)
	}
	s.waits.arrivedTogether(&row.wait, row.count > 0, times)
	shared := row.share(q)
	for _, r := range members {
		row.requests[r] = shared
	}
	row.count += len(members)
	if s.rowComplete(row) {
		s.waits.over(&row.wait)
		s.completeRow(row)
	}
	return nil
}

// share returns a request of the row that equals q, or a new one.
func (row *tableRow) share(q message.Request) *message.Request {
	for _, shared := range row.shared {
		if shared.Equal(&q) {
			return shared
		}
	}
	own := q // here, so that q is not on the heap otherwise
	if len(row.shared) < maxShared {
		row.shared = append(row.shared, &own)
	}
	return &own
}

// name records the ranks that the request q names.
func (row *tableRow) name(q *message.Request) {
	row.removal = q.Kind == message.RemoveProcessSet && (row.removal || row.count == 0)
	switch {
	case !q.MembersOnly:
		row.named = nil
	case row.named != nil:
		for _, r := range q.Ranks {
			row.named.Set(uint32(r))
		}
	}
}

// needs reports whether a member takes part in the operation of the row: it must make the request, or it has
// joined. To the removal of a process set, a member also agrees by its shutdown.
func (s *setState) needs(row *tableRow, member int) bool {
	switch {
	case row.named != nil:
		return row.named.Has(uint32(member))
	case row.removal:
		return row.requests[member] != nil || s.joined.has(member) ||
			!s.leaving(s.Ranks[member])
	}
	return true
}

// rowComplete reports whether every member has requested the row's tensor, has joined or agrees by its
// shutdown.
func (s *setState) rowComplete(row *tableRow) bool {
	if row.named != nil || row.removal {
		return len(s.rowMissing(row)) == 0
	}
	return row.count+s.joined.without(func(m int) bool {
		return row.requests[m] != nil
	}) == len(s.Ranks)
}

// completeRows completes the tensors that were requested in full and waited only for a member that has just
// joined or announced its shutdown, in the order of their first requests.
func (s *setState) completeRows() {
	for _, row := range s.rows {
		if !row.complete && s.rowComplete(row) {
			s.completeRow(row)
		}
	}
}

func (s *setState) completeRow(row *tableRow) {
	row.complete = true
	if row.named != nil {
		row.granted = true // in the set that is added
		delete(s.table, firstOf(row.requests).Name)
		s.founded = append(s.founded, row)
		return
	}
	item := readyItem{response: agree(&s.Set, row.requests, &s.joined), absent: s.absent(row.requests),
		row: row}
	s.complete(&item, groupOf(row.requests))
	for _, key := range otherGroups(row.requests) {
		s.ready = append(s.ready, s.held.failGroup(key, item.response.Text)...)
	}
}

// bitComplete reports whether every member has voted for bit or has joined.
func (s *setState) bitComplete(bit uint32) bool {
	return s.cache.Votes(bit)+s.joined.without(func(m int) bool { return s.cache.Voted(m, bit) }) == len(
		s.Ranks)
}

// completeBit makes the tensor of bit ready. The tensor is granted in full if absent members change the
// response or make the operation impossible.
func (s *setState) completeBit(bit uint32) {
	item := readyItem{response: s.cache.At(bit), cached: true, bit: bit}
	if s.joined.count > 0 {
		requests := s.votesInFull(bit)
		item.absent = s.absent(requests)
		if len(item.absent) > 0 && needsAll(item.response.Kind) {
			item.response, item.full = agree(&s.Set, requests, &s.joined), true
		}
	}
	entry := s.cache.At(bit)
	s.complete(&item, groupKey{entry.Group, entry.GroupSize})
}

// votesInFull returns, by member, the full requests that correspond to the votes for bit.
func (s *setState) votesInFull(bit uint32) []*message.Request {
	var row tableRow // so that members with equal requests share one
	requests := make([]*message.Request, len(s.Ranks))
	for m := range requests {
		if s.cache.Voted(m, bit) {
			requests[m] = row.share(s.cache.At(bit).Request(m))
		}
	}
	return requests
}

// absent returns the ranks of the members that made no request.
func (s *setState) absent(requests []*message.Request) []topo.Rank {
	var ranks []topo.Rank
	for m := range requests {
		if requests[m] == nil {
			ranks = append(ranks, s.Ranks[m])
		}
	}
	return ranks
}

// complete makes a tensor ready, because all members have requested it or have joined. If the tensor belongs
// to a group, complete holds it until the group is complete.
func (s *setState) complete(item *readyItem, key groupKey) {
	if key.name == "" {
		s.ready = append(s.ready, *item)
		return
	}
	s.ready = append(s.ready, s.held.add(*item, key)...)
}

// invalid erases bit because a member requests the tensor with other parameters. seen is the last cycle that
// the member had applied when it made the request. If bit has already been erased, invalid does nothing. If
// invalid returns an error, the member has broken the protocol.
func (s *setState) invalid(member int, bit uint32, seen uint64) error {
	name, current, err := s.cache.NameAt(bit, seen)
	switch {
	case err != nil:
		return err
	case s.joined.has(member):
		return fmt.Errorf("got an invalidation of cache bit %d (%q) of process set %d after the rank had joined",
			bit, name, s.ID)
	case !current:
		return nil
	case s.cache.Voted(member, bit):
		return fmt.Errorf("got an invalidation of cache bit %d (%q) while a vote of the rank for it is pending", bit,
			name)
	}
	return s.invalidate(bit)
}

// invalidate erases bit and turns the votes for it into requests. The tensor must not be complete: at least
// one member has neither voted for bit nor joined. A complete tensor keeps its bit while it waits for the
// gate or for its group.
func (s *setState) invalidate(bit uint32) error { return s.convert(bit, s.cache.Invalidate(bit)) }

// convert puts the requests for which votes stood into the table. The votes were for bit, whose entry was
// erased.
func (s *setState) convert(bit uint32, late []responsecache.LateVote) error {
	for _, l := range late {
		if err := s.addRequest(l.Member, l.Request); err != nil {
			return err
		}
	}
	if len(late) > 0 {
		row := s.table[late[0].Request.Name]
		row.wait = *s.bitWait(bit)
		if s.waits.trace {
			at := s.bitArrivals(bit)
			row.arrivals, *at = *at, nil
		}
	}
	return nil
}

// emptyCache erases all entries of the cache except those of complete tensors, which keep their bits until
// they are granted. After decide has granted the ready tensors, only held groups have complete tensors.
func (s *setState) emptyCache() {
	for bit := range s.cache.Bound() {
		if s.cache.At(bit) == nil || s.held.hasBit(bit) {
			continue
		}
		if err := s.convert(bit, s.cache.Drop(bit)); err != nil {
			panic(err) // cannot happen, because a cached name is not in the table
		}
	}
}

// open reports whether the gate of the set is open, which is so while at most one grant is unfinished, or if
// the rank that reports finished grants is leaving. While the gate is closed, the coordinator still counts
// votes, and later grants all tensors together that have become ready. Without the gate, it would grant each
// tensor separately as soon as its last vote arrives.
func (s *setState) open() bool { return s.granted-s.done <= 1 || s.leaving(s.Ranks[0]) }

// decide grants all ready tensors and writes the grants to d, as part of the given cycle. The entries whose
// bits are in pinned keep their bits. In lock-step, these entries have votes that the coordinator does not
// know.
func (s *setState) decide(d *message.DownSet, cycle uint64, p *policy, pinned message.Bits) {
	for i := range s.ready {
		if item := &s.ready[i]; changesSets(item.response.Kind) && !s.byMembers {
			item.response = p.sets.change(item.response, cycle)
		}
	}
	if s.byMembers && s.ends() {
		p.sets.drop(s, cycle)
	}
	s.fuse(p)
	// An absent rank has no requests from which to fill its cache.
	cacheable := s.joined.count == 0 && !p.cacheOff
	for i, group := range s.groups {
		s.grant(d, group, s.plans[i])
	}
	s.forgetRows()
	clear(s.ready)
	s.ready = s.ready[:0]
	if cacheable {
		// Assign bits only after all grants have marked their entries as recently used. Then an assignment
		// evicts an entry that was granted in this cycle only if all entries were.
		for g := range d.Grants {
			for t, r := range d.Grants[g].Full {
				if bit, ok := s.cache.Assign(r, cycle, pinned); ok {
					d.Puts = append(d.Puts, message.Put{Grant: uint32(g), Tensor: uint32(t), Bit: bit})
				}
			}
		}
	}
	if p.cacheOff {
		s.emptyCache()
	}
	d.Erase = s.cache.Issue(cycle, d.Erase)
}

// ends reports whether a set that only its members have added ends with the ready tensors, because the
// members remove it or did not agree to add it. If there is a removal, ends makes it the last ready tensor.
func (s *setState) ends() bool {
	for i, item := range s.ready {
		switch item.response.Kind {
		case message.RemoveProcessSet:
			s.ready = append(slices.Delete(s.ready, i, i+1), item)
			return true
		case message.Error:
			if s.granted == 0 { // the first grant answers the addition
				return true
			}
		}
	}
	return false
}

// fuse plans which tensors run together, and on which backend. If no backend can run a tensor, fuse turns the
// tensor into an error and plans again.
func (s *setState) fuse(p *policy) {
	for again := true; again; {
		again = false
		s.tensors, s.plans = s.tensors[:0], s.plans[:0]
		for i := range s.ready {
			s.tensors = append(s.tensors, fusion.Tensor{Response: s.ready[i].response,
				Absent: s.ready[i].absent})
		}
		s.groups = fusion.Plan(s.groups[:0], s.tensors, p.fusion)
		for _, group := range s.groups {
			plan, err := s.choose(group, p)
			if err != nil {
				s.refuse(group, err)
				again = true
			}
			s.plans = append(s.plans, plan)
		}
		for i := range s.ready {
			if item := &s.ready[i]; again && item.group != nil && item.response.Kind == message.Error &&
				!item.group.refused {
				item.group.refused = true
				item.group.fail(s.ready)
			}
		}
	}
	clear(s.tensors)
}

func (s *setState) choose(group []int, by *policy) (p plan, err error) {
	first := s.tensors[group[0]].Response
	if !first.Kind.MovesData() {
		return plan{}, nil
	}
	var numBytes int64
	for _, i := range group {
		numBytes += s.tensors[i].Response.WireBytes()
	}
	p.backend, p.algorithm, err = by.plan(s.Ranks, first, numBytes, by.tuning)
	return p, err
}

// refuse makes tensors that were planned to run together fail with the given reason, because no backend can
// run them.
func (s *setState) refuse(group []int, reason error) {
	for _, i := range group {
		s.ready[i].fail(reason.Error())
	}
}

// grant adds the grant of one fused response to d.
func (s *setState) grant(d *message.DownSet, group []int, p plan) {
	g := d.AddGrant()
	g.Backend, g.Algorithm = p.backend, p.algorithm
	g.Absent = append(g.Absent, s.ready[group[0]].absent...)
	s.keepArrivals(group)
	for _, i := range group {
		item := &s.ready[i]
		switch {
		case item.cached:
			s.cache.Granted(item.bit)
		case item.row != nil:
			item.row.granted = true
			delete(s.table, item.response.Name)
		default: // a join, which is granted when all members have joined
			s.joined.reset()
		}
		if item.cached && !item.full {
			g.Bits = append(g.Bits, item.bit)
		} else {
			g.Full = append(g.Full, item.response)
		}
	}
	s.granted++
}

// forgetRows removes the rows that were granted.
func (s *setState) forgetRows() {
	s.rows = slices.DeleteFunc(s.rows, func(r *tableRow) bool { return r.granted })
}
