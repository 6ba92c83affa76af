// Package bench measures collective operations the way people know: nccl-tests' sizes, flags and table, and the rows of
// the harness in bench/peers, which compares this library with others.
//
// An operation is measured on one of two paths. Negotiated is what a training program calls: package hvd, with names,
// response cache and fusion. Raw is the backend alone, all ranks calling it in one order; it shows what negotiation
// costs. Either works on ordinary slices or on tensors of the shared arena.
//
// # Rules
//
//  1. Every case is verified before anything is timed, on all ranks, against values known by formula; what is wrong is
//     counted and makes the run fail.
//  2. Timed calls follow each other without a pause, on zeros: sums of them do not grow into infinities or denormals.
//     Before each broadcast stands a barrier, since a root could run ahead.
//  3. Nothing but the operation happens between the two readings of the clock, and nothing is printed, sent or
//     allocated by this package in the loop around it.
//  4. GB is 10^9 bytes. algbw is bytes by time, and busbw that times 2(n-1)/n for allreduce, (n-1)/n for allgather,
//     reducescatter and alltoall, 1 for broadcast, as nccl-tests define them (doc/PERFORMANCE.md there).
package bench
