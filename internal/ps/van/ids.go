package van

import (
	"fmt"
	"strconv"
)

// Role is the role of a node.
type Role uint8

// These are the roles. Their values are sent on the wire.
const (
	Server    Role = 1
	Worker    Role = 2
	Scheduler Role = 3
)

func (r Role) String() string {
	switch r {
	case Server:
		return "server"
	case Worker:
		return "worker"
	case Scheduler:
		return "scheduler"
	}
	return "role " + strconv.Itoa(int(r))
}

// These are the groups. A sum of groups is their union, so 7 is the group of all nodes.
const (
	GroupScheduler = 1
	GroupServers   = 2
	GroupWorkers   = 4
	GroupAll       = GroupScheduler + GroupServers + GroupWorkers
)

// SchedulerID is the id of the scheduler.
const SchedulerID = 1

// ServerID returns the id of the server with the given rank.
func ServerID(rank int) int { return 8 + 2*rank }

// WorkerID returns the id of the worker with the given rank.
func WorkerID(rank int) int { return 9 + 2*rank }

// Rank returns the rank of the node with the given id among the nodes of its role.
func Rank(id int) int { return max((id-8)/2, 0) }

// RoleOf returns the role of the node with the given id.
func RoleOf(id int) Role {
	switch {
	case id == SchedulerID:
		return Scheduler
	case id%2 == 0:
		return Server
	}
	return Worker
}

// Name returns a name of the node for errors and logs, such as "worker 3".
func Name(id int) string {
	if id == SchedulerID {
		return Scheduler.String()
	}
	return fmt.Sprintf("%s %d", RoleOf(id), Rank(id))
}

// Members returns the ids of a group in ascending order of roles and ranks: scheduler, servers, workers. An
// id of a single node counts as a group of this node. If there is no such group, Members returns nil.
func Members(group, servers, workers int) (ids []int) {
	if group < 0 {
		return nil
	}
	if group > GroupAll {
		if role, rank := RoleOf(group), Rank(group); role == Server && rank < servers ||
			role == Worker && rank < workers {
			return []int{group}
		}
		return nil
	}
	if group&GroupScheduler != 0 {
		ids = append(ids, SchedulerID)
	}
	for r := 0; group&GroupServers != 0 && r < servers; r++ {
		ids = append(ids, ServerID(r))
	}
	for r := 0; group&GroupWorkers != 0 && r < workers; r++ {
		ids = append(ids, WorkerID(r))
	}
	return ids
}
