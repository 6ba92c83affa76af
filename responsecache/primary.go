package responsecache

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// maxInvalidations limits how often a name may be submitted with new parameters. When it is reached,
// responses for the name are not cached anymore. Without this limit, a tensor whose shape changes all the
// time would fill the cache with useless entries.
const maxInvalidations = 3

// Primary is the coordinator's cache of one process set. It assigns bits to responses and counts votes. If a
// vote arrives after its entry was erased, the Primary finds the entry for which the vote was meant.
//
// A frame contains the number of the last cycle that its sender had seen. Bit b in the frame stands for the
// entry that bit b had at that cycle. So a Primary keeps erased entries until the caller of Forget reports
// that every member has seen the erasure.
type Primary struct {
	Cache
	capacity int

	slots []slot // indexed by bit
	// All entries form a list, ordered by their last grants. oldest and newest are the bits at the ends of
	// the list, or -1 if there are no entries.
	oldest, newest int32
	// voters holds for each bit a bit vector of the members whose votes for it have not been granted. It is
	// nil if no member has voted for the bit.
	voters []message.Bits

	erased []erasedEntry
	// unissued is the number of elements at the end of erased that Issue has not returned yet.
	unissued      int
	invalidations map[string]int
	evicted       bool // whether an entry was ever erased although its tensor had not changed
}

// slot holds the data of a bit except its response.
type slot struct {
	put          uint64 // the cycle in which the bit got its current entry
	votes        int32
	older, newer int32
	// grants is the number of grants of the name, or 0 if the number is unknown. It is unknown if the name
	// may have been granted before it was put into the cache.
	grants uint64
}

type erasedEntry struct {
	bit        uint32
	response   *message.Response
	put, erase uint64 // the cycles of Assign and of the erasure; erase is MaxUint64 until Issue
}

// NewPrimary returns an empty Primary. capacity is the maximum number of entries. If capacity is 0, nothing
// is cached.
func NewPrimary(capacity int) *Primary {
	return &Primary{
		capacity: min(capacity, message.MaxCacheBits),
		oldest:   -1, newest: -1,
		invalidations: make(map[string]int),
	}
}

// Vote counts a member's vote for bit. seen is the last cycle that the member had seen when it voted.
//
// The vote is for the entry that the bit had at that cycle. If that entry has been erased since then, Vote
// does not count the vote but returns the request that the vote stands for. Vote returns an error if the bit
// had no entry at that cycle, or if the member has already voted for the bit.
func (p *Primary) Vote(member int, bit uint32, seen uint64) (late *message.Request, err error) {
	if p.At(bit) != nil && p.slots[bit].put <= seen {
		if p.voters[bit].Has(uint32(member)) {
			return nil, fmt.Errorf("responsecache: got a second vote for cache bit %d (%q)", bit, p.At(bit).Name)
		}
		p.voters[bit].Set(uint32(member))
		p.slots[bit].votes++
		return nil, nil
	}
	if e := p.erasedAt(bit, seen); e != nil {
		q := e.response.Request(member)
		return &q, nil
	}
	return nil, fmt.Errorf("responsecache: got a vote for cache bit %d, which had no entry at cycle %d", bit, seen)
}

// Members is a group of members of a process set. The zero value is empty.
type Members struct {
	// Bit b of words stands for the member 64*first+b.
	first int
	words message.Bits
	count int
}

// Reset makes the group empty. It keeps the memory of the group.
func (g *Members) Reset() { g.first, g.words, g.count = 0, g.words[:0], 0 }

// Add adds a member, which must be higher than the members that were added before.
func (g *Members) Add(member int) {
	if g.count == 0 {
		g.first = member / 64
	}
	g.words.Set(uint32(member - 64*g.first))
	g.count++
}

