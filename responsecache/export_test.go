package responsecache

import "github.com/gohvd/gohvd/internal/message"

// Ready returns the bits for which every member has voted, computed as the bitwise AND of all members' votes.
// The Primary counts the votes for each bit instead. Tests compare its counts with Ready.
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

// Unissued reports whether there are erasures that no call of Issue has returned.
func (p *Primary) Unissued() bool { return p.unissued > 0 }
