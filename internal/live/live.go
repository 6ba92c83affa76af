// Package live has the state of a running job, as hvdrun top shows it.
//
// A rank answers the question joblink.State with a Rank: what it waits for, its last operations and its
// counters. The launcher makes a Job of the answers of all ranks, or of the states of the nodes of a
// parameter server. It asks only while somebody looks. Package analysis finds out which ranks wait for which
// other ranks, and for how long a rank has held up all others. Job.Since compares two states and gives rates.
package live

import (
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/recorder"
	"github.com/gohvd/gohvd/internal/trace"
)

// These constants bound the time and memory that a look at the job takes: the number of operations in the
// states of all ranks, and limits for each rank.
const (
	operationsOfAll = 1 << 12
	leastOperations = 16
	mostOperations  = 64
	pendingOfAll    = 1 << 16
	leastPending    = 64
	mostPending     = 1 << 10
	// leastWait is the shortest wait that is a problem. In each step, ranks wait for each other for a short
	// time.
	leastWait = time.Second
)

// Limit limits the operations in the snapshot of a rank to those that its state has. Of the operations that
// have ended, these are the most recent ones, which show how far the rank is if the ranks were asked at
// slightly different moments. Of the pending operations, these are the oldest one and those that have waited
// for so long that something may be wrong, up to maxPending. Snapshot.NotShown has the number of the others.
func Limit(about *recorder.About) {
	about.MaxOperations = min(max(operationsOfAll/max(about.Size, 1), leastOperations), mostOperations)
	long := sort.Search(len(about.Pending), func(i int) bool {
		return about.At-about.Pending[i].Submitted < leastWait
	})
	about.MaxPending = min(max(long, 1), maxPending(about.Size))
}

// maxPending returns the maximum number of pending operations in the state of a rank. size is the number of
// ranks of the job.
func maxPending(size int) int { return min(max(pendingOfAll/max(size, 1), leastPending), mostPending) }

// Rank is the state of a rank at one moment.
type Rank struct {
	// Snapshot has the oldest pending operation and those that have waited for a second, and the most recent
	// ones that have ended.
	Snapshot *analysis.Snapshot `json:"snapshot"`
	Counters
	// HeldUp has an element for each rank, in the order of the ranks. Stalls has the newest warnings about
	// stalls, and Steps the steps that have ended since the last state. They are empty except at rank 0.
	HeldUp []trace.HeldUp `json:"held_up,omitempty"`
	Stalls []Stall        `json:"stalls,omitempty"`
	Steps  []trace.Step   `json:"steps,omitempty"`
	// Timeline is the file to which the rank writes a timeline, or "".
	Timeline string `json:"timeline,omitempty"`
}

// Switched is the answer of a rank that was asked to start or to stop its timeline.
type Switched struct {
	// File is the file of the timeline that has begun or ended. It is empty if there was none to end.
	File string `json:"file,omitempty"`
	// Error says why the rank has failed to do it.
	Error string `json:"error,omitempty"`
}

// Stall is a warning that a tensor has waited for longer than the stall warning time.
type Stall struct {
	recorder.Stall
	// Ago is the time since the last warning. If the tensor waits for a shorter time, it is another wait.
	Ago time.Duration `json:"ago_ns"`
}

// Counters count what a process has done since the beginning of the epoch, or since the start of the node.
type Counters struct {
	// Operations is the number of operations that have ended: at a rank fused responses and messages, at a
	// node pushes and pulls. Tensors is the number of tensors in them, and Bytes the size of their inputs, or
	// at a node that of its messages.
	Operations uint64 `json:"operations"`
	Tensors    uint64 `json:"tensors"`
	Bytes      uint64 `json:"bytes"`
	// Failed is the number of tensors that ended with an error, or of messages that were sent again.
	Failed uint64 `json:"failed"`
	// Marked is the number of training steps that the program has marked.
	Marked uint64 `json:"steps_marked,omitempty"`
	// Computing, Waiting, Queued and Communicating are for how long the rank was in each phase
	// (trace.Phase).
	Computing     time.Duration `json:"computing_ns"`
	Waiting       time.Duration `json:"waiting_ns"`
	Queued        time.Duration `json:"queued_ns"`
	Communicating time.Duration `json:"communicating_ns"`
	// Pending is the number of tensors, or requests, that have not ended.
	Pending int `json:"pending"`
}

