// Package conformance checks that every operation gives the right result in every configuration. It has only
// tests.
//
// The expected results come from a reference that shares nothing with the engine or its kernels: it has its
// own number formats, its own rounding and its own order of additions. Integers, minima, maxima and elements
// that are only moved must be right to the bit; sums and products of floats must lie in an interval that is
// derived in reduction_test.go.
//
// go test runs pairwise combinations of the parameters, some thousands in seconds. All of them, near a
// million, take an hour or two (make conformance):
//
//	go test -run TestConformance -v -timeout 0 ./internal/conformance -args -full
//
// Random programs are made from a seed, which a failure prints and -args -seed N repeats.
package conformance
