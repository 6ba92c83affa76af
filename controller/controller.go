// Package controller implements the negotiation: how ranks agree on what to run, in which order.
// docs/negotiation.md specifies the protocol.
//
// The package is pure. A Member is the state of a rank, the Coordinator is the state of the second role of
// rank 0. Their inputs are events (submitted requests, frames, the time); their outputs are frames to send
// and grants to run. They use no socket, clock or lock, never wait, and give the same outputs for the same
// inputs. Times are durations since any fixed moment, and every turn begins with Tick.
//
// A request is sent once, the coordinator remembers it until it is answered, and the numbered answers of the
// coordinator are a log that every rank replays.
//
// Lockstep carries requests and decisions between the two if the channel offers only collectives: in every
// cycle all ranks combine their votes by AND and OR, gather at rank 0 what is not cached, and broadcast its
// decision.
//
// The package promises no stable API; programs use package hvd.
package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Durations of the protocol that are not settings (docs/negotiation.md, Heartbeats and time).
const (
	// heartbeatPeriod is the longest time for which a living rank sends nothing.
	heartbeatPeriod = time.Second
	// suspectGrace is how long the coordinator waits for the control connection of a suspect to end.
	suspectGrace = 200 * time.Millisecond
	// verdictTimeout is how long a rank that suspects another waits for the verdict of the coordinator.
	verdictTimeout = time.Second
	// closeTimeout is how long a shutdown may make no progress.
	closeTimeout = 10 * time.Second
)

// gap returns the part of the time since the last turn during which this process did not run: it was stopped,
// or its host slept. Turns are at most a heartbeat apart. A process that did not run does not know whether
// other ranks were silent in that time.
func gap(last, now time.Duration) time.Duration {
	if d := now - last; d > 2*heartbeatPeriod {
		return d
	}
	return 0
}

// never is a time that is never reached.
const never = time.Duration(1<<63 - 1)

// Set is a process set with its members in ascending order.
type Set struct {
	ID    topo.ProcessSetID
	Ranks []topo.Rank
}

// Global returns the set of all ranks of a job.
func Global(size int) Set {
	s := Set{ID: topo.Global}
	for r := range size {
		s.Ranks = append(s.Ranks, topo.Rank(r))
	}
	return s
}

// index returns the position of r in the set, or -1.
func (s *Set) index(r topo.Rank) int {
	if i := int(r); i >= 0 && i < len(s.Ranks) && s.Ranks[i] == r {
		return i // in the global set, ranks and positions are equal
	}
	if i, ok := slices.BinarySearch(s.Ranks, r); ok {
		return i
	}
	return -1
}

// Grant is one fused response as a member has to run it.
type Grant struct {
	Set topo.ProcessSetID
	// Number counts the grants of the set from 1. It is the same at all members.
	Number    uint64
	Backend   message.Backend
	Algorithm message.Algorithm
	// Absent are the members, ascending, that have joined without requesting these tensors. This rank may be
	// among them. They take part with neutral elements. Absent is shared and must not be changed.
	Absent []topo.Rank
	// Responses are the tensors to run together, in the order of the fusion buffer. They are shared with the
	// cache and must not be changed.
	Responses []*message.Response
	// Bits are the cache bits of the first Responses, as many as were cached.
	Bits []uint32

	since        time.Duration // the time at which the member received it
	older, newer *Grant        // the neighbours in the member's grantList
}

// Verdict ends an epoch: these ranks failed. All survivors get the same one.
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

// seconds formats a duration for messages: "60s", "0.5s".
func seconds(d time.Duration) string { return fmt.Sprintf("%gs", d.Round(time.Millisecond).Seconds()) }