// NewRank returns the state of a rank with the given snapshot and counters.
func NewRank(s *analysis.Snapshot, st *trace.Stats) *Rank {
	r := &Rank{Snapshot: s, Counters: Counters{Failed: st.Refused + st.Failed, Marked: st.Steps,
		Computing: st.Phases[trace.Computing], Waiting: st.Phases[trace.Waiting],
		Queued: st.Phases[trace.Queued], Communicating: st.Phases[trace.Communicating], Pending: st.InFlight}}
	for i := range st.Operations {
		o := &st.Operations[i]
		r.Operations, r.Tensors = r.Operations+o.Durations.Count(), r.Tensors+o.Tensors
	}
	for i := range st.Moved {
		r.Bytes += st.Moved[i].Bytes
	}
	if st.Coordinator != nil {
		r.HeldUp = st.Coordinator.Late
	}
	return r
}

// Encode returns the state as a rank sends it to the launcher: the version, the state as JSON, and the
// records of the snapshot in the encoding of Records.
func (r *Rank) Encode() ([]byte, error) {
	head, snapshot := *r, *r.Snapshot
	snapshot.Pending, snapshot.Operations, head.Snapshot = nil, nil, &snapshot
	text, err := json.Marshal(&head)
	if err != nil {
		return nil, fmt.Errorf("encode the state of a rank: %w", err)
	}
	c := newEncoder()
	c.version()
	c.size(len(text), 1)
	c.b = append(c.b, text...)
	c.state(r.Snapshot)
	return c.b, nil
}

// DecodeRank decodes the result of Encode.
func DecodeRank(text []byte) (*Rank, error) {
	r, c := new(Rank), newDecoder(text)
	c.version()
	n := c.size(0, 1)
	head := text[c.at : c.at+n]
	c.at += n
	if c.err == nil {
		c.err = json.Unmarshal(head, r)
	}
	if c.err == nil && r.Snapshot == nil {
		c.fail("it has no snapshot")
	}
	if c.err == nil {
		r.Snapshot.Pending, r.Snapshot.Operations = nil, nil
		c.state(r.Snapshot)
	}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("malformed state of a rank: %w", err)
	}
	return r, nil
}

// About says which job it is.
type About struct {
	// PID is the number of hvdrun's process, and Host its host.
	PID  int    `json:"pid"`
	Host string `json:"host"`
	// Command is the command of the processes, and Started when hvdrun was started.
	Command []string  `json:"command"`
	Started time.Time `json:"started"`
	Version string    `json:"version"`
	// What is the kind of the processes: ranks or nodes. Size is their number, which may change in an elastic
	// job.
	What string `json:"what"`
	Size int    `json:"size"`
}

// The values of About.What.
const (
	Ranks = "ranks"
	Nodes = "nodes"
)

// DecodeAbout decodes an About that is encoded as JSON.
func DecodeAbout(text []byte) (*About, error) {
	a := new(About)
	if err := json.Unmarshal(text, a); err != nil {
		return nil, fmt.Errorf("malformed description of a job: %w", err)
	}
	return a, nil
}

// Job is the state of a job at one moment.
type Job struct {
	About
	Time      time.Time `json:"time"`
	Processes []Process `json:"processes"`
	// Steps has the steps that have ended since the last state, or for the first state the last ones. It is
	// empty if the program marks no steps.
	Steps []trace.Step `json:"steps,omitempty"`
	// Findings says which ranks wait for which ranks. It is nil in a job of nodes, and in the last state.
	Findings *analysis.Findings `json:"findings,omitempty"`
	// Problems says what is wrong, the worst first.
	Problems []Problem `json:"problems,omitempty"`
	// End says how the job has ended. Then this is the last state, without Processes.
	End *End `json:"end,omitempty"`
}

