package engine

import "github.com/gohvd/gohvd/internal/outcome"

// These are the errors of package outcome, for the callers of the engine.
var (
	ErrShutDown     = outcome.ErrShutDown
	ErrClosed       = outcome.ErrClosed
	ErrCutShort     = outcome.ErrCutShort
	ErrNoProcessSet = outcome.ErrNoProcessSet
)

// These are the types of errors of package outcome, for the callers of the engine.
type (
	StallError    = outcome.StallError
	UsageError    = outcome.UsageError
	MismatchError = outcome.MismatchError
	PeerError     = outcome.PeerError
	OpError       = outcome.OpError
)
