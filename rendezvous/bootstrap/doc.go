// Package bootstrap is how the ranks of a job find each other with nothing but an id: no store, no launcher.
//
// One process makes an [ID] with [NewID], which opens a [Root], and hands the id to all ranks by any means that keeps it
// secret. Every rank calls [Join] with it. The ranks report to the root, each learns the address of the next one from it,
// they connect in a ring, and gather the [Record] of every rank round it. Large jobs take several ids, each with a root of
// its own: the ranks are cut into contiguous blocks, the first size mod roots of them one rank larger, one for each root.
// The first rank of a block reports to the root of the block before, too, because it is the next of that one's last rank.
//
// # Protocol
//
// Every connection begins with a proof of both ends that they know the key (package secret) and with greetings (package
// dial); then there are frames (package frame), and the first byte of each is its kind:
//
//	rank > root  report    who it is, size, which of which ids, where its ring listener is
//	root > rank  next      who the next rank is and where; as soon as both have reported
//	rank > rank  hello     from, to, size; answered with welcome or failure
//	rank > rank  pieces    one per rank, both ways round, size/2 steps
//	rank > root  done      has all records; or failure, and why
//	root > rank  complete  all its ranks have all records; or failure, and why
//
// The key of an id never travels. Connections to a root prove the key of its id, those of the ring a key made of all ids.
// What follows the proof is neither encrypted nor authenticated, unless the id says that connections are encrypted
// (Config.Encrypt): then all is said inside TLS 1.3, the proof too.
//
// # Invariants
//
//  1. A root completes or fails, once, and tells every rank that has reported which of the two, with one text for all. Its
//     failure reaches the other roots through the rank that reports to both.
//  2. Every report that can be read is answered, in every state of the root, as long as it lives.
//  3. A rank keeps its connection to the root until the root has completed or failed, so the loss of a rank is noticed and
//     has a name, whatever the ring was doing.
//  4. Who cannot prove the key costs a connection among a bounded number for a bounded time, and a line in the log.
//
// # Staggering
//
// Above 256 ranks for a root, the i-th of them waits i/7000 s before it connects, as in NCCL 2.23, so that the queue of
// connections that a root has yet to accept stays short.
package bootstrap
