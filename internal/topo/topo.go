// Package topo names the places in a job: ranks, process sets and hosts.
package topo

import "fmt"

// Rank is a process of the job, 0 to size-1. It is always the global rank, also inside a process
// set, unless a name says otherwise.
type Rank int32

// ProcessSetID is the identity of a process set on the wire. It is handed out by the coordinator and
// never reused within an epoch.
type ProcessSetID uint32

// Global is the process set of all ranks.
const Global ProcessSetID = 0

// Topology is where one rank stands. Ranks on one host are local to each other; the cross
// communicator of a rank joins the ranks that have the same local rank on other hosts.
type Topology struct {
	Rank, Size           int
	LocalRank, LocalSize int
	CrossRank, CrossSize int
}

// FromHosts computes the topology of rank from the host identity of every rank, in rank order.
// Local ranks count in rank order; the cross rank is the index of rank's host among the hosts that have
// its local rank, hosts counted in order of their lowest rank (Horovod's definition).
func FromHosts(hosts []string, rank Rank) Topology {
	t := Topology{Rank: int(rank), Size: len(hosts)}
	local := make(map[string]int, len(hosts))
	localRankOf := make([]int, len(hosts))
	for r, h := range hosts {
		localRankOf[r] = local[h]
		local[h]++
	}
	t.LocalRank, t.LocalSize = localRankOf[rank], local[hosts[rank]]
	before := true // the hosts seen so far precede rank's host
	seen := make(map[string]bool, len(local))
	for _, h := range hosts {
		if seen[h] {
			continue
		}
		seen[h] = true
		if h == hosts[rank] {
			before = false
		}
		if local[h] > t.LocalRank {
			t.CrossSize++
			if before {
				t.CrossRank++
			}
		}
	}
	return t
}

// IsHomogeneous reports whether every host has the same number of ranks. hosts has the host of every rank.
func IsHomogeneous(hosts []string) bool {
	ranks := make(map[string]int)
	for _, h := range hosts {
		ranks[h]++
	}
	for _, n := range ranks {
		if n*len(ranks) != len(hosts) {
			return false
		}
	}
	return true
}

// Validate says what is inconsistent about t, or returns nil.
func (t Topology) Validate() error {
	for _, p := range []struct {
		name       string
		rank, size int
	}{
		{"rank", t.Rank, t.Size},
		{"local rank", t.LocalRank, t.LocalSize},
		{"cross rank", t.CrossRank, t.CrossSize},
	} {
		if p.size < 1 {
			return fmt.Errorf("topo: %s: size is %d, want at least 1", p.name, p.size)
		}
		if p.rank < 0 || p.rank >= p.size {
			return fmt.Errorf("topo: %s is %d, want 0 to %d", p.name, p.rank, p.size-1)
		}
	}
	return nil
}

// HostID returns the identity of the memory of a host: ranks of equal ones may share memory. It is what was given, if
// anything, or made of the host's name, the identity of its boot, and that of the network namespace: containers that have
// all three in common stand as close as processes do.
func HostID(given, hostname, bootID, netns string) string {
	if given != "" {
		return given
	}
	return hostname + "/" + bootID + "/" + netns
}
