// Package controller implements the negotiation, in which ranks agree on the operations to run and on their
// order. docs/negotiation.md specifies the protocol.
//
// The package is pure. A Member is the state of a rank as a participant, the Coordinator is the state of rank
// 0 as the coordinator, and a Combiner is the state of a rank that leads other ranks. Their inputs are events
// (submitted requests, frames, the time). Their outputs are frames to send and grants to run. They use no
// socket, clock or lock, they never wait, and the same inputs give the same outputs. All times are durations
// since the same fixed moment, which the caller chooses. Every turn begins with Tick.
//
// A rank sends a request once, and the coordinator remembers the request until it is answered. The answers of
// the coordinator are numbered. They form a log that every rank replays.
//
// Lockstep carries requests and decisions between members and coordinator by collectives only. In every
// cycle, all ranks combine their votes by AND and OR. Rank 0 gathers the requests that are not cached, and
// broadcasts the decision of the coordinator.
//
// The package promises no stable API. Programs use package hvd.
package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// These durations of the protocol are not settings (docs/negotiation.md, Heartbeats and time).
const (
	// heartbeatPeriod is the maximum time between two frames from a living rank.
	heartbeatPeriod = time.Second
	// suspectGrace is how long the coordinator waits for the control connection of a suspected rank to end.
	suspectGrace = 200 * time.Millisecond
	// silenceGrace is how much longer, after suspectGrace, the coordinator waits before it checks whether a
	// suspect is silent. By then, a rank that was already dead when it was suspected has missed two
	// heartbeats, unless its heartbeats come through a leader.
	silenceGrace = 2 * heartbeatPeriod
	// verdictTimeout is how long a rank that has reported a suspicion waits for the verdict of the
	// coordinator before it blames the coordinator for its silence.
	verdictTimeout = heartbeatPeriod + silenceGrace
	// closeTimeout is the maximum time for which a shutdown may make no progress.
	closeTimeout = 10 * time.Second
	// holdPeriod is how long leaders hold a vote or a request that other ranks behind them have not made.
	holdPeriod = 200 * time.Millisecond
	// leaderGrace is added to silenceGrace if there are leaders (suspicion.due). For each further level of
	// leaders it is 2*holdPeriod longer.
	leaderGrace = heartbeatPeriod + 2*holdPeriod
)

// LongestVerdict returns the longest time from a suspicion to the verdict, in which a clearer suspicion
// replaces the first one at the last moment. Jobs with no level of leaders count as jobs with one.
func LongestVerdict(levels int) time.Duration { return 2 * verdictGrace(max(1, levels)) }

// verdictGrace returns the longest time that the coordinator waits before it believes a suspicion, in a job
// with so many levels of leaders.
func verdictGrace(levels int) time.Duration {
	grace := suspectGrace + silenceGrace
	if levels > 0 {
		grace += leaderGrace + time.Duration(levels-1)*2*holdPeriod
	}
	return grace
}

// gap returns the time since the last turn if the process did not run in this time, because it was stopped or
// its host slept. Otherwise gap returns 0: turns of a running process are at most a heartbeat period apart. A
// process that did not run does not know whether other ranks were silent in that time.
func gap(last, now time.Duration) time.Duration {
	if d := now - last; d > 2*heartbeatPeriod {
		return d
	}
	return 0
}

// Never is a time that the clock never reaches.
const Never = time.Duration(1<<63 - 1)

// Set is a process set. Ranks holds its members in ascending order.
type Set struct {
	ID    topo.ProcessSetID
	Ranks []topo.Rank
}

// Global returns the set of all ranks of a job.
func Global(size int) Set { return Set{ID: topo.Global, Ranks: topo.UpTo(size)} }

// index returns the position of r in the set, or -1 if r is not a member.
func (s *Set) index(r topo.Rank) int {
	if i := int(r); i >= 0 && i < len(s.Ranks) && s.Ranks[i] == r {
		return i // in the global set, ranks and positions are equal
	}
	if i, ok := slices.BinarySearch(s.Ranks, r); ok {
		return i
	}
	return -1
}

// Grant permits a member to run one fused response.
type Grant struct {
	Set topo.ProcessSetID
	// Asked is the process set in which this rank has made the requests. It is Set, except that the first
	// grant of a process set that only its members add answers requests in the global set.
	Asked topo.ProcessSetID
	// Number is the number of the grant among the grants of the set, counted from 1. It is the same at all
	// members.
	Number    uint64
	Backend   message.Backend
	Algorithm message.Algorithm
	// SegmentBytes is the segment size that the backend uses, or 0 for its default.
	SegmentBytes int
	// Absent are the members that have joined without requesting these tensors, in ascending order. They take
	// part with neutral elements. If the grant removes a process set, Absent may also have ranks that have
	// announced their shutdown. This rank may be one of the absent ranks. The slice is shared and must not be
	// changed.
	Absent []topo.Rank
	// Responses are the responses for the tensors to run together, in the order of the fusion buffer. They
	// are shared with the cache and must not be changed.
	Responses []*message.Response
	// Bits are cache bits. They belong to the first len(Bits) elements of Responses, which were granted by
	// bit. The other elements were granted in full.
	Bits []uint32

	since        time.Duration // the time at which the member received the grant
	older, newer *Grant        // the neighbours in the member's grantList
}

// Verdict says which ranks have failed and ends the epoch. All survivors get the same verdict.
type Verdict struct {
	Ranks  []topo.Rank
	Reason string
}

func (v *Verdict) Error() string {
	return fmt.Sprintf("%s failed: %s", topo.FormatRanks(v.Ranks), v.Reason)
}

// have returns text such as "rank 3 has" or "ranks 0 and 1 have".
func have(ranks []topo.Rank) string {
	if len(ranks) == 1 {
		return topo.FormatRanks(ranks) + " has"
	}
	return topo.FormatRanks(ranks) + " have"
}

// waitFor returns a text such as "rank 2 waits for" or "ranks 1 and 2 wait for".
func waitFor(ranks []topo.Rank) string {
	if len(ranks) == 1 {
		return topo.FormatRanks(ranks) + " waits for"
	}
	return topo.FormatRanks(ranks) + " wait for"
}

// seconds formats a duration for messages, such as "60s" or "0.5s".
func seconds(d time.Duration) string { return fmt.Sprintf("%gs", d.Round(time.Millisecond).Seconds()) }
