package controller

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Event is an event that the caller may report to users. Exactly one field is set. The caller may also ignore
// events.
type Event struct {
	Stall *Stall
}

// Stall describes a tensor that has waited for ranks for StallWarning or for a multiple of it.
type Stall struct {
	Set topo.ProcessSetID
	// Kind is the operation. It is NoKind if Executing is set or if the ranks did not agree on an operation.
	Kind message.Kind
	Name string
	// Group is set if all ranks have requested the tensor, and it waits for tensors of its group that no rank
	// has requested. Then Group is the name of that group. Otherwise it is empty.
	Group string
	// Missing are the ranks for which the tensor waits, in ascending order. They have not requested the
	// tensor or the rest of its group. If Executing is set, they have not finished the operation.
	Missing   []topo.Rank
	Waited    time.Duration
	Executing bool
	// Like are the names of other additions of process sets that have the same ranks and wait too.
	Like []string

	// row has the requests for the tensor, or is nil. Only the members that it needs take part.
	row *tableRow
}

// concerns reports whether the member takes part in the operation st of the set.
func (s *setState) concerns(st *Stall, member int) bool {
	return st.row == nil || s.needs(st.row, member)
}

func (s *Stall) String() string {
	text := fmt.Sprintf("%s of process set %d has waited %s for ", label(s.Kind, s.Name), s.Set,
		seconds(s.Waited))
	switch {
	case s.Executing:
		text += topo.FormatRanks(s.Missing) + " to finish it"
	case s.Group != "":
		text += fmt.Sprintf("%s to submit the missing tensors of its group %q", topo.FormatRanks(s.Missing), s.Group)
	default:
		text += topo.FormatRanks(s.Missing)
	}
	return text + likeText(s.Like)
}

// label formats an operation. If k is NoKind, it formats only the name.
func label(k message.Kind, name string) string {
	if k == message.NoKind {
		return fmt.Sprintf("tensor %q", name)
	}
	return fmt.Sprintf("%v %q", k, name)
}

// wait records since when a tensor has waited, and how often Events has reported it. All requests that arrive
// in the same turn have the same arrival time, except requests that a leader has held.
type wait struct {
	since   time.Duration // the time at which the first request arrived
	latest  time.Duration // the time at which the latest request arrived
	by      topo.Rank     // the rank that made the latest request
	others  time.Duration // the time at which the latest request of another rank arrived
	reports int
}

// waits records in due the earliest time at which a waiting tensor must be checked. All tensors of a
// coordinator share this time. So a vote costs only a comparison of times, and no tensor is checked before
// due.
type waits struct {
	now        time.Duration // the time at which the requests that are being applied arrived
	checkAfter time.Duration // the time after which a waiting tensor is checked; 0 means never
	due        time.Duration
	late       analysis.Held // lateness of the ranks over all process sets
	trace      bool          // whether to record arrival times
}

func newWaits(warning, shutdown, now time.Duration, ranks int) *waits {
	w := &waits{now: now, checkAfter: warning, due: Never, late: analysis.NewHeld(ranks)}
	if shutdown > 0 && (warning == 0 || shutdown < warning) {
		w.checkAfter = shutdown
	}
	return w
}

func (w *waits) begin(r topo.Rank) wait {
	begun := w.beginAt(w.now)
	begun.by = r
	return begun
}

func (w *waits) beginAt(since time.Duration) wait {
	if w.checkAfter > 0 {
		w.due = min(w.due, since+w.checkAfter)
	}
	return wait{since: since, latest: since, others: since}
}

// arrived records that rank r has made a request for the tensor. Requests that leaders have held need not
// arrive in the order of their times.
func (w *waits) arrived(r topo.Rank, x *wait) { x.arrived(r, w.now) }

func (x *wait) arrived(r topo.Rank, at time.Duration) {
	x.since = min(x.since, at)
	if at >= x.latest {
		x.others, x.latest, x.by = x.latest, at, r
	} else {
		x.others = max(x.others, at)
	}
}

// askTimes has the times at which requests of at least two ranks for the same tensors arrived: the first, the
// latest, and the second latest, with the ranks of the last two.
type askTimes struct {
	first, latest, second time.Duration
	latestBy, secondBy    topo.Rank
	count                 int
}

func (t *askTimes) add(r topo.Rank, at time.Duration) {
	if t.count == 0 {
		t.first = at
	}
	t.first = min(t.first, at)
	switch {
	case t.count == 0 || at >= t.latest:
		t.second, t.secondBy, t.latest, t.latestBy = t.latest, t.latestBy, at, r
	case t.count == 1 || at >= t.second:
		t.second, t.secondBy = at, r
	}
	t.count++
}

