package responsecache

// Unissued reports whether there are erasures that Issue has not returned yet.
func (p *Primary) Unissued() bool { return p.unissued > 0 }
