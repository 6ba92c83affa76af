// Package topo has the types that identify parts of a job: ranks and process sets, and the topology of ranks
// on hosts.
package topo

import "fmt"

// Rank is the number of a process in the job, 0 to size-1. It is always the global rank, also inside a
// process set, unless the name of a variable says otherwise.
type Rank int32

// ProcessSetID identifies a process set on the wire. The coordinator assigns it and never reuses it within an
// epoch.
type ProcessSetID uint32

// Global is the process set of all ranks.
const Global ProcessSetID = 0

// Topology is the place of one rank in the job. Ranks on one host are local to each other. The cross
// communicator of a rank has the ranks with the same local rank on all hosts.
type Topology struct {
	Rank, Size           int
	LocalRank, LocalSize int
	CrossRank, CrossSize int
}

// FromHosts computes the topology of rank from the host identities of all ranks, in rank order. Local ranks
// count in rank order. The cross rank is the index of rank's host among the hosts that have its local rank,
// where hosts are ordered by their lowest rank (Horovod's definition).
func FromHosts(hosts []string, rank Rank) Topology {
	t := Topology{Rank: int(rank), Size: len(hosts)}
	local := make(map[string]int, len(hosts))
	localRankOf := make([]int, len(hosts))
	for r, h := range hosts {
		localRankOf[r] = local[h]
		local[h]++
	}
	t.LocalRank, t.LocalSize = localRankOf[rank], local[hosts[rank]]
	before := true // rank's host has not been seen yet
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

// IsHomogeneous reports whether every host has the same number of ranks. hosts has the host identity of every
// rank.
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

// Validate returns an error if t is inconsistent.
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

// HostID returns the identity of a host's memory: ranks with equal identities may share memory. It is given
// if that is not empty. Otherwise it consists of the host's name, the ID of its boot, and the ID of the
// network namespace: containers that have all three in common are treated like processes of one host.
func HostID(given, hostname, bootID, netns string) string {
	if given != "" {
		return given
	}
	return hostname + "/" + bootID + "/" + netns
}
