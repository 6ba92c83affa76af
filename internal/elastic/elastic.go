// Package elastic decides which processes are the ranks of an elastic job. Processes may die, leave and be
// added while the job trains.
//
// A Machine is the decision. It is pure: it uses no clock, socket or goroutine. The launcher tells it what
// has happened (an Event) and does what it answers (an Output). So a test can replay every order of events.
//
// The ranks of the job are a Roster. Each change makes a new roster with the next generation:
//
//   - Survivors keep their process and their slot, and keep their order. So their ranks are without gaps, and
//     rank 0 is the first survivor.
//   - If a rank has failed, there is a new roster at once, without waiting for a process that is to replace it.
//   - A new process becomes a rank only when it has said that it is ready. Until then the job trains without it.
//   - A roster has at least Config.Min ranks. With fewer ranks the job pauses.
package elastic

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// Host is a host on which the launcher may start processes, and how many.
type Host struct {
	Name  string
	Slots int
}

// Slot is a place for one process. Index is the local rank of the process.
type Slot struct {
	Host  string
	Index int
}

func (s Slot) String() string { return s.Host + ":" + strconv.Itoa(s.Index) }

// Member is a process. Number counts the processes that were started at the slot, from 1.
type Member struct {
	Slot
	Number int
}

func (m Member) String() string {
	if m.Number == 1 {
		return m.Slot.String()
	}
	return fmt.Sprintf("%v (process %d)", m.Slot, m.Number)
}

// Text returns m in the form that ParseMember reads.
func (m Member) Text() string { return fmt.Sprintf("%s:%d/%d", m.Host, m.Index, m.Number) }

// ParseMember parses the text that Text returns.
func ParseMember(text string) (m Member, err error) {
	colon, slash := strings.LastIndexByte(text, ':'), strings.LastIndexByte(text, '/')
	if colon < 1 || slash < colon {
		return m, fmt.Errorf("got the member %.80q, want HOST:SLOT/NUMBER", text)
	}
	m.Host = text[:colon]
	if m.Index, err = strconv.Atoi(text[colon+1 : slash]); err == nil {
		m.Number, err = strconv.Atoi(text[slash+1:])
	}
	if err != nil || m.Index < 0 || m.Number < 1 {
		return m, fmt.Errorf("got the member %.80q, want HOST:SLOT/NUMBER", text)
	}
	return m, nil
}

// Exit is the end of a process. Status is its exit status, and How describes the end, as in "exited with
// status 1".
type Exit struct {
	Member Member
	Status int
	How    string
}

// Change says how a roster differs from the one before. The values are those that Horovod sends to its
// workers.
type Change int

const (
	// Removed says that some members of the roster before are missing.
	Removed Change = 1 << iota
	// Added says that there are new members.
	Added
)

// Roster is the list of the ranks of a generation.
type Roster struct {
	// Generation counts the rosters, from 1.
	Generation uint64
	// Members[r] is rank r.
	Members []Member
	// Change and Reason say how the roster differs from the one before, and why. The reason of the first one
	// names the processes that were not ready in time. Lost says that a rank of the one before has failed, so
	// that the ranks cannot finish what they have begun.
	Change Change
	Lost   bool
	Reason string
}

// Rank returns the rank of m, or -1 if m is not in the roster.
func (r *Roster) Rank(m Member) int {
	for i, other := range r.Members {
		if other == m {
			return i
		}
	}
	return -1
}

// Topology returns the position of each rank. The local rank is the index of the slot, which a process keeps
// for its life. So it can be greater than the local size while a slot is empty.
func (r *Roster) Topology() []topo.Topology {
	localSize, crossSize := make(map[string]int), make(map[int]int)
	all := make([]topo.Topology, len(r.Members))
	for i, m := range r.Members {
		all[i] = topo.Topology{Rank: i, Size: len(r.Members), LocalRank: m.Index,
			CrossRank: crossSize[m.Index]}
		localSize[m.Host]++
		crossSize[m.Index]++
	}
	for i, m := range r.Members {
		all[i].LocalSize, all[i].CrossSize = localSize[m.Host], crossSize[m.Index]
	}
	return all
}

// Config says what a job wants.
type Config struct {
	// Start is how many slots there must be before any process is started.
	Start int
	// Min and Max bound the number of ranks. If Max is 0, there is a rank for each slot.
	Min, Max int
	// Spares is how many processes more than Max are started. They are no ranks while there are Max of them,
	// and take the places of ranks that fail or leave. If Spares is not 0, Max is not 0.
	Spares int
	// Timeout is how long the job waits for slots, at its start and when it pauses.
	Timeout time.Duration
	// Fixed says that the hosts do not change after the first call of Discovered, so that the job does not
	// wait for slots that cannot come.
	Fixed bool
	// StartTimeout is how long the first process that is ready waits until all others that were started are
	// ready too. After that, the first roster has only those that are ready, if there are enough. Settle is
	// the same time for processes that are to be added to a job that trains, so that those that were started
	// together become ranks together.
	StartTimeout, Settle time.Duration
	// Notice is how long a process that has failed, as ranks have found, may take to end by itself.
	Notice time.Duration
	// Answer is how long a process may take to tell that it has got a roster after the first one, in which it
	// is a rank, or 0 for any time. Each answer of another process gives it this time again. The other ranks
	// wait for it meanwhile.
	Answer time.Duration
	// ResetLimit is how many rosters may follow the first one, or -1 for any number.
	ResetLimit int
	// ByHost says that the failure of a process excludes its host, as in Horovod, and ends the other
	// processes there. Otherwise it excludes only its slot.
	ByHost bool
	// Cooldown bounds how long a slot or host is excluded. The k-th time it is Cooldown[0] * 2^k and a random
	// part of at most Cooldown[0], but at most Cooldown[1]. If both are 0, it is excluded for ever.
	Cooldown [2]time.Duration
	// Random returns a number from 0 to 1.
	Random func() float64
}

// Output is what the launcher is to do, in the order of the fields.
type Output struct {
	// Kill are processes to kill, because they hang or have no place any more.
	Kill []Member
	// Publish is the new roster, or nil.
	Publish *Roster
	// Start are processes to start.
	Start []Member
	// Resume says that the newest generation has resumed the training, or is nil.
	Resume *Resume
	// Notes are lines for the user.
	Notes []string
	// End says that the job is over. The launcher ends all processes that are left.
	End *End
}

// Resume says that a generation has resumed the training, how long it has stopped, and whether the reason was
// that ranks had failed.
type Resume struct {
	Generation uint64
	Stopped    time.Duration
	Lost       bool
}

// End says how a job ends.
type End struct {
	// Reason says why the job has failed. It is empty if the job has succeeded.
	Reason string
	// Culprit is the process whose end is the root cause, if it is known.
	Culprit *Member
}
