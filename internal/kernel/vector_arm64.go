//go:build !noasm

package kernel

// levels returns the level for arm64. All arm64 processors that run Linux have NEON.
func levels() []level {
	return []level{{name: "neon", vectorize: functionsNEON.vectorize, stream: stream}}
}

// stream copies src to dst. Arm has no stores that are certain to bypass the caches: STNP is only a hint.
// Also, processors detect a long run of stores to whole lines by themselves and stop caching it. Neither
// needs a barrier (DMB). Unlike on amd64, such stores are ordered like all others, by the store-release
// (STLR) or the atomic instruction with which Go implements an atomic store.
func stream(dst, src []byte) { copy(dst, src) }
