// Package rendezvous brings the ranks of a job together in four steps.
//
//  1. Find the root. Rank 0 opens a root, a TCP listener, and publishes its address in the [store.Store] that all ranks were given
//     (internal/place finds it: by the launcher, a URL or a unique id). The others read it there and dial.
//  2. Check in. Each rank sends one [Record], and everything that must be the same at all ranks. Everyone is answered, also those that
//     contradict another rank, or come late. Once all are there the epoch is complete.
//  3. Learn the others. The root sends everyone the table of all records and the number of the epoch. In a large job it sends each rank the
//     records of its two neighbours, and the ranks pass the others round ([Session.Gather]).
//  4. Stay connected. Over the connection to the root the ranks of a host agree on what they can only do together, such as sharing memory
//     ([Session.Agree]), and all learn whether every rank is ready ([Session.Ready]) or which has failed ([Session.Fail], [Session.Watch]).
//     Rank 0 is a member of its own root like the others, over a pipe. Then the engine's control channels take over, and internal/joblink
//     for what the launcher wants to know.
//
// Steps 1 and 2 are [Join].
//
// # Keys
//
// A job uses two keys of its store, so several jobs may share one:
//
//	gohvd/<job>/epoch   a counter; every attempt of a rank 0 draws a new number from it
//	gohvd/<job>/root    the newest root: its number, address and a random token
//
// # Invariants
//
//  1. An epoch is handed out at most once, and is greater than every LastEpoch of its ranks: it is a result of Add on
//     the counter, and the root draws again if a rank has seen a greater one.
//  2. A root is in one of three states, forming, complete and failed, and leaves forming once. All ranks whose
//     table arrived have the same one.
//  3. Every request that can be read is answered, in every state. Ranks that contradict each other, rank 0
//     included, get an error that says so.
//  4. From the table on every rank knows the same end of the start: all ranks were ready, or which have failed. The connection to
//     the root stays until then; if that of a rank ends before, the rank has failed.
//  5. A peer without the secret of the job costs no more memory than the bytes that it sends, and disturbs no rank. If
//     the job has a secret, such a peer gets no answer at all.
//
// # Which root is the right one
//
// A process that Inits again may find the root of the epoch it has just left, because rank 0 is still in it;
// a process that was just started may find the root of an epoch it never was in. Numbers do not tell an old
// root from a new one (the store may have been restarted and count from 1 again), so a rank always asks the
// root, and the root knows its own state:
//
//   - forming: it takes the rank in;
//   - complete: it answers "epoch N is complete". The rank cannot know whether it is one process too many or the
//     replacement of one that died, whose peers have yet to notice: a replacement is a latecomer until rank 0
//     leaves its epoch. So the rank says so in its log, rank 0 does likewise, and the rank waits for a newer root.
//     The answer becomes the error when ctx ends. The exception is the same call of Join asking again because its
//     connection broke before the table arrived: it gets the table, unless the root has noticed and failed the rank;
//   - failed: it answers with the reason, once to each process, and "stale" to those that had it: they are here for the
//     next attempt;
//   - closed, and its port perhaps used by another process: the dial is refused, the answer is of another protocol, or
//     it is "stale" because the token differs. The rank dials again with backoff, and changes to a newer root as soon
//     as the store has one.
//
// A rank 0 that finds a root published before its own asks that one first, as a duplicate of its rank 0. If
// it is forming, both fail with the same error. If it is complete with an epoch that the new rank 0 knows
// (LastEpoch is at least N), it is replaced; if not, its job is running: the new rank 0 waits until it is
// gone. If there is no answer, it is replaced. A forming root watches its key, so it learns of its
// replacement even then.
package rendezvous
