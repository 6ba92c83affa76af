package launch

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/topo"
)

// processVariable tells a node that hvdrun has started it, and its number. A rank must not inherit it.
const processVariable = "HVD_NODE_PROCESS"

// Nodes describes the nodes of a job with a parameter server. Process 0 is the scheduler. The servers follow,
// and then the workers. AssignNodes places them on hosts.
type Nodes struct {
	// Servers and Workers are the numbers of servers and workers.
	Servers, Workers int
	// Root is the address at which the scheduler listens. If some nodes run on other hosts, only its port
	// counts: the scheduler listens on all addresses of this host, and each host uses the one at which it
	// reaches the store.
	Root netip.AddrPort
	// Restarts is how often each server and worker is started again if it fails. After that, its failure ends
	// the job, as that of the scheduler does.
	Restarts int
}

// Count returns the number of nodes, which includes the scheduler.
func (n *Nodes) Count() int { return 1 + n.Servers + n.Workers }

// Name returns the name of process r, such as "server 1".
func (n *Nodes) Name(r int) string { return van.Name(n.id(r)) }

// id returns the id of the node that process r is.
func (n *Nodes) id(r int) int {
	switch {
	case r == 0:
		return van.SchedulerID
	case r <= n.Servers:
		return van.ServerID(r - 1)
	}
	return van.WorkerID(r - 1 - n.Servers)
}

// check returns an error if the options do not fit the nodes.
func (n *Nodes) check(o *Options) error {
	switch {
	case n.Servers < 0 || n.Workers < 0:
		return &OptionError{fmt.Sprintf("nodes: got %d servers and %d workers, want at least 0", n.Servers,
			n.Workers)}
	case o.NP != n.Count():
		return &OptionError{fmt.Sprintf("number of nodes: got %d, want %d: the scheduler, %d servers and %d workers",
			o.NP, n.Count(), n.Servers, n.Workers)}
	case o.Elastic != nil:
		return &OptionError{"nodes: a job with a parameter server cannot be elastic"}
	}
	return nil
}

// AssignNodes places nodes on hosts. It returns the hosts that have nodes, in the order of the list, and the
// place of each node.
//
// The scheduler runs on this host, where it takes no slot. If this host, whose name is self, is not in the
// list, it becomes the first one. The servers are spread over the hosts: each host gets one in turn, until
// its slots are full. The workers fill the other slots, as ranks do.
func AssignNodes(hosts []Host, n *Nodes, self string) (used []Host, places []Assignment, err error) {
	if have, want := Slots(hosts), n.Servers+n.Workers; want > have {
		return nil, nil, fmt.Errorf("got %d servers and %d workers, but the hosts have only %d slots: raise the "+
			"number after a host in -H or --hostfile", n.Servers, n.Workers, have)
	}
	at := slices.IndexFunc(hosts, func(h Host) bool { return IsThisHost(h.Name) })
	if at < 0 {
		at, hosts = 0, slices.Insert(slices.Clone(hosts), 0, Host{Name: self})
	}
	index, free := []int{at}, make([]int, len(hosts)) // index[r] is the index of the host of node r
	for i, h := range hosts {
		free[i] = h.Slots
	}
	take := func(i int) {
		free[i]--
		index = append(index, i)
	}
	for i := 0; len(index) <= n.Servers; i = (i + 1) % len(hosts) {
		if free[i] > 0 {
			take(i)
		}
	}
	for i := 0; len(index) < n.Count(); {
		if free[i] > 0 {
			take(i)
		} else {
			i++
		}
	}
	number := make(map[int]int) // the index in used of each host that has nodes
	for i, h := range hosts {
		if slices.Contains(index, i) {
			number[i] = len(used)
			used = append(used, h)
		}
	}
	for r, i := range index {
		places = append(places, Assignment{number[i], topo.Topology{Rank: r, Size: len(index)}})
	}
	return used, places, nil
}

// variables returns the environment variables that tell process r its role, its rank in the role, and how to
// find the other nodes. With HVD_SIZE, a node that also calls Init becomes a job of one rank, even if it has
// variables of a launcher that has started this one. If several is set, some nodes run on other hosts, and
// the agents add the address of the scheduler.
func (n *Nodes) variables(r int, several bool) []string {
	id := n.id(r)
	var vars []string
	if n.Servers > 1 {
		vars = []string{"PORT="} // they cannot all listen at a port that hvdrun has by chance
	}
	if several {
		vars = append(vars, "DMLC_USE_KUBERNETES=1") // the scheduler listens on all addresses
	} else {
		vars = append(vars, schedulerVariable(n.Root.Addr()))
	}
	return append(vars,
		"HVD_SIZE=1",
		"DMLC_ROLE="+van.RoleOf(id).String(),
		"DMLC_RANK="+strconv.Itoa(van.Rank(id)),
		"DMLC_NUM_SERVER="+strconv.Itoa(n.Servers),
		"DMLC_NUM_WORKER="+strconv.Itoa(n.Workers),
		"DMLC_PS_ROOT_PORT="+strconv.Itoa(int(n.Root.Port())),
		processVariable+"="+strconv.Itoa(r),
	)
}

// schedulerVariable returns the environment variable with the address of the scheduler.
func schedulerVariable(addr netip.Addr) string { return "DMLC_PS_ROOT_URI=" + addr.String() }

// process returns the word for a process of the job in messages. processes returns its plural.
func (o *Options) process() string {
	if o.Nodes != nil {
		return "node"
	}
	return "rank"
}

func (o *Options) processes() string { return o.process() + "s" }
