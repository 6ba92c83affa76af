//go:build !noasm

package kernel

var assembled = map[string]*functions{"avx2": &functionsAVX2, "avx512": &functionsAVX512}
