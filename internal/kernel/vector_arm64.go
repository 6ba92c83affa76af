//go:build !noasm

package kernel

// levels returns the level for arm64. NEON is part of all arm64 processors that run Linux.
func levels() []level {
	return []level{{name: "neon", vectorize: functionsNEON.vectorize, stream: stream}}
}

// stream copies src to dst. Arm has no stores that are certain to bypass the caches: STNP is a hint, and
// processors also detect a long run of stores to whole lines by themselves and stop caching it. Neither needs
// a barrier (DMB): unlike on amd64, such stores are ordered as all others are, by the store-release (STLR) or
// the atomic instruction that implements an atomic store in Go.
func stream(dst, src []byte) { copy(dst, src) }
