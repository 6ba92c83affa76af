// Package rendezvous brings the ranks of a job together in four steps.
//
//  1. Find the root. Rank 0 opens a root, which is a TCP listener, and publishes its address in the
//     [store.Store] that all ranks were given (internal/bootstrap finds that store through the launcher, a URL or
//     a unique id). The other ranks read the address from the store and dial it.
//  2. Check in. Each rank sends the root one [Record], and the values that must be the same at all ranks. The
//     root answers every rank, even a rank that contradicts another or comes late. If ranks of several hosts
//     have checked in, the root makes ranks that listen on loopback listen where the others can dial them
//     (JoinConfig.Move). Then the epoch is complete.
//  3. Learn the others. The root sends each rank the table of all records and the number of the epoch. In a
//     large job it sends each rank only the records of its two neighbours, and the ranks pass the other
//     records round a ring ([Session.Gather]).
//  4. Stay connected. Over the connection to the root, the ranks of a host agree on what they can only do
//     together, such as sharing memory ([Session.Agree]), and all ranks learn whether every rank is ready
//     ([Session.Ready]) or which ranks have failed ([Session.Fail], [Session.Watch]). Rank 0 is a member of
//     its own root too, and its connection is a pipe. After this step, the engine's control connections take
//     over, and internal/joblink carries the messages between the ranks and the launcher.
//
// Steps 1 and 2 are [Join].
//
// # Keys
//
// A job uses two keys of its store. Their names contain the job, so several jobs may share a store:
//
//	gohvd/<job>/epoch   a counter, from which each attempt of a rank 0 draws a new number
//	gohvd/<job>/root    the newest root: its number, address and a random token
//
// # Invariants
//
//  1. The number of an epoch is used at most once, and is greater than the LastEpoch of each of its ranks: it
//     is a result of Add on the counter, and the root draws again if a rank has seen a greater epoch.
//  2. A root is in one of three states: forming, complete or failed. It begins as forming, changes once to
//     complete or failed, and does not change again. All ranks that receive a table receive the same table.
//  3. In every state the root answers every request that it can decode. Ranks that contradict each other,
//     rank 0 included, get an error that says so.
//  4. Once a rank has the table, it learns the same result as all others: either all ranks became ready, or
//     certain ranks failed, which the result names. Its connection to the root stays open until then. If the
//     connection of a rank ends earlier, the rank has failed.
//  5. A peer without the secret of the job uses no more memory than the bytes that it sends, and disturbs no
//     rank. If the job has a secret, such a peer gets no answer at all.
//
// # Which root is the right one
//
// A process that calls Init again may find the root of the epoch that it has just left, because rank 0 is
// still in that epoch. A process that was just started may find the root of an epoch that it never belonged
// to. The numbers of the epochs do not show which of two roots is newer, because the store may have been
// restarted and count from 1 again. So a rank always asks the root, which knows its own state:
//
//   - A forming root accepts the rank.
//   - A complete root answers "epoch N is complete". The rank cannot know whether its job has one process too
//     many, or whether it replaces a rank whose death the others have not noticed yet. In both cases the rank
//     is a latecomer until rank 0 leaves its epoch. The rank and rank 0 both write that to the log, and the
//     rank waits for a newer root. If ctx ends first, Join returns an error that contains this answer. There
//     is one exception: if the connection breaks before the table arrives, the same call of Join asks again.
//     It then gets the table, unless the root has already noticed the break and declared the rank failed.
//   - A failed root answers each process once with the reason. If a process that has the reason asks again,
//     it wants to join the next attempt, so the root answers "stale".
//   - A closed root does not answer, and another process may use its port. So the dial is refused, the answer
//     belongs to another protocol, or the answer is "stale" because the token differs. The rank dials again
//     with backoff, and changes to a newer root as soon as the store has one.
//
// If a new rank 0 finds an older root published, it first asks that root, as if it joined there. If the older
// root is forming, there are two ranks 0, and both fail with the same error. If the older root is complete
// with an epoch that the new rank 0 knows (LastEpoch is at least N), the new rank 0 replaces it. If it is
// complete with a later epoch, its job is still running, and the new rank 0 waits until that root is gone. If
// the older root does not answer, the new rank 0 replaces it. A forming root watches its key in the store, so
// it learns that it was replaced even in this case.
package rendezvous
