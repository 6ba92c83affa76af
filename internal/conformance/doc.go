// Package conformance tests that every operation produces the correct result in every configuration. It has
// only tests.
//
// The expected results come from a reference that shares no code with the engine or its kernels. It has its
// own number formats, rounding and order of additions. Results that are integers, minima, maxima or moved
// elements must be equal to the reference in all bits. Sums and products of floats must be in an interval
// that reduction_test.go derives.
//
// go test runs pairwise combinations of the parameters: thousands of trials in seconds. All combinations,
// more than a million, take two or three hours (make conformance):
//
//	go test -run TestConformance -v -timeout 0 ./internal/conformance -args -full
//
// make test-mpi runs some of the combinations with each MPI library, where each rank is a process. make
// test-nccl does so with tensors on CUDA devices, over stand-ins for NCCL and CUDA or over the libraries in a
// given folder.
//
// Random programs are generated from a seed. A failed test prints the seed, and -args -seed N generates the
// same program again.
package conformance
