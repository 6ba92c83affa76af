package hvd

import "github.com/gohvd/gohvd/internal/rank"

// Inside returns what e puts a face on.
func (e *Engine) Inside() *rank.Rank { return &e.rank }
