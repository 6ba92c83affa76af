// Package conformance tests that every operation gives the right result in every configuration. It contains
// only tests.
//
// The expected results come from a reference that shares no code with the engine or its kernels. The
// reference has its own number formats, rounding and order of additions. Integers, minima, maxima and
// elements that are only moved must be equal in all bits. Sums and products of floats must lie in an
// interval, which reduction_test.go derives.
//
// go test runs pairwise combinations of the parameters: thousands of trials in seconds. All combinations,
// nearly a million, take an hour or two (make conformance):
//
//	go test -run TestConformance -v -timeout 0 ./internal/conformance -args -full
//
// Random programs are generated from a seed. A failed test prints the seed, and -args -seed N generates the
// same program again.
package conformance
