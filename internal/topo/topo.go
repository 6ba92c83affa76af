// Package topo defines the types that identify the parts of a job: ranks, process sets, and the positions of
// ranks on hosts.
package topo

import "fmt"

// Rank is the number of a process in the job, from 0 to size-1. A variable of this type always holds the
// number in the whole job, not a position in a process set.
type Rank int32

// UpTo returns the ranks from 0 to n-1.
func UpTo(n int) []Rank {
	ranks := make([]Rank, n)
	for r := range ranks {
		ranks[r] = Rank(r)
	}
	return ranks
}

// ProcessSetID identifies a process set in frames. The coordinator assigns the ID and does not reuse it
// within an epoch.
type ProcessSetID uint32

// Global is the ID of the process set of all ranks.
const Global ProcessSetID = 0

// Topology is the position of one rank in the job. LocalRank is the index of the rank among the LocalSize
// ranks on its host. CrossRank is its index among the CrossSize ranks of the job that have the same local
// rank.
type Topology struct {
	Rank, Size           int
	LocalRank, LocalSize int
	CrossRank, CrossSize int
}

// FromHosts computes the topology of each rank. hosts[r] identifies the host of rank r. Local ranks are
// numbered in the order of the ranks. The cross rank is the index of the rank's host among the hosts on which
// some rank has the same local rank. As in Horovod, these hosts are ordered by their lowest ranks.
func FromHosts[H comparable](hosts []H) []Topology {
	var inOrder []H
	ranksOf := make(map[H][]int)
	for r, h := range hosts {
		if ranksOf[h] == nil {
			inOrder = append(inOrder, h)
		}
		ranksOf[h] = append(ranksOf[h], r)
	}
	all := make([]Topology, len(hosts))
	var crossSize []int // crossSize[l] is the number of hosts so far that have a rank with local rank l
	for _, h := range inOrder {
		for local, r := range ranksOf[h] {
			if local == len(crossSize) {
				crossSize = append(crossSize, 0)
			}
			all[r] = Topology{
				Rank: r, Size: len(hosts), LocalRank: local, LocalSize: len(ranksOf[h]),
				CrossRank: crossSize[local],
			}
			crossSize[local]++
		}
	}
	for r := range all {
		all[r].CrossSize = crossSize[all[r].LocalRank]
	}
	return all
}

// IsHomogeneous reports whether every host has the same number of ranks. hosts[r] is the host identity of
// rank r.
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

// HostID returns a text that identifies a host. Ranks with the same text may share memory. If given is
// not empty, HostID returns given. Otherwise the text consists of the host's name, the ID of its boot, and
// the ID of the network namespace. So if two containers have the same values of all three, they are treated
// like processes of one host.
func HostID(given, hostname, bootID, netns string) string {
	if given != "" {
		return given
	}
	return hostname + "/" + bootID + "/" + netns
}
