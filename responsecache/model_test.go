package responsecache_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/responsecache"
)

var seedFlag = flag.Uint64("seed", 0, "replay the random run of this seed only")

// model is a simple implementation of a Primary, to which the tests compare the Primary. It stores the order
// of the last grants in a slice, and the votes as one flag each. It keeps a copy of the cache for each cycle,
// in which it looks up the entry that a bit had at that cycle.
type model struct {
	capacity, members int
	entries           map[uint32]*entry
	order             []uint32 // the bits, with the least recently granted one first
	invalidations     map[string]int
	unissued          []uint32
	erasures          []uint64 // the cycles of the issued erasures that are still remembered
	history           []map[uint32]*message.Response
}

type entry struct {
	r     *message.Response
	put   uint64
	votes []bool
}

func (m *model) cycle() uint64 { return uint64(len(m.history) - 1) }

func (m *model) bitOf(name string) (uint32, bool) {
	for bit, e := range m.entries {
		if e.r.Name == name {
			return bit, true
		}
	}
	return 0, false
}

func (m *model) erase(bit uint32) (late []responsecache.LateVote) {
	e := m.entries[bit]
	for i, voted := range e.votes {
		if voted {
			late = append(late, responsecache.LateVote{Member: i, Request: e.r.Request(i)})
		}
	}
	delete(m.entries, bit)
	m.order = slices.DeleteFunc(m.order, func(b uint32) bool { return b == bit })
	m.unissued = append(m.unissued, bit)
	return late
}

func (m *model) assign(r *message.Response, cycle uint64, pinned message.Bits) (uint32, bool) {
	if _, cached := m.bitOf(r.Name); cached || m.capacity == 0 || m.invalidations[r.Name] >= 3 {
		return 0, false
	}
	bit := uint32(0)
	for m.entries[bit] != nil {
		bit++
	}
	if len(m.entries) == m.capacity {
		i := slices.IndexFunc(m.order, func(b uint32) bool {
			return m.entries[b].put != cycle && !pinned.Has(b) && !slices.Contains(m.entries[b].votes, true)
		})
		if i < 0 {
			return 0, false
		}
		bit = m.order[i]
		m.erase(bit)
	}
	m.entries[bit] = &entry{r: r, put: cycle, votes: make([]bool, m.members)}
	m.order = append(m.order, bit)
	return bit, true
}

func (m *model) votes(bit uint32) (n int) {
	for _, voted := range m.entries[bit].votes {
		if voted {
			n++
		}
	}
	return n
}

func (m *model) complete() (bits []uint32) {
	for bit, e := range m.entries {
		if !slices.Contains(e.votes, false) {
			bits = append(bits, bit)
		}
	}
	slices.Sort(bits)
	return bits
}

// For random calls, a Primary behaves like the model. If the erasures and puts of a Primary are applied to a
// Cache, the Cache stays equal to the Primary.
func TestPrimaryIsItsModel(t *testing.T) {
	seeds := []uint64{*seedFlag}
	if *seedFlag == 0 {
		seeds = nil
		for range 300 {
			seeds = append(seeds, 1+rand.Uint64N(1<<62))
		}
	}
	late := 0
	for _, seed := range seeds {
		late += playModel(t, seed)
	}
	if *seedFlag == 0 && late == 0 {
		t.Error("no run had a late vote, want at least one")
	}
}

