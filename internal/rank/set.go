package rank

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Set is a process set of a job, as one rank sees it.
type Set struct {
	ID    topo.ProcessSetID
	Ranks []topo.Rank // in ascending order
	Me    int         // the position of this rank in Ranks, or -1 if it is not a member
	// ByMembers is set if only the members have added the set. Only they know it, and only they remove it.
	ByMembers bool

	unnamed [message.NumKinds]atomic.Int64 // number of unnamed calls at this rank, by kind
	joined  atomic.Bool                    // whether this rank has joined while some rank has not joined yet
}

// IsRoot reports whether root is this rank, which must be a member.
func (s *Set) IsRoot(root int) bool { return int(s.Ranks[s.Me]) == root }

// Size returns the number of members.
func (s *Set) Size() int { return len(s.Ranks) }

// String returns a text such as "process set 2 of ranks [0 3]".
func (s *Set) String() string { return fmt.Sprintf("process set %d of ranks %v", s.ID, s.Ranks) }

// Release ends this rank's join of s. The caller calls it when all ranks have joined or the join has failed.
func (s *Set) Release() {
	// Ranks that joined early have made fewer unnamed calls than other ranks. No call is in flight now, so
	// all ranks can reset the counters to 0.
	for i := range s.unnamed {
		s.unnamed[i].Store(0)
	}
	s.joined.Store(false)
}

// setTable has the process sets of a rank.
type setTable struct {
	mu  sync.Mutex
	all []*Set // in ascending order of IDs
}

func bySetID(s *Set, id topo.ProcessSetID) int { return int(s.ID) - int(id) }

// newSet adds a process set to the table when the ranks have agreed on it.
func (r *Rank) newSet(id topo.ProcessSetID, ranks []topo.Rank, byMembers bool) *Set {
	s := &Set{ID: id, Ranks: ranks, Me: slices.Index(ranks, topo.Rank(r.Place.Rank)), ByMembers: byMembers}
	t := &r.sets
	t.mu.Lock()
	i, _ := slices.BinarySearchFunc(t.all, id, bySetID)
	t.all = slices.Insert(t.all, i, s)
	t.mu.Unlock()
	if r.Watch != nil { // not in Start, and not with a sidecar
		r.Watch.timeline.added(s)
	}
	return s
}

// removeSet removes a process set from the table when the ranks have agreed on the removal.
func (r *Rank) removeSet(s *Set) {
	r.sets.mu.Lock()
	r.sets.all = slices.DeleteFunc(r.sets.all, func(other *Set) bool { return other == s })
	r.sets.mu.Unlock()
	if r.Watch != nil {
		r.Watch.timeline.removed(s)
	}
}

// Sets returns the process sets that exist and that this rank knows, in ascending order of ID. The first one
// is the set of all ranks.
func (r *Rank) Sets() []*Set {
	r.sets.mu.Lock()
	defer r.sets.mu.Unlock()
	return slices.Clone(r.sets.all)
}

// FindSet returns the process set with the given ID, or nil if there is none.
func (r *Rank) FindSet(id int) *Set {
	r.sets.mu.Lock()
	defer r.sets.mu.Unlock()
	i, ok := slices.BinarySearchFunc(r.sets.all, topo.ProcessSetID(id), bySetID)
	if !ok {
		return nil
	}
	return r.sets.all[i]
}

// members returns the members of each process set, by ID. It omits the global set.
func (r *Rank) members() map[topo.ProcessSetID][]topo.Rank {
	m := make(map[topo.ProcessSetID][]topo.Rank)
	for _, s := range r.Sets()[1:] {
		m[s.ID] = s.Ranks
	}
	return m
}

// membersOf checks the ranks for a process set and returns them in ascending order.
func membersOf(ranks []int, size int) ([]topo.Rank, error) {
	if len(ranks) == 0 {
		return nil, fmt.Errorf("got a process set without ranks")
	}
	sorted := slices.Sorted(slices.Values(ranks))
	set := make([]topo.Rank, len(sorted))
	for i, r := range sorted {
		switch {
		case r < 0 || r >= size:
			return nil, fmt.Errorf("got rank %d, want 0 to %d", r, size-1)
		case i > 0 && r == sorted[i-1]:
			return nil, fmt.Errorf("got rank %d twice in %v", r, ranks)
		}
		set[i] = topo.Rank(r)
	}
	return set, nil
}

// staticSets checks the process sets that were passed to Start and returns them with their IDs.
func staticSets(given [][]int, size int) ([]controller.Set, error) {
	if len(given) >= message.MaxSets {
		return nil, fmt.Errorf("got %d process sets, want fewer than %d", len(given), message.MaxSets)
	}
	sets := []controller.Set{controller.Global(size)}
	for k, ranks := range given {
		set, err := membersOf(ranks, size)
		if err != nil {
			return nil, fmt.Errorf("process set %d: %w", k+1, err)
		}
		for _, other := range sets {
			if slices.Equal(other.Ranks, set) {
				return nil, fmt.Errorf(
					"process set %d is a duplicate of process set %d: both have the ranks %v", k+1, other.ID,
					set)
			}
		}
		sets = append(sets, controller.Set{ID: topo.ProcessSetID(k + 1), Ranks: set})
	}
	return sets[1:], nil
}

// maxSetsText is the maximum length of a list of process sets that a rank sends to the other ranks in full.
// maxRanksText is the maximum length of the list of members in the name of a request to add a process set.
const (
	maxSetsText  = 4096
	maxRanksText = 256
)

// setsText returns a text that describes the process sets. If two ranks were given the same process sets,
// their texts are equal.
func setsText(sets []controller.Set) string {
	var b strings.Builder
	for _, s := range sets {
		fmt.Fprint(&b, s.Ranks)
	}
	return short(b.String(), maxSetsText, "sets", len(sets))
}

// short returns text, or a hash of it and how many things it describes if it has more than limit bytes.
func short(text string, limit int, things string, n int) string {
	if len(text) <= limit {
		return text
	}
	hash := sha256.Sum256([]byte(text))
	return fmt.Sprintf("%d %s with hash %s", n, things, hex.EncodeToString(hash[:]))
}

// TimeoutOf converts a timeout in seconds to a Duration. 0 stands for the timeout of the settings.
func TimeoutOf(seconds float64) (time.Duration, error) {
	if seconds != 0 && !(seconds >= 1e-9 && seconds < math.MaxInt64/1e9) {
		return 0, fmt.Errorf("got a timeout of %v s, want 0 or at least 1e-9 s and less than 2^63 ns",
			seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