// CanVote reports whether VoteTogether can count votes of all members of a group for bit. seen is a cycle
// that these members had seen when they voted. The votes must be for the entry that the bit has now, and none
// of the members may have voted for it.
func (p *Primary) CanVote(g *Members, bit uint32, seen uint64) bool {
	if p.At(bit) == nil || p.slots[bit].put > seen {
		return false
	}
	voters := p.voters[bit]
	for i, w := range g.words {
		if at := g.first + i; at < len(voters) && voters[at]&w != 0 {
			return false
		}
	}
	return true
}

// VoteTogether counts the votes of all members of a group for bit. CanVote must have reported true for them.
func (p *Primary) VoteTogether(g *Members, bit uint32) {
	voters := p.voters[bit]
	for len(voters) < g.first+len(g.words) {
		voters = append(voters, 0)
	}
	for i, w := range g.words {
		voters[g.first+i] |= w
	}
	p.voters[bit] = voters
	p.slots[bit].votes += int32(g.count)
}

// NameAt returns the name of the entry that bit had at the cycle seen, and whether the bit still has that
// entry.
func (p *Primary) NameAt(bit uint32, seen uint64) (name string, current bool, err error) {
	if r := p.At(bit); r != nil && p.slots[bit].put <= seen {
		return r.Name, true, nil
	}
	if e := p.erasedAt(bit, seen); e != nil {
		return e.response.Name, false, nil
	}
	return "", false, fmt.Errorf("responsecache: cache bit %d had no entry at cycle %d", bit, seen)
}

func (p *Primary) erasedAt(bit uint32, seen uint64) *erasedEntry {
	for i := range p.erased {
		if e := &p.erased[i]; e.bit == bit && e.put <= seen && seen < e.erase {
			return e
		}
	}
	return nil
}

// Votes returns the number of votes for bit. The bit must have an entry.
func (p *Primary) Votes(bit uint32) int { return int(p.slots[bit].votes) }

// Voted reports whether the member has voted for bit and the vote has not been granted.
func (p *Primary) Voted(member int, bit uint32) bool {
	return int64(bit) < int64(len(p.voters)) && p.voters[bit].Has(uint32(member))
}

// Granted records that the entry of bit was granted. It clears the votes for the entry and makes the entry
// the most recently used one.
func (p *Primary) Granted(bit uint32) {
	if s := &p.slots[bit]; s.grants > 0 {
		s.grants++
	}
	p.clearVotes(bit)
	p.unlink(bit)
	p.linkNewest(bit)
}

// Grants returns the number of times that the tensor of bit was granted, or 0 if the number is unknown. The
// bit must have an entry.
func (p *Primary) Grants(bit uint32) uint64 { return p.slots[bit].grants }

func (p *Primary) clearVotes(bit uint32) {
	clear(p.voters[bit])
	p.slots[bit].votes = 0
}

// Invalidate erases the entry of bit because its tensor was submitted with other parameters. It returns the
// votes for the entry, converted to requests.
func (p *Primary) Invalidate(bit uint32) []LateVote {
	p.invalidations[p.At(bit).Name]++
	return p.erase(bit)
}

// Drop erases the entry of bit, even though its tensor may be submitted again with the same parameters. It
// returns the votes for the entry, converted to requests.
func (p *Primary) Drop(bit uint32) []LateVote {
	p.evicted = true
	return p.erase(bit)
}

// LateVote is a vote that was converted to a request because its entry was erased.
type LateVote struct {
	Member  int
	Request message.Request
}

// erase erases the entry of bit. It returns the votes for the entry, converted to requests, so that no member
// has to send its request again.
func (p *Primary) erase(bit uint32) []LateVote {
	r := p.At(bit)
	var late []LateVote
	voters := p.voters[bit]
	for m, ok := voters.Next(0); ok; m, ok = voters.Next(m + 1) {
		late = append(late, LateVote{int(m), r.Request(int(m))})
	}
	p.clearVotes(bit)
	p.unlink(bit)
	p.erased = append(p.erased, erasedEntry{bit: bit, response: r, put: p.slots[bit].put,
		erase: math.MaxUint64})
	p.unissued++
	if err := p.Cache.Erase(bit); err != nil {
		panic(err) // cannot happen, because the bit has an entry
	}
	return late
}

