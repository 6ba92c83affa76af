package analysis

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// HeldUp is how often a rank was the last to ask for an operation, and for how long it held up all others.
type HeldUp struct {
	Rank topo.Rank
	Last uint64
	// Held is wall time: no moment is in it twice, nor in that of two ranks.
	Held time.Duration
}

// Held adds up for how long each rank held up all others. It keeps these rules, which docs/timeline.md explains:
//
//  1. A rank holds up all others while they have asked for an operation and it has not.
//  2. Operations are in flight side by side. Until the ranks wait for one before they go on, and while there is always one that
//     waits for the rank, only the longest wait counts: a rank that is 5 ms behind with a hundred operations holds up the others
//     for 5 ms.
//  3. No moment counts twice: if the others wait for two ranks, for two operations, it counts for the rank that asks first, and
//     for the other from then on. So the sum over all ranks is at most the wall time.
//
// The zero value is ready to use. Times may be relative to anything.
type Held struct {
	ranks []lateRank
	// charged is the end of the last stretch of time that counted for a rank.
	charged time.Duration
	begun   bool   // charged is set
	waited  uint64 // how many operations were waited for
}

type lateRank struct {
	HeldUp
	// asked is when the rank, as the last one, asked for an operation most recently, when so many had been waited for. longest is the
	// longest wait of those of which only that counts.
	asked, longest time.Duration
	waited         uint64
}

// NewHeld makes one with room for so many ranks.
func NewHeld(ranks int) Held {
	var l Held
	l.rank(topo.Rank(ranks - 1))
	return l
}

// Add counts an operation for which a rank was the last to ask, at asked, when all others had asked by others. The ranks wait for it
// before they ask for another, unless waited is false; it is true if that is not known. Operations come in the order of asked.
func (l *Held) Add(r topo.Rank, others, asked time.Duration, waited bool) {
	if wait := asked - others; wait > 0 {
		l.charge(l.rank(r), wait, others, asked)
	}
	if waited {
		l.waited++
	}
}

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

// rank finds a rank, and makes room for it if there is none.
func (l *Held) rank(r topo.Rank) *lateRank {
	for len(l.ranks) <= int(r) {
		l.ranks = append(l.ranks, lateRank{HeldUp: HeldUp{Rank: topo.Rank(len(l.ranks))}})
	}
	return &l.ranks[r]
}

// Ranks returns the sums so far, by rank.
func (l *Held) Ranks() []HeldUp {
	all := make([]HeldUp, len(l.ranks))
	for r := range l.ranks {
		all[r] = l.ranks[r].HeldUp
	}
	return all
}
