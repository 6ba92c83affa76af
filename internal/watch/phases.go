package watch

import (
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/trace"
)

// maxPieces limits the pieces of a phases. When there are more, the older half is added up, and an operation
// that ends later does not change it.
const maxPieces = 128

// phases measures for how long the rank was in each phase. At each moment it is in one phase: the furthest
// one of its operations.
//
// The phases are computed from operations that have ended, so that nothing is to be done when an operation is
// submitted or granted. Such operations end in another order than they began, so the latest pieces can still
// change.
type phases struct {
	sums   [trace.NumPhases]time.Duration // of the time until added
	added  time.Duration
	pieces []piece // in ascending order, without gaps, from added on
	old    []piece // scratch memory
}

// piece is a time without a change of the phase. It begins where the piece before it ends.
type piece struct {
	until time.Duration
	phase trace.Phase
}

// operation records an operation that had the given times, and that has ended or is pending at the time
// until. granted and begun are 0 if it had not been granted or begun.
func (p *phases) operation(submitted, granted, begun, until time.Duration) {
	if granted == 0 {
		granted = until
	}
	if begun == 0 {
		begun = until
	}
	granted, begun = min(granted, until), min(begun, until)
	end := p.added
	if n := len(p.pieces); n > 0 {
		end = p.pieces[n-1].until
	}
	// An operation that overlaps no other one, such as one for which the program waits at once, only appends
	// pieces.
	if submitted >= end {
		p.put(submitted, trace.Computing)
		p.put(granted, trace.Waiting)
		p.put(begun, trace.Queued)
		p.put(until, trace.Communicating)
		p.trim()
		return
	}
	p.paint(submitted, granted, trace.Waiting)
	p.paint(granted, begun, trace.Queued)
	p.paint(begun, until, trace.Communicating)
}

// paint makes the time from begin to end at least the given phase.
func (p *phases) paint(begin, end time.Duration, phase trace.Phase) {
	if begin = max(begin, p.added); begin >= end {
		return
	}
	i := len(p.pieces)
	for i > 0 && p.pieces[i-1].until > begin {
		i--
	}
	at := p.added
	if i > 0 {
		at = p.pieces[i-1].until
	}
	p.old = append(p.old[:0], p.pieces[i:]...)
	p.pieces = p.pieces[:i]
	for _, q := range p.old {
		if q.phase < phase {
			p.put(min(begin, q.until), q.phase)
			p.put(min(end, q.until), phase)
		}
		p.put(q.until, q.phase)
		at = q.until
	}
	if at < begin {
		p.put(begin, trace.Computing)
	}
	p.put(end, phase)
	p.trim()
}

// trim adds up the older half of the pieces if there are too many.
func (p *phases) trim() {
	if n := maxPieces / 2; len(p.pieces) > maxPieces {
		p.sum(&p.sums, p.pieces[n-1].until)
		p.added = p.pieces[n-1].until
		p.pieces = slices.Delete(p.pieces, 0, n)
	}
}

// put appends a piece, unless it has no length.
func (p *phases) put(until time.Duration, phase trace.Phase) {
	n := len(p.pieces)
	switch {
	case n == 0 && until <= p.added || n > 0 && until <= p.pieces[n-1].until:
	case n > 0 && p.pieces[n-1].phase == phase:
		p.pieces[n-1].until = until
	default:
		p.pieces = append(p.pieces, piece{until, phase})
	}
}

// sum adds the pieces until the given time to sums.
func (p *phases) sum(sums *[trace.NumPhases]time.Duration, until time.Duration) {
	at := p.added
	for _, q := range p.pieces {
		end := min(q.until, until)
		sums[q.phase] += max(end-at, 0)
		at = max(at, end)
	}
	sums[trace.Computing] += max(until-at, 0)
}

// until returns for how long the rank was in each phase until the given time.
func (p *phases) until(now time.Duration) [trace.NumPhases]time.Duration {
	sums := p.sums
	p.sum(&sums, now)
	return sums
}
