package responsecache

import "github.com/gohvd/gohvd/internal/message"

// Ready returns the bits for which every member has voted. It computes them as the bitwise AND of all
// members' votes. The Primary instead counts the votes for each bit, and tests compare these counts with
// Ready.
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

// Unissued reports whether there are erasures that Issue has not returned yet.
func (p *Primary) Unissued() bool { return p.unissued > 0 }