// arrivedTogether records that several ranks have made a request for the tensor. begun is set if other ranks
// have made it before.
func (w *waits) arrivedTogether(x *wait, begun bool, times *askTimes) {
	if begun {
		x.since = min(x.since, times.first)
		x.arrived(times.secondBy, times.second)
	} else {
		*x = w.beginAt(times.first)
		x.latest, x.others, x.by = times.second, times.second, times.secondBy
	}
	x.arrived(times.latestBy, times.latest)
}

// over records that a wait is over because the last rank that was missing has made its request.
func (w *waits) over(x *wait) { w.late.Add(x.by, x.others, x.latest, true) }

// execution is the oldest grant that a rank has not finished, according to its last heartbeat.
type execution struct {
	wait
	set    topo.ProcessSetID
	tensor string // the name of the tensor, or "" if the rank has no unfinished grant
}

// handle applies a heartbeat, which names the oldest unfinished grant of the rank.
func (e *execution) handle(u *message.Up, w *waits) {
	age := time.Duration(u.Millis) * time.Millisecond
	switch {
	case u.Tensor == "":
		*e = execution{}
	case u.Tensor == e.tensor && u.Set == e.set && (w.now-age-e.since).Abs() < heartbeatPeriod/2:
		// This is the grant that the previous heartbeat named: both began at the same time, apart from the
		// transfer times of the heartbeats. A later grant of the same name would have begun a good part of a
		// heartbeat period later.
	default:
		*e = execution{wait: w.beginAt(w.now - age), set: u.Set, tensor: u.Tensor}
	}
}

// Events returns the events that have happened since the last call of Events. The result is valid until the
// next call.
func (c *Coordinator) Events() []Event {
	events := c.events
	c.events, c.oldEvents = c.oldEvents[:0], events
	return events
}

// checkStalls reports tensors that have waited for too long. If one has waited for StallShutdown, it stops
// the job.
func (c *Coordinator) checkStalls() {
	if c.now < c.waits.due {
		return
	}
	c.waits.due = Never
	for _, s := range c.sets.sets {
		s.eachWaiting(func(w *wait, _ groupKey, stall func() Stall) {
			if c.leaving == 0 || c.ranks.isAwaited(s, stall()) {
				c.checkStall(w, c.now-w.since, stall)
			}
		})
	}
	c.checkExecutions()
}

// checkStall checks one tensor. If the tensor has waited for long enough, checkStall reports it or stops the
// job because of it.
func (c *Coordinator) checkStall(w *wait, waited time.Duration, stall func() Stall) {
	next := Never
	if period := c.cfg.StallWarning; period > 0 {
		if n := int(waited / period); n > w.reports {
			w.reports = n
			st := stall()
			st.Waited = waited
			c.report(&st)
		}
		next = c.now - waited + time.Duration(w.reports+1)*period
	}
	if limit := c.cfg.StallShutdown; limit > 0 {
		if waited >= limit {
			st := stall()
			st.Waited = waited
			c.stop("stalled: " + st.String())
			return
		}
		next = min(next, c.now-waited+limit)
	}
	c.waits.due = min(c.waits.due, next)
}

func (c *Coordinator) report(s *Stall) {
	c.events = append(c.events, Event{Stall: s})
	c.stallReports++
}

// checkExecutions checks operations that ranks have not finished. If several ranks have not finished the same
// operation, they are reported together, with the age of the operation at the rank that began it first.
func (c *Coordinator) checkExecutions() {
	for r := range c.ranks.all {
		e := &c.ranks.all[r].executing
		if e.tensor == "" {
			continue
		}
		oldest, reports := e.since, e.reports
		var ranks []topo.Rank
		c.ranks.eachExecution(e, func(r topo.Rank, x *execution) {
			oldest, reports = min(oldest, x.since), max(reports, x.reports)
			ranks = append(ranks, r)
		})
		w := wait{since: oldest, reports: reports}
		c.checkStall(&w, c.now-oldest, func() Stall {
			return Stall{Set: e.set, Name: e.tensor, Missing: ranks, Executing: true}
		})
		// one report for all
		c.ranks.eachExecution(e, func(_ topo.Rank, x *execution) { x.reports = w.reports })
	}
}

