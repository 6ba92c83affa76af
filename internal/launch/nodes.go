package launch

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/topo"
)

// processVariable tells a node that hvdrun has started it, and its number. A rank must not inherit it.
const processVariable = "HVD_NODE_PROCESS"

// Nodes describes the nodes of a job with a parameter server. Process 0 is the scheduler. The servers follow,
// and then the workers.
type Nodes struct {
	// Servers and Workers are the numbers of servers and workers.
	Servers, Workers int
	// Root is the address at which the scheduler listens.
	Root netip.AddrPort
	// Restarts is how often each server and worker is started again if it fails. After that, its failure ends
	// the job, as that of the scheduler does.
	Restarts int
}

// Count returns the number of nodes, which includes the scheduler.
func (n *Nodes) Count() int { return 1 + n.Servers + n.Workers }

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
	case len(o.Hosts) > 1 || len(o.Hosts) == 1 && !IsThisHost(o.Hosts[0].Name):
		return &OptionError{"hosts: the nodes of a parameter server can only be started on this host"}
	}
	return nil
}

// variables returns the environment variables that tell process r its role, its rank in the role, and how to
// find the other nodes. With HVD_SIZE, a node that also calls Init becomes a job of one rank, even if it has
// variables of a launcher that has started this one.
func (n *Nodes) variables(r int) []string {
	id := n.id(r)
	var port []string
	if n.Servers > 1 {
		port = []string{"PORT="} // they cannot all listen at a port that hvdrun has by chance
	}
	return append(port,
		"HVD_SIZE=1",
		"DMLC_ROLE="+van.RoleOf(id).String(),
		"DMLC_RANK="+strconv.Itoa(van.Rank(id)),
		"DMLC_NUM_SERVER="+strconv.Itoa(n.Servers),
		"DMLC_NUM_WORKER="+strconv.Itoa(n.Workers),
		"DMLC_PS_ROOT_URI="+n.Root.Addr().String(),
		"DMLC_PS_ROOT_PORT="+strconv.Itoa(int(n.Root.Port())),
		processVariable+"="+strconv.Itoa(r),
	)
}

// process returns the word for a process of the job in messages. processes returns its plural.
func (o *Options) process() string {
	if o.Nodes != nil {
		return "node"
	}
	return "rank"
}

func (o *Options) processes() string { return o.process() + "s" }

// left returns the names of the processes that have not ended, such as "ranks 1-3" or "server 0, worker 2".
func (j *job) left() string {
	var ranks []int
	var titles []string
	for _, k := range j.ranks {
		if !k.gone {
			ranks, titles = append(ranks, k.number), append(titles, k.title)
		}
	}
	if j.o.Nodes != nil {
		return strings.Join(titles, ", ")
	}
	return topo.FormatRanks(ranks)
}
