package analysis

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// HeldUp says for how long one rank held up all others.
type HeldUp struct {
	Rank topo.Rank
	// Last is the number of operations that the rank asked for last of all ranks.
	Last uint64
	// Held is the wall time during which the rank held up all others. No moment counts twice, neither for one
	// rank nor for two ranks.
	Held time.Duration
}

// Held adds up for how long each rank held up all others. It follows these rules, which docs/timeline.md
// explains:
//
//  1. A rank holds up all others while they have asked for an operation and it has not.
//  2. Several operations may be in flight at the same time. While at least one operation waits for the rank,
//     and until the ranks wait for an operation before they go on, only the longest wait counts. For
//     example, a rank that is 5 ms late with a hundred operations at once holds up the others for 5 ms.
//  3. No moment counts twice. If the others wait for two ranks, for two operations, the time counts for the
//     rank that asks first. From then on it counts for the other rank. So the sum over all ranks is at most
//     the wall time.
//
// The zero value is ready to use. Times may be relative to any moment. A Held is not safe for concurrent use.
type Held struct {
	ranks []lateRank
	// charged is the end of the last period that counted for a rank.
	charged time.Duration
	begun   bool   // whether charged is set
	waited  uint64 // the number of operations that the ranks waited for
}

// lateRank has the sum of a rank, and what charge needs to know of the rank's most recent wait.
type lateRank struct {
	HeldUp
	// asked is the time at which the rank was most recently the last to ask for an operation, and waited is
	// the value of Held.waited then. longest is the longest of the waits that overlap since then. Only the
	// longest counts.
	asked, longest time.Duration
	waited         uint64
}

// NewHeld returns an empty Held with room for the given number of ranks. Add makes room for more ranks if
// needed.
func NewHeld(ranks int) Held {
	var l Held
	l.rank(topo.Rank(ranks - 1))
	return l
}

// Add counts an operation for which rank r asked last, at time asked. All other ranks had asked for it by
// others. waited is true if the ranks wait for the operation before they ask for another one, or if that is
// not known. Operations must be added in the order of asked.
func (l *Held) Add(r topo.Rank, others, asked time.Duration, waited bool) {
	if wait := asked - others; wait > 0 {
		l.charge(l.rank(r), wait, others, asked)
	}
	if waited {
		l.waited++
	}
}

// charge adds to the sum of k the part of a wait that no earlier wait covers.
func (l *Held) charge(k *lateRank, wait, others, asked time.Duration) {
	charge := wait
	if k.Last > 0 && (others <= k.asked || k.waited == l.waited) {
		charge -= k.longest
		k.longest = max(k.longest, wait)
	} else {
		k.longest = wait
	}
	k.Last++
	k.asked, k.waited = asked, l.waited
	from := others
	if l.begun {
		from = max(from, l.charged)
	}
	if charge = min(charge, asked-from); charge > 0 {
		k.Held += charge
		l.charged, l.begun = from+charge, true
	}
}

// rank returns the entry of a rank, and makes room for it if needed.
func (l *Held) rank(r topo.Rank) *lateRank {
	for len(l.ranks) <= int(r) {
		l.ranks = append(l.ranks, lateRank{HeldUp: HeldUp{Rank: topo.Rank(len(l.ranks))}})
	}
	return &l.ranks[r]
}

// Ranks returns the sums so far, indexed by rank.
func (l *Held) Ranks() []HeldUp {
	all := make([]HeldUp, len(l.ranks))
	for r := range l.ranks {
		all[r] = l.ranks[r].HeldUp
	}
	return all
}
