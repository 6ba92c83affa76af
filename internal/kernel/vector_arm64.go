//go:build !noasm

package kernel

// levels has the functions for every arm64 processor: NEON is part of all that run Linux.
func levels() []level {
	return []level{{name: "neon", vectorize: functionsNEON.vectorize, stream: stream}}
}

// stream is a plain copy. Arm has no stores that are certain to pass the caches: STNP is a hint, and processors also
// tell a long run of stores to whole lines by themselves and cease to keep it. Nor does either need a barrier (DMB):
// unlike those of amd64, such stores are ordered as all others are, by the store-release (STLR) or the atomic
// instruction that is an atomic store in Go.
func stream(dst, src []byte) { copy(dst, src) }