// Process is the state of a rank or of a node. If it has not answered, only Name, Rank, Host, Known, Held and
// HeldUp are set.
type Process struct {
	// Name is the name of the process, such as rank 3 or server 1. Rank is its number: the rank, or the
	// position in the list of nodes.
	Name     string `json:"name"`
	Rank     int    `json:"rank"`
	Host     string `json:"host"`
	Answered bool   `json:"answered"`
	// Known is what the launcher knows about the process, as a clause. It is empty if the process has
	// answered.
	Known string `json:"known,omitempty"`
	PID   int    `json:"pid,omitempty"`
	// Epoch is the epoch of the rank, and Up the time since the start of its engine or of the node.
	Epoch uint64        `json:"epoch,omitempty"`
	Up    time.Duration `json:"up_ns,omitempty"`
	// Timeline is the file to which the rank writes a timeline, or "".
	Timeline string `json:"timeline,omitempty"`
	Counters
	// Held is for how long the process has held up all others, and HeldUp for how long all others than
	// another process were held up by that one, which this process was too. Rank 0 or the scheduler measures
	// both.
	Held   time.Duration `json:"held_ns"`
	HeldUp time.Duration `json:"held_up_ns"`
}

// End says how a job has ended.
type End struct {
	// Status is the exit status of hvdrun, and Text says why the job has ended, as a sentence.
	Status int    `json:"status"`
	Text   string `json:"text"`
	// Report is what hvdrun has printed at the end about what the processes did, or empty. It has at most a
	// few hundred lines, without control characters.
	Report string `json:"report,omitempty"`
}

// DecodeJob decodes a Job that is encoded as JSON.
func DecodeJob(text []byte) (*Job, error) {
	j := new(Job)
	if err := json.Unmarshal(text, j); err != nil {
		return nil, fmt.Errorf("malformed state of a job: %w", err)
	}
	return j, nil
}

// OfRanks returns the state of a job of ranks at a moment. ranks has the states that have arrived. hosts and
// known have, for each rank, the host and a clause that says what the launcher knows about its process. Both
// may be shorter than the list of ranks.
func OfRanks(about About, now time.Time, ranks map[int]*Rank, hosts, known []string) *Job {
	j := &Job{About: about, Time: now}
	var snapshots []*analysis.Snapshot
	absent := make(map[int]string)
	full := make(map[int]bool) // the ranks with operations that may have waited for long and are not shown
	for r := range about.Size {
		p := Process{Name: fmt.Sprintf("rank %d", r), Rank: r, Host: at(hosts, r)}
		if k := ranks[r]; k != nil {
			s := k.Snapshot
			snapshots = append(snapshots, s)
			full[s.Rank] = len(s.Pending) >= maxPending(s.Size)
			p.Answered, p.Host, p.PID, p.Epoch, p.Up = true, s.Host, s.PID, s.Epoch, s.At
			p.Counters, p.Timeline = k.Counters, k.Timeline
		} else {
			p.Known = at(known, r)
			absent[r] = p.Known
		}
		j.Processes = append(j.Processes, p)
	}
	j.Findings = analysis.Analyse(snapshots, about.Size, absent)
	var stalls []Stall
	if zero := ranks[0]; zero != nil {
		stalls = zero.Stalls
		for _, h := range zero.HeldUp {
			j.held(int(h.Rank), h.Held)
		}
	}
	j.addRankProblems(stalls, full)
	return j
}

