package hvd

import "github.com/gohvd/gohvd/internal/rank"

// Inside returns the rank.Rank that e wraps.
func (e *Engine) Inside() *rank.Rank { return &e.rank }

// Public is public.
var Public = public
