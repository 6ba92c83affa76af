//go:build !noasm

package kernel

var assembled = map[string]*functions{"neon": &functionsNEON}