// OfNodes returns the state of a job of nodes. names has their names, and nodes the states that have arrived,
// both by the position of the node.
func OfNodes(about About, now time.Time, nodes map[int]*trace.Node, names, hosts, known []string) *Job {
	j := &Job{About: about, Time: now}
	var all []*trace.Node
	numbers := make(map[string]int)
	for i, name := range names {
		numbers[name] = i
		p := Process{Name: name, Rank: i, Host: at(hosts, i)}
		if n := nodes[i]; n != nil {
			all = append(all, n)
			p.Answered, p.Up = true, n.Up
			for _, x := range n.Peers {
				p.Pending += x.Waiting
			}
		} else {
			p.Known = at(known, i)
		}
		j.Processes = append(j.Processes, p)
	}
	found := analysis.AnalyseNodes(all)
	for _, n := range found.Nodes() {
		if i, is := numbers[n.Name]; is {
			p := &j.Processes[i]
			p.Operations, p.Bytes, p.Failed = n.Requests, n.Sent+n.Received, n.Resent
		}
	}
	// The scheduler also knows it of nodes that have not answered.
	for _, n := range all {
		for i := range n.Peers {
			if number, is := numbers[n.Peers[i].Name]; is {
				j.held(number, n.Peers[i].HeldUp)
			}
		}
	}
	j.addNodeProblems(found.Waits(), numbers)
	return j
}

// held records for how long a process has held up all others.
func (j *Job) held(number int, time time.Duration) {
	for i := range j.Processes {
		switch {
		case i != number:
			j.Processes[i].HeldUp += time
		default:
			j.Processes[i].Held += time
		}
	}
}

// at returns an element of a list, or "" if the list is shorter.
func at(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return ""
}

// Rates is what a process has done in each second between two states. All but Operations and Bytes are shares
// of the time, from 0 to 1.
type Rates struct {
	Operations, Bytes                         float64
	Held, HeldUp                              float64
	Computing, Waiting, Queued, Communicating float64
}

// Since returns the rates of each process since an earlier state. The rates of a process are 0 if it did not
// answer in one of the states, or was started again in between. Held and HeldUp are 0 if this is so for the
// process that measures them.
func (j *Job) Since(before *Job) []Rates {
	rates := make([]Rates, len(j.Processes))
	if before == nil {
		return rates
	}
	past := make(map[string]*Process)
	for i := range before.Processes {
		past[before.Processes[i].Name] = &before.Processes[i]
	}
	// The process that measures the waiting is the first one: rank 0, or the scheduler.
	measured := j.between(past, 0)
	for i := range j.Processes {
		p, r := &j.Processes[i], &rates[i]
		old := past[p.Name]
		if old == nil {
			continue
		}
		if time := j.between(past, i); time > 0 {
			r.Operations = float64(p.Operations-old.Operations) / time
			r.Bytes = float64(p.Bytes-old.Bytes) / time
			r.Computing = (p.Computing - old.Computing).Seconds() / time
			r.Waiting = (p.Waiting - old.Waiting).Seconds() / time
			r.Queued = (p.Queued - old.Queued).Seconds() / time
			r.Communicating = (p.Communicating - old.Communicating).Seconds() / time
		}
		if measured > 0 {
			r.Held = (p.Held - old.Held).Seconds() / measured
			r.HeldUp = (p.HeldUp - old.HeldUp).Seconds() / measured
		}
	}
	return rates
}

// between returns the seconds between two states of process i, or 0 if they cannot be compared. The counters
// of a node of a parameter server begin at 0 again if it was started again.
func (j *Job) between(past map[string]*Process, i int) float64 {
	if i >= len(j.Processes) {
		return 0
	}
	p := &j.Processes[i]
	old := past[p.Name]
	if old == nil || !p.Answered || !old.Answered || p.Epoch != old.Epoch || p.PID != old.PID ||
		p.Up <= old.Up || p.Operations < old.Operations || p.Bytes < old.Bytes {
		return 0
	}
	return (p.Up - old.Up).Seconds()
}

// StepSummary is what the last steps have in common.
type StepSummary struct {
	// Steps is the number of steps. Median and P99 are quantiles of their times.
	Steps       int
	Median, P99 time.Duration
	// Late has, for each rank, the number of steps in which it held up all others for a time that is worth
	// looking into.
	Late []int
}

// Summarize returns the summary of steps.
func Summarize(steps []trace.Step) (s StepSummary) {
	var times analysis.Sample
	for i := range steps {
		p := &steps[i]
		times.Add(int64(p.Time))
		for len(s.Late) < len(p.Held) {
			s.Late = append(s.Late, 0)
		}
		for r, held := range p.Held {
			if (analysis.Span{Time: p.Time, Steps: 1}).Long(held) {
				s.Late[r]++
			}
		}
	}
	s.Steps = len(steps)
	s.Median, s.P99 = time.Duration(times.Quantile(0.5)), time.Duration(times.Quantile(0.99))
	return s
}

