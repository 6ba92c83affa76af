package responsecache

import "github.com/gohvd/gohvd/internal/message"

// Ready returns the AND of all rows: the bits that every member has voted for. The Primary counts votes as
// they arrive; tests compare the counts with Ready.
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

// Unissued reports whether there are erasures for which Issue was not called yet.
func (p *Primary) Unissued() bool { return p.unissued > 0 }
