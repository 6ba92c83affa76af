package analysis

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Held measures for how long each rank held up all others. It follows these rules, which docs/timeline.md
// explains:
//
//  1. A rank holds up all others while they have asked for an operation and it has not.
//  2. Waits for the same rank are not added up if they overlap, or if the ranks waited for no operation between
//     two of the waits. Of such waits only the longest counts. For example, a rank that is 5 ms late with a
//     hundred operations at once holds up the other ranks for 5 ms.
//  3. No moment counts twice. If the other ranks wait for two ranks, for two operations, the time counts for the
//     rank that asks first. The time after it has asked counts for the other rank. So the sum over all ranks
//     is at most the wall time.
//
// The zero value is ready to use. Times may be relative to any moment, which must be the same for all calls.
// A Held is not safe for concurrent use.
type Held struct {
	ranks []lateRank
	// charged is the end of the last period that was charged to a rank.
	charged time.Duration
	begun   bool   // set if charged has a value
	waited  uint64 // the number of operations so far for which ranks had to wait
}

// lateRank has the result for a rank, and what the method charge needs to know about the rank's most recent
// waits.
type lateRank struct {
	trace.HeldUp
	// asked is the time of the rank's most recent request that was the last of all ranks' requests for its
	// operation. waited is the value of Held.waited at that time. longest is the longest of the most recent
	// waits of which, by rule 2 of Held, only the longest counts.
	asked, longest time.Duration
	waited         uint64
}

// NewHeld returns an empty Held with room for the given number of ranks. Add allocates room for further ranks
// if needed.
func NewHeld(ranks int) Held {
	var l Held
	l.rank(topo.Rank(ranks - 1))
	return l
}

// Add counts an operation for which rank r was the last to ask. The argument asked is the time at which r
// asked, and the argument others is the time by which all other ranks had asked. The argument waited is true
// if the ranks wait for this operation before they ask for another one, or if this is not known. Operations
// must be added in the order of the times at which their last rank asked. Add returns the period that it has
// charged to r. If there is none, from equals to.
func (l *Held) Add(r topo.Rank, others, asked time.Duration, waited bool) (from, to time.Duration) {
	if wait := asked - others; wait > 0 {
		from, to = l.charge(l.rank(r), wait, others, asked)
	}
	if waited {
		l.waited++
	}
	return from, to
}

// charge adds a wait to the time for which rank k held up the other ranks. It leaves out the part of the wait
// that earlier waits cover. It returns the period that it has charged.
func (l *Held) charge(k *lateRank, wait, others, asked time.Duration) (from, to time.Duration) {
	charge := wait
	if k.Last > 0 && (others <= k.asked || k.waited == l.waited) {
		charge -= k.longest
		k.longest = max(k.longest, wait)
	} else {
		k.longest = wait
	}
	k.Last++
	k.asked, k.waited = asked, l.waited
	from = others
	if l.begun {
		from = max(from, l.charged)
	}
	if charge = min(charge, asked-from); charge <= 0 {
		return from, from
	}
	k.Held += charge
	l.charged, l.begun = from+charge, true
	return from, from + charge
}

// Clone returns a copy of l.
func (l *Held) Clone() Held {
	c := *l
	c.ranks = slices.Clone(l.ranks)
	return c
}

// rank returns the entry of a rank, and allocates it if needed.
func (l *Held) rank(r topo.Rank) *lateRank {
	for len(l.ranks) <= int(r) {
		l.ranks = append(l.ranks, lateRank{HeldUp: trace.HeldUp{Rank: topo.Rank(len(l.ranks))}})
	}
	return &l.ranks[r]
}

// Ranks returns the results so far, indexed by rank.
func (l *Held) Ranks() []trace.HeldUp {
	all := make([]trace.HeldUp, len(l.ranks))
	for r := range l.ranks {
		all[r] = l.ranks[r].HeldUp
	}
	return all
}