// Suspects returns the processes that have held up all others for a good part of the time since an earlier
// state, by the rule of analysis.Lateness.Suspects.
func (j *Job) Suspects(rates []Rates, since time.Duration) (numbers []int) {
	found := new(analysis.Lateness)
	for i := range j.Processes {
		held := time.Duration(rates[i].Held * float64(since))
		found.Ranks = append(found.Ranks, &analysis.RankLateness{Rank: i, Held: held})
	}
	for _, r := range found.Suspects(analysis.Span{Time: since}) {
		numbers = append(numbers, r.Rank)
	}
	return numbers
}

// Problem is a sentence about ranks or nodes that others wait for, or that do not answer.
type Problem struct {
	Text string `json:"text"`
	// Stalled says that the wait has lasted for longer than the stall warning time.
	Stalled bool `json:"stalled,omitempty"`
	// Missing are the numbers of the processes that others wait for, or that did not answer. A rank of which
	// it is not known whether others wait for it is only in Text.
	Missing []int `json:"missing,omitempty"`
}

// addRankProblems adds what is wrong in a job of ranks. If the coordinator has not warned about a tensor, and
// it may wait only for ranks that have called it less than a second ago, nothing is wrong. full has the ranks
// that may have called it before.
func (j *Job) addRankProblems(stalls []Stall, full map[int]bool) {
	f := j.Findings
	for i := range f.Waiting {
		w := &f.Waiting[i]
		p := Problem{Missing: slices.Clone(w.Silent)}
		for _, m := range w.Missing {
			p.Missing = append(p.Missing, m.Rank)
		}
		p.Stalled = slices.ContainsFunc(stalls, func(s Stall) bool {
			return s.Set == w.Set && slices.Contains(w.Names, s.Name) && w.Longest >= s.Ago
		})
		if w.Longest >= leastWait && (len(p.Missing) > 0 || p.Stalled && len(w.Unknown) > 0 ||
			slices.ContainsFunc(w.Unknown, func(r int) bool { return full[r] })) {
			p.Text = w.Text()
			j.Problems = append(j.Problems, p)
		}
	}
	for i := range f.Running {
		if r := &f.Running[i]; r.Longest >= leastWait && len(r.Inside)+len(r.Queued) > 0 {
			j.Problems = append(j.Problems, Problem{Text: r.Text()})
		}
	}
	silent := make([]int, len(f.Silent))
	for i, s := range f.Silent {
		silent[i] = s.Rank
	}
	for _, text := range f.SilentText() {
		j.Problems = append(j.Problems, Problem{Text: text, Missing: silent})
	}
	slices.SortStableFunc(j.Problems, func(a, b Problem) int {
		switch {
		case a.Stalled == b.Stalled:
			return 0
		case a.Stalled:
			return -1
		}
		return 1
	})
}

// addNodeProblems adds what is wrong in a job of nodes. A barrier in which no worker waits is the one at the
// end of the job, where the servers and the scheduler wait from the beginning.
func (j *Job) addNodeProblems(waits []trace.NodeWait, numbers map[string]int) {
	for i := range j.Processes {
		if p := &j.Processes[i]; !p.Answered {
			text := fmt.Sprintf("The %s did not answer: %s.", p.Name, p.Known)
			j.Problems = append(j.Problems, Problem{Text: text, Missing: []int{i}})
		}
	}
	isWorker := func(name string) bool { return strings.HasPrefix(name, "worker") }
	for i := range waits {
		if waits[i].Time < leastWait || !slices.ContainsFunc(waits[i].Waiting, isWorker) {
			continue
		}
		p := Problem{Text: analysis.NodeWaitText(&waits[i])}
		for _, name := range waits[i].Missing {
			if number, is := numbers[name]; is {
				p.Missing = append(p.Missing, number)
			}
		}
		j.Problems = append(j.Problems, p)
	}
}
