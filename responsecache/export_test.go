package responsecache

import "github.com/gohvd/gohvd/internal/message"

// Ready returns the AND of all members' votes: the bits for which every member has voted. The Primary itself
// counts votes as they arrive, and tests compare its counts with Ready.
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
