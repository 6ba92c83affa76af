package responsecache

import "github.com/gohvd/gohvd/internal/message"

// Ready returns the AND of all rows: the bits that every member has voted for. Votes are counted as they arrive; this is
// the plain twin of the same thing.
func (p *Primary) Ready() message.Bits {
	var all message.Bits
	for i, row := range p.rows {
		if i == 0 {
			all.Or(row)
		} else {
			all.And(row)
		}
	}
	return all
}

// Unissued reports whether erasures wait for a cycle.
func (p *Primary) Unissued() bool { return p.unissued > 0 }
