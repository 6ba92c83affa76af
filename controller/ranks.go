package controller

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// roster holds the state of the ranks of the job at the coordinator, apart from their requests.
type roster struct {
	all []rankState
	// leaders and groups are those of CoordinatorConfig, and levels is that of leaders.
	leaders topo.Leaders
	levels  int
	groups  []topo.Rank
	now     time.Duration // the time of the last Tick
	acked   bool          // whether a rank has acknowledged a cycle in this turn
	// direct are the ranks without a leader.
	direct []topo.Rank
	// Before beatDue, no direct rank needs a heartbeat, and before both times no rank has been silent for the
	// liveness timeout. So a turn need not visit all ranks.
	beatDue, silentDue time.Duration
}

// rankState is the state of a rank at the coordinator.
type rankState struct {
	// acknowledged is the last cycle that the rank has acknowledged, and received the time at which its last
	// frame arrived, without frames that its whole group has sent (roster.seen, roster.lastReceived). group
	// is nil if no rank is behind the rank, and it has a connection to rank 0.
	acknowledged uint64
	received     time.Duration
	group        *ledGroup
	lastSent     time.Duration // the time at which the last frame to the rank was created
	lost         bool          // whether the rank's control connection has ended
	// executing is the oldest grant that the rank has not finished.
	executing execution
	timeouts  timeoutReports
	departure
	kept
}