// Assign puts r into the cache in the given cycle, and returns its bit. It uses the lowest free bit. If no
// bit is free, it evicts the least recently used entry that has no votes, and uses its bit. It evicts neither
// entries whose bits are in pinned nor entries that got their bits in the same cycle. If r is not put into
// the cache, Assign returns false.
func (p *Primary) Assign(r *message.Response, cycle uint64, pinned message.Bits) (bit uint32, ok bool) {
	if p.capacity == 0 || !Cacheable(r.Kind) || p.invalidations[r.Name] >= maxInvalidations {
		return 0, false
	}
	if _, taken := p.byName[r.Name]; taken {
		return 0, false
	}
	switch free, found := p.lowestFree(); {
	case found:
		bit = free
	default:
		victim := p.oldest
		for victim >= 0 && (p.slots[victim].votes > 0 || pinned.Has(uint32(victim)) ||
			p.slots[victim].put == cycle) {
			victim = p.slots[victim].newer
		}
		if victim < 0 {
			return 0, false
		}
		bit = uint32(victim)
		p.evicted = true
		p.erase(bit) // returns no votes, because the entry has none
	}
	if err := p.Put(bit, r); err != nil {
		panic(err) // cannot happen, because the bit and the name are free
	}
	for len(p.slots) <= int(bit) {
		p.slots, p.voters = append(p.slots, slot{}), append(p.voters, nil)
	}
	p.slots[bit] = slot{put: cycle}
	if p.invalidations[r.Name] == 0 && !p.evicted {
		p.slots[bit].grants = 1 // this is the first grant of the name
	}
	p.linkNewest(bit)
	return bit, true
}

func (p *Primary) lowestFree() (uint32, bool) {
	if p.Len() >= p.capacity {
		return 0, false
	}
	for bit, r := range p.entries {
		if r == nil {
			return uint32(bit), true
		}
	}
	return uint32(len(p.entries)), true
}

// Issue ends the given cycle. It appends to dst the bits that were erased since the last call. A member that
// has seen this cycle does not use these bits to vote for the erased entries anymore.
func (p *Primary) Issue(cycle uint64, dst []uint32) []uint32 {
	for i := len(p.erased) - p.unissued; i < len(p.erased); i++ {
		p.erased[i].erase = cycle
		dst = append(dst, p.erased[i].bit)
	}
	p.unissued = 0
	return dst
}

// Forget drops the erased entries for which no vote can arrive anymore. seen is the last cycle that all
// members have seen.
func (p *Primary) Forget(seen uint64) {
	kept := p.erased[:0]
	for _, e := range p.erased {
		if e.erase > seen {
			kept = append(kept, e)
		}
	}
	clear(p.erased[len(kept):])
	p.erased = kept
}

// Remembered returns the number of erased entries that the Primary keeps for late votes.
func (p *Primary) Remembered() int { return len(p.erased) }

// Cacheable reports whether responses of kind k are cached. Only kinds that move data are cached, because
// other kinds are rare.
func Cacheable(k message.Kind) bool { return k.MovesData() }

func (p *Primary) linkNewest(bit uint32) {
	s := &p.slots[bit]
	s.older, s.newer = p.newest, -1
	if p.newest >= 0 {
		p.slots[p.newest].newer = int32(bit)
	} else {
		p.oldest = int32(bit)
	}
	p.newest = int32(bit)
}

func (p *Primary) unlink(bit uint32) {
	s := &p.slots[bit]
	if s.older >= 0 {
		p.slots[s.older].newer = s.newer
	} else {
		p.oldest = s.newer
	}
	if s.newer >= 0 {
		p.slots[s.newer].older = s.older
	} else {
		p.newest = s.older
	}
}
