package controller

import (
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// joinState records which members of a process set have joined. A member that has joined makes no more
// requests until all members have joined.
type joinState struct {
	// The following slices have an element for each member.
	members []bool          // whether the member has joined
	empty   []bool          // whether the member has joined with empty contributions
	devices []tensor.Device // where the member keeps its neutral elements
	names   []string        // the name of each member's join, or "" if the member has not joined
	count   int
	last    int // the member that joined last
}

func newJoinState(members int) joinState {
	return joinState{members: make([]bool, members), empty: make([]bool, members),
		devices: make([]tensor.Device, members), names: make([]string, members)}
}

func (j *joinState) has(member int) bool { return j.members[member] }

// without returns how many of the joined members have not made a request. The function asked reports whether
// a member has made it.
func (j *joinState) without(asked func(member int) bool) int {
	if j.count == 0 {
		return 0
	}
	n := 0
	for m, joined := range j.members {
		if joined && !asked(m) {
			n++
		}
	}
	return n
}

func (j *joinState) add(member int, q *message.Request) {
	j.members[member], j.empty[member], j.devices[member], j.names[member] = true, q.Empty, q.Device, q.Name
	j.last = member
	j.count++
}

func (j *joinState) reset() {
	clear(j.members)
	clear(j.empty)
	clear(j.devices)
	clear(j.names)
	j.count = 0
}

// join records a member's join. It completes the tensors that were requested in full and waited only for this
// member. For the cached tensors, the caller then calls joinVotes.
func (s *setState) join(member int, q *message.Request) {
	s.joined.add(member, q)
	s.completeRows()
}

// joinVotes completes the cached tensors that waited only for a member that has just joined, in ascending
// order of bits.
func (s *setState) joinVotes(member int) {
	for bit := range s.cache.Bound() {
		if s.cache.At(bit) != nil && s.cache.Votes(bit) > 0 && !s.cache.Voted(member, bit) &&
			s.bitComplete(bit) {
			s.completeBit(bit)
		}
	}
}

// joinAll answers the joins when all members have joined. This answer comes after all other responses,
// because members make no more requests until they get it.
func (s *setState) joinAll() {
	if s.joined.count == 0 || s.joined.count < len(s.Ranks) {
		return
	}
	s.ready = append(s.ready, s.held.fail("all ranks have joined")...)
	s.ready = append(s.ready, readyItem{response: &message.Response{
		Kind: message.Join, Name: s.joined.names[0], Root: s.Ranks[s.joined.last],
	}})
}

// joining returns the members that have not joined yet.
func (s *setState) joining() []topo.Rank { return s.missing(func(int) bool { return false }) }

// needsAll reports whether the response to an operation of kind k may depend on which members have joined. It
// does not if neutral elements can always take the place of the data of joined members.
func needsAll(k message.Kind) bool {
	switch k {
	case message.Allreduce, message.Barrier:
		return false
	}
	return true
}