func playModel(t *testing.T, seed uint64) (lateVotes int) {
	rng := rand.New(rand.NewPCG(seed, 0))
	members := 1 + rng.IntN(4)
	if rng.IntN(20) == 0 {
		members += 62 // so that vectors of members have several words
	}
	m := &model{
		capacity: rng.IntN(6), members: members,
		entries: make(map[uint32]*entry), invalidations: make(map[string]int),
		history: []map[uint32]*message.Response{{}},
	}
	p := responsecache.NewPrimary(m.capacity)
	var follower responsecache.Cache
	seen := make([]uint64, members)
	check := func(ok bool, format string, args ...any) {
		t.Helper()
		if !ok {
			t.Fatalf("%s\nreplay with -run %s -seed %d", fmt.Sprintf(format, args...), t.Name(), seed)
		}
	}
	randomBit := func() uint32 { return uint32(rng.IntN(m.capacity + 2)) }
	for range 400 {
		switch rng.IntN(8) {
		default: // a member votes, having seen any earlier cycle
			i, bit := rng.IntN(members), randomBit()
			was := m.history[seen[i]][bit]
			name, current, nameErr := p.NameAt(bit, seen[i])
			request, err := p.Vote(i, bit, seen[i])
			e := m.entries[bit]
			switch {
			case was == nil:
				check(err != nil && nameErr != nil, "bit %d was free at cycle %d: vote is %v, name %q", bit,
					seen[i], err, name)
			case e == nil || e.r != was:
				lateVotes++
				check(err == nil && request != nil && reflect.DeepEqual(*request, was.Request(i)),
					"late vote for bit %d of cycle %d, %q: got %v, %v", bit, seen[i], was.Name, request, err)
				check(nameErr == nil && name == was.Name &&
					!current, "bit %d at cycle %d was %q: got %q, %v, %v", bit, seen[i], was.Name, name,
					current, nameErr)
			default:
				check(nameErr == nil && name == was.Name &&
					current, "bit %d at cycle %d is %q: got %q, %v, %v", bit, seen[i], was.Name, name,
					current, nameErr)
				check((err != nil) == e.votes[i] && request == nil,
					"vote for bit %d, voted before %v: got %v, %v", bit, e.votes[i], request, err)
				e.votes[i] = true
				check(p.Votes(bit) == m.votes(bit), "vote for bit %d: %d votes of %v", bit, p.Votes(bit),
					e.votes)
			}
		case 4: // members vote together
			var g responsecache.Members
			bit, cycle := randomBit(), rng.Uint64N(m.cycle()+1)
			e, together := m.entries[bit], []int(nil)
			want := e != nil && m.history[cycle][bit] == e.r
			for i := range members {
				if rng.IntN(2) == 0 {
					g.Add(i)
					together = append(together, i)
					want = want && !e.votes[i]
				}
			}
			check(p.CanVote(&g, bit, cycle) == want, "votes of %v for bit %d of cycle %d: want %v", together, bit,
				cycle, want)
			if want {
				p.VoteTogether(&g, bit)
				for _, i := range together {
					e.votes[i] = true
				}
				check(p.Votes(bit) == m.votes(bit), "votes of %v for bit %d: %d votes of %v", together, bit,
					p.Votes(bit), e.votes)
			}
		case 0: // the parameters of a tensor change, which erases its bit
			bit := randomBit()
			if e := m.entries[bit]; e != nil && slices.Contains(e.votes, false) {
				m.invalidations[e.r.Name]++
				want := m.erase(bit)
				got := p.Invalidate(bit)
				check(len(got) == len(want) && (len(got) == 0 || reflect.DeepEqual(got, want)),
					"invalidate bit %d: got %v, want %v", bit, got, want)
			}
		case 1, 2: // a cycle grants some bits and assigns new ones
			cycle := m.cycle() + 1
			for _, bit := range m.complete() {
				if rng.IntN(2) == 0 {
					continue
				}
				clear(m.entries[bit].votes)
				m.order = append(slices.DeleteFunc(m.order, func(b uint32) bool { return b == bit }), bit)
				p.Granted(bit)
			}
			var pinned message.Bits
			pinned.Set(randomBit())
			puts := make(map[uint32]*message.Response)
			for range rng.IntN(4) {
				r := allreduce(string(rune('a'+rng.IntN(9))), rng.Int64N(3))
				wantBit, want := m.assign(r, cycle, pinned)
				bit, ok := p.Assign(r, cycle, pinned)
				check(ok == want && bit == wantBit,
					"cycle %d: %q gets bit %d (%v), want bit %d (%v); capacity %d, order %v", cycle, r.Name,
					bit, ok, wantBit, want, m.capacity, m.order)
				if ok {
					puts[bit] = r
				}
			}
			check(p.Unissued() == (len(m.unissued) > 0), "unissued %v, want %v", p.Unissued(), m.unissued)
			erased := p.Issue(cycle, nil)
			check(slices.Equal(erased, m.unissued), "cycle %d erases %v, want %v", cycle, erased, m.unissued)
			for _, bit := range erased {
				m.erasures = append(m.erasures, cycle)
				check(follower.Erase(bit) == nil, "cycle %d: a follower cannot erase bit %d", cycle, bit)
			}
			for _, bit := range slices.Sorted(maps.Keys(puts)) {
				check(follower.Put(bit, puts[bit]) == nil, "cycle %d: a follower cannot put %q as bit %d",
					cycle, puts[bit].Name, bit)
			}
			m.unissued = nil
			now := make(map[uint32]*message.Response)
			for bit, e := range m.entries {
				now[bit] = e.r
			}
			m.history = append(m.history, now)
			check(p.Digest() == follower.Digest(), "cycle %d: a follower has another cache", cycle)
		case 3: // a member sees more cycles
			i := rng.IntN(members)
			seen[i] += rng.Uint64N(m.cycle() - seen[i] + 1)
			least := slices.Min(seen)
			p.Forget(least)
			m.erasures = slices.DeleteFunc(m.erasures, func(c uint64) bool { return c <= least })
			check(p.Remembered() == len(m.erasures)+len(m.unissued),
				"all have seen cycle %d: %d entries are kept, want %d and %d", least, p.Remembered(),
				len(m.erasures), len(m.unissued))
		}
		check(p.Len() == len(m.entries), "%d entries, want %d", p.Len(), len(m.entries))
		complete := m.complete()
		for bit := range uint32(m.capacity + 2) {
			check((m.entries[bit] != nil && p.Votes(bit) == members) == slices.Contains(complete, bit),
				"bit %d, complete are %v", bit, complete)
			for i := range members {
				e := m.entries[bit]
				check(p.Voted(i, bit) == (e != nil && e.votes[i]), "member %d voted for bit %d: %v", i, bit,
					p.Voted(i, bit))
			}
		}
	}
	return lateVotes
}
