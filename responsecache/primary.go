package responsecache

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/internal/message"
)

// maxInvalidations is how often a name may be submitted with new parameters before it is no longer
// cached: a tensor whose shape changes all the time would only churn the cache.
const maxInvalidations = 3

// Primary is the coordinator's cache of one process set. It decides which responses get bits, counts the
// votes, and knows what a late vote means.
//
// Bit b in a frame whose sender had seen cycle n means the entry that b held at cycle n. A Primary
// therefore keeps erased entries until Forget says that every member has seen the erasure.
type Primary struct {
	Cache
	capacity int

	slots []slot // by bit
	// oldest and newest end the list of entries by recency (of granting); -1 if there is none.
	oldest, newest int32
	// rows has a vector for each member: the bits it voted for and that were not granted since.
	rows []message.Bits

	erased []erasedEntry
	// unissued counts the entries at the end of erased whose cycle is not known yet.
	unissued      int
	invalidations map[string]int
	evicted       bool // some entry has had to give its bit to another
}

// slot is what the Primary knows of a bit beyond its response.
type slot struct {
	put          uint64 // the cycle that put the entry
	votes        int32
	older, newer int32
	// grants counts the grants of the name, if it was never out of the cache between them; else it is 0.
	grants uint64
}

type erasedEntry struct {
	bit        uint32
	response   *message.Response
	put, erase uint64 // the entry's life; erase is the greatest number until the cycle is issued
}

// NewPrimary makes an empty cache for a process set with the given number of members. A capacity of 0
// caches nothing.
func NewPrimary(capacity, members int) *Primary {
	return &Primary{
		capacity: min(capacity, message.MaxCacheBits),
		oldest:   -1, newest: -1,
		rows:          make([]message.Bits, members),
		invalidations: make(map[string]int),
	}
}

// Vote counts a member's vote for bit, written when the member had seen the given cycle.
//
// If the entry of that cycle has been erased since, the vote is returned as the request that it stands for.
// A vote for a bit that stood for nothing, or a second one, is the member's error.
func (p *Primary) Vote(member int, bit uint32, seen uint64) (late *message.Request, err error) {
	if p.At(bit) != nil && p.slots[bit].put <= seen {
		if p.rows[member].Has(bit) {
			return nil, fmt.Errorf("responsecache: second vote for bit %d, %q", bit, p.At(bit).Name)
		}
		p.rows[member].Set(bit)
		p.slots[bit].votes++
		return nil, nil
	}
	if e := p.erasedAt(bit, seen); e != nil {
		q := e.response.Request(member)
		return &q, nil
	}
	return nil, fmt.Errorf("responsecache: vote for bit %d, which stood for nothing at cycle %d", bit, seen)
}

// NameAt returns the name that bit had at the given cycle and whether it still has it.
func (p *Primary) NameAt(bit uint32, seen uint64) (name string, current bool, err error) {
	if r := p.At(bit); r != nil && p.slots[bit].put <= seen {
		return r.Name, true, nil
	}
	if e := p.erasedAt(bit, seen); e != nil {
		return e.response.Name, false, nil
	}
	return "", false, fmt.Errorf("responsecache: bit %d stood for nothing at cycle %d", bit, seen)
}

func (p *Primary) erasedAt(bit uint32, seen uint64) *erasedEntry {
	for i := range p.erased {
		if e := &p.erased[i]; e.bit == bit && e.put <= seen && seen < e.erase {
			return e
		}
	}
	return nil
}

// Votes returns the number of members whose votes for bit are counted. The bit must stand for something.
func (p *Primary) Votes(bit uint32) int { return int(p.slots[bit].votes) }

// Voted reports whether a member's vote for bit is counted.
func (p *Primary) Voted(member int, bit uint32) bool { return p.rows[member].Has(bit) }

// Granted takes note that the entry of bit is granted: its votes are spent and it is the most recently used.
func (p *Primary) Granted(bit uint32) {
	if s := &p.slots[bit]; s.grants > 0 {
		s.grants++
	}
	p.clearVotes(bit)
	p.unlink(bit)
	p.linkNewest(bit)
}

// Grants returns the number of times that the tensor of bit was granted, or 0 if that is not known. The bit must stand for
// something.
func (p *Primary) Grants(bit uint32) uint64 { return p.slots[bit].grants }

func (p *Primary) clearVotes(bit uint32) {
	for _, row := range p.rows {
		row.Clear(bit)
	}
	p.slots[bit].votes = 0
}

// Invalidate erases bit because its tensor is submitted with other parameters.
func (p *Primary) Invalidate(bit uint32) []LateVote {
	p.invalidations[p.At(bit).Name]++
	return p.erase(bit)
}

// LateVote is a vote that an erasure turned into a request.
type LateVote struct {
	Member  int
	Request message.Request
}

// erase frees bit. The votes for it become requests: no member sends anything again.
func (p *Primary) erase(bit uint32) []LateVote {
	r := p.At(bit)
	var late []LateVote
	for m, row := range p.rows {
		if row.Has(bit) {
			late = append(late, LateVote{m, r.Request(m)})
		}
	}
	p.clearVotes(bit)
	p.unlink(bit)
	p.erased = append(p.erased, erasedEntry{bit: bit, response: r, put: p.slots[bit].put, erase: math.MaxUint64})
	p.unissued++
	if err := p.Cache.Erase(bit); err != nil {
		panic(err) // bit was taken from this cache
	}
	return late
}

// Assign gives r a bit in the given cycle: the lowest free one, else that of the least recently used
// entry without votes. Entries of pinned count as having votes. It reports false if r is not to be cached.
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
		for victim >= 0 && (p.slots[victim].votes > 0 || pinned.Has(uint32(victim)) || p.slots[victim].put == cycle) {
			victim = p.slots[victim].newer
		}
		if victim < 0 {
			return 0, false
		}
		bit = uint32(victim)
		p.evicted = true
		p.erase(bit) // without votes there is nothing to turn into requests
	}
	if err := p.Put(bit, r); err != nil {
		panic(err) // the bit and the name were just seen to be free
	}
	for len(p.slots) <= int(bit) {
		p.slots = append(p.slots, slot{})
	}
	p.slots[bit] = slot{put: cycle}
	if p.invalidations[r.Name] == 0 && !p.evicted {
		p.slots[bit].grants = 1 // r itself; the name cannot have been granted before
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

// Issue closes the given cycle: it appends to dst the bits erased since the last one. From now on a vote of
// a member that has seen the cycle cannot mean them.
func (p *Primary) Issue(cycle uint64, dst []uint32) []uint32 {
	for i := len(p.erased) - p.unissued; i < len(p.erased); i++ {
		p.erased[i].erase = cycle
		dst = append(dst, p.erased[i].bit)
	}
	p.unissued = 0
	return dst
}

// Forget drops erased entries that no member can mean any more: seen is the least cycle that all have
// seen.
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

// Remembered returns the number of erased entries that are kept for late votes.
func (p *Primary) Remembered() int { return len(p.erased) }

// Cacheable reports whether responses of kind k are worth a bit. What moves nothing is rare.
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