// eachExecution calls visit for each rank that executes the same operation as e.
func (t *roster) eachExecution(e *execution, visit func(r topo.Rank, x *execution)) {
	for r := range t.all {
		if x := &t.all[r].executing; x.tensor == e.tensor && x.set == e.set {
			visit(topo.Rank(r), x)
		}
	}
}

// stop ends the job with the next cycle, for a reason that the coordinator has found.
func (c *Coordinator) stop(reason string) {
	if c.state == running {
		c.state, c.progress, c.stopReason = stopping, c.now, reason
	}
}

// eachWaiting calls visit for each tensor that waits for ranks, and passes the group of the tensor. First
// come the tensors that were requested in full, in the order of their first requests, and then the cached
// tensors. Last come the groups that wait for tensors that no rank has requested; for each of them, visit is
// called with one complete tensor.
func (s *setState) eachWaiting(visit func(w *wait, key groupKey, stall func() Stall)) {
	incomplete := make(map[groupKey]bool) // groups with an incomplete tensor for which visit was called
	for _, row := range s.rows {
		if !row.complete {
			first, key := firstOf(row.requests), groupOf(row.requests)
			incomplete[key] = true
			visit(&row.wait, key, func() Stall {
				return Stall{Set: s.ID, Kind: first.Kind, Name: first.Name, Missing: s.rowMissing(row),
					Like: s.addedAlike(first), row: row}
			})
		}
	}
	for bit := range s.cache.Bound() {
		if r := s.cache.At(bit); r != nil && s.bitWaiting(bit) {
			key := groupKey{r.Group, r.GroupSize}
			incomplete[key] = true
			visit(s.bitWait(bit), key, func() Stall {
				return Stall{Set: s.ID, Kind: r.Kind, Name: r.Name, Missing: s.bitMissing(bit)}
			})
		}
	}
	for _, g := range s.held.groups {
		if incomplete[g.groupKey] || len(g.items) == 0 {
			continue
		}
		item := &g.items[0]
		visit(s.waitOf(item), g.groupKey, func() Stall {
			return Stall{Set: s.ID, Kind: item.kind(), Name: item.response.Name, Group: g.name,
				Missing: s.missing(func(int) bool { return false })}
		})
	}
}

// likeText returns what a warning or an error says about other additions of a process set of the same ranks.
func likeText(names []string) string {
	if len(names) == 0 {
		return ""
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = fmt.Sprintf("%q", name)
	}
	return fmt.Sprintf("; a process set of the same ranks waits with the name %s: "+
		"if they are one set, all its ranks must give it the same name", strings.Join(quoted, " and "))
}

// addedAlike returns the names of the other requests that wait to add a process set with the ranks of q.
func (s *setState) addedAlike(q *message.Request) (names []string) {
	if q.Kind != message.AddProcessSet {
		return nil
	}
	for _, row := range s.rows {
		other := firstOf(row.requests)
		same := other.Kind == q.Kind && slices.Equal(other.Ranks, q.Ranks)
		if same && !row.complete && other.Name != q.Name {
			names = append(names, other.Name)
		}
	}
	return names
}

func (s *setState) waitOf(item *readyItem) *wait {
	if item.cached {
		return s.bitWait(item.bit)
	}
	return &item.row.wait
}

// bitWaiting reports whether some members have voted for bit and other members have neither voted nor joined.
func (s *setState) bitWaiting(bit uint32) bool { return s.cache.Votes(bit) > 0 && !s.bitComplete(bit) }

func (s *setState) rowMissing(row *tableRow) []topo.Rank {
	return s.missing(func(m int) bool {
		return row.requests[m] != nil || !s.needs(row, m)
	})
}

func (s *setState) bitMissing(bit uint32) []topo.Rank {
	return s.missing(func(m int) bool { return s.cache.Voted(m, bit) })
}

// missing returns the members that have neither joined nor made a request. The function asked reports whether
// a member has made it.
func (s *setState) missing(asked func(member int) bool) []topo.Rank {
	var ranks []topo.Rank
	for m, r := range s.Ranks {
		if !asked(m) && !s.joined.has(m) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (w *wait) shift(gap time.Duration) {
	w.since += gap
	w.latest += gap
	w.others += gap
}

// shiftWaits moves the start of all waits forward by gap, a time during which this process did not run.
func (s *setState) shiftWaits(gap time.Duration) {
	for _, row := range s.rows {
		row.shift(gap)
	}
	for bit := range s.bitWaits {
		s.bitWaits[bit].shift(gap)
	}
}
