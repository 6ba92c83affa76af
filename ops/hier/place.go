package hier

import (
	"errors"
	"slices"

	"github.com/gohvd/gohvd/internal/topo"
)

// place says where the members of a process set are. A member is given by its position in the set.
type place struct {
	hosts  [][]int // the members on each host, in the order of the lowest members
	host   int     // the index of this rank's host in hosts
	local  int     // the index of this rank in hosts[host]
	slices int     // the number of slices: the smallest number of members on a host
}

// newPlace returns the place of the member ranks[me]. Ranks with the same entry in groups are on one host.
func newPlace(groups, ranks []topo.Rank, me int) (p place) {
	index := make(map[topo.Rank]int) // by group, the index of the host
	for i, r := range ranks {
		host, known := index[groups[r]]
		if !known {
			host = len(p.hosts)
			index[groups[r]] = host
			p.hosts = append(p.hosts, nil)
		}
		if i == me {
			p.host, p.local = host, len(p.hosts[host])
		}
		p.hosts[host] = append(p.hosts[host], i)
	}
	p.slices = len(p.hosts[0])
	for _, members := range p.hosts {
		p.slices = min(p.slices, len(members))
	}
	return p
}

// owns reports whether this rank owns a slice. The index of that slice is p.local.
func (p *place) owns() bool { return p.local < p.slices }

// hostOf returns the index of the host of a member, and the index of the member on that host.
func (p *place) hostOf(member int) (host, local int) {
	for host, members := range p.hosts {
		if local := slices.Index(members, member); local >= 0 {
			return host, local
		}
	}
	return -1, -1
}

// census counts members by host. It has an entry for each rank: the number of members in the group of that
// rank. The entries are 0 between two calls of count.
type census []int32

// counted is the result of a census.
type counted struct {
	hosts int
	// several is set if at least one host has several members. together is set if the members of each host
	// are consecutive members of the set.
	several, together bool
}

// count counts the given ranks by their groups. It allocates nothing.
func (c census) count(groups, ranks []topo.Rank) counted {
	found := counted{together: true}
	for i, r := range ranks {
		switch g := groups[r]; {
		case c[g] == 0:
			found.hosts++
		case groups[ranks[i-1]] != g:
			found.several, found.together = true, false
		default:
			found.several = true
		}
		c[groups[r]]++
	}
	for _, r := range ranks {
		c[groups[r]] = 0
	}
	return found
}

var (
	errOneLevel = errors.New(
		"two levels need members on several hosts, and a host on which several members share memory")
	errScattered = errors.New("the members of a host are not consecutive ranks of the process set")
)

// refusal returns the reason why a set cannot run on two levels, or nil if it can.
func (c counted) refusal() error {
	if c.hosts < 2 || !c.several {
		return errOneLevel
	}
	return nil
}
