package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Timeout reports that a tensor was not done within the time limit of its caller. The coordinator answers
// with a verdict if it knows which ranks hold up the tensor. It gives no answer if the request, or the grant
// of the tensor to this rank, is still in flight, if no heartbeat has named the grant yet, or if a lock-step
// cycle is late. If the tensor does not finish then, the caller must call Timeout again. If the coordinator
// has missed its heartbeats, Expire fails rank 0, or the leader that sends them.
func (m *Member) Timeout(set topo.ProcessSetID, tensor string, after time.Duration) {
	m.timedOut(message.Up{Set: set, Tensor: tensor}, after)
}

// TimeoutOfMessage is like Timeout for a message to or from the given rank, which is this rank if the message
// may come from any rank.
func (m *Member) TimeoutOfMessage(set topo.ProcessSetID, name string, peer topo.Rank, after time.Duration) {
	m.timedOut(message.Up{Set: set, Tensor: name, Message: true, Suspect: peer}, after)
}

// ExpireShutdown reports that the context of Shutdown has ended before this rank has left the job. waited is
// how long Shutdown has waited until its deadline, or 0 if it was canceled. The coordinator answers with a
// verdict, or lets this rank leave if nothing keeps it. The caller must call ExpireShutdown again while this
// rank is in the job. After the bye of this rank, other ranks may still execute operations with it, but it
// does not wait for them, unless it is rank 0 or keeps a rank that has not sent bye.
func (m *Member) ExpireShutdown(waited time.Duration) {
	switch {
	case m.state == memberClosed || m.state == memberFailed:
	case m.state == memberBye && m.cfg.Rank != 0 && !m.cfg.Keeps:
		m.state = memberClosed
	default:
		m.report(message.Up{}, waited)
	}
}

func (m *Member) timedOut(u message.Up, after time.Duration) {
	if m.state == memberRunning || m.state == memberDraining {
		m.report(u, after)
	}
}

// report adds a timeout to the reports.
func (m *Member) report(u message.Up, after time.Duration) {
	u.Type, u.Millis = message.UpTimeout, millis(after)
	m.reports = append(m.reports, u)
	m.expired = &u
}

// has reports whether a grant in the list contains the tensor. If tensor is empty, it reports whether the
// list has a grant.
func (l *grantList) has(set topo.ProcessSetID, tensor string) bool {
	if tensor == "" {
		return l.oldest != nil
	}
	for g := l.oldest; g != nil; g = g.newer {
		if g.Asked == set && slices.ContainsFunc(g.Responses, func(r *message.Response) bool {
			return r.Name == tensor
		}) {
			return true
		}
	}
	return false
}

// reportedTimeout is the report of a rank that an operation, a message or a Shutdown has timed out.
type reportedTimeout struct {
	by topo.Rank
	up message.Up
}

// timeout gives the verdict about a report.
func (c *Coordinator) timeout(t *reportedTimeout) {
	switch {
	case t.up.Tensor != "":
		c.expireTensor(t.by, &t.up)
	case c.ranks.all[t.by].bye && t.by != 0:
		c.expireKeeper(t.by, &t.up)
	default:
		c.expireShutdown(t.by, &t.up)
	}
}

// expireTensor fails the epoch because a tensor was not done in time. The argument by is the rank at which it
// timed out. If the grant of the tensor is in flight to that rank, expireTensor does nothing.
func (c *Coordinator) expireTensor(by topo.Rank, u *message.Up) {
	if silent := c.ranks.silent(2 * heartbeatPeriod); len(silent) > 0 {
		// The request of the silent rank may not have arrived yet. In lock-step, the requests of other ranks
		// may be missing too, because all ranks wait for the silent rank.
		c.fail(silent, timeoutText(message.NoKind, by, u, c.ranks.silentText(silent)))
		return
	}
	if u.Message && c.sets.find(u.Set) == nil {
		return // the removal of the set is about to end the message
	}
	if u.Message {
		why := fmt.Sprintf("rank %d has not taken part in it", u.Suspect)
		if u.Suspect == by {
			why = "no rank has sent it"
		}
		c.fail([]topo.Rank{u.Suspect}, timeoutText(message.NoKind, by, u, why))
		return
	}
	if c.overdue() {
		return // when the report is repeated, the rank that is late will be known
	}
	s, _ := c.sets.member(u.Set, by)
	// If the tensor was granted, the name may be in use again: an operation on a device may be done for the
	// program when it has been launched.
	if s != nil && c.ranks.all[by].stop == 0 && !u.Granted {
		if kind, ranks, why := s.blocked(by, u.Tensor); why != "" {
			if len(ranks) == 0 {
				ranks = []topo.Rank{by}
			} else {
				ranks, why = c.sets.addAwaited(ranks, why)
			}
			c.fail(ranks, timeoutText(kind, by, u, why))
			return
		}
	}
	if u.Granted {
		c.expireGrant(by, by, u)
	} else if s != nil && s.isReady(u.Tensor) {
		c.expireGrant(by, s.Ranks[0], u) // unfinished grants of this rank keep the gate closed
	}
}

// expireGrant fails the epoch because ranks have not finished an operation. The rank holder has not finished
// the tensor, or an earlier grant of its set. If no heartbeat has named a grant of the set yet, expireGrant
// does nothing. The oldest grant of each rank may also be one of another set; this is assumed only if the
// report was repeated, because otherwise the grants of the set may be too new to be named.
func (c *Coordinator) expireGrant(by, holder topo.Rank, u *message.Up) {
	ranks, why := c.ranks.unfinished(u.Set)
	x := &c.ranks.all[holder].executing
	if len(ranks) == 0 && x.tensor != "" && c.now-c.ranks.all[by].timeouts.first >= 2*heartbeatPeriod {
		ranks, why = c.ranks.unfinished(x.set)
	}
	if len(ranks) > 0 {
		c.fail(ranks, timeoutText(message.NoKind, by, u, why))
	}
}

// overdue reports whether a lock-step cycle is late, because some rank has not entered it. That rank is
// silent, but perhaps not for long enough yet. Requests of the other ranks wait for the cycle.
func (c *Coordinator) overdue() bool {
	return c.cfg.Lockstep && !c.stopSent && c.now-c.combined >= max(heartbeatPeriod, 2*c.cfg.CycleTime)
}

// silentText returns a text that says for how long the given ranks have been silent.
func (t *roster) silentText(ranks []topo.Rank) string {
	return have(ranks) + " been silent for " + seconds(t.now-t.lastReceived(ranks[0]))
}

func timeoutText(k message.Kind, by topo.Rank, u *message.Up, why string) string {
	return fmt.Sprintf("%s at rank %d: %s", expiredText(k, u), by, why)
}

// expiredText returns a text such as "barrier \"b\" timed out after 5s".
func expiredText(k message.Kind, u *message.Up) string {
	what := label(k, u.Tensor)
	switch {
	case u.Message:
		what = u.Tensor
	case u.Tensor == "" && u.Millis == 0:
		return "Shutdown was canceled"
	case u.Tensor == "":
		what = "Shutdown"
	}
	return fmt.Sprintf("%s timed out after %s", what, seconds(time.Duration(u.Millis)*time.Millisecond))
}

// blocked returns the ranks that keep a tensor from being granted, and a text that says what they have not
// done. If the ranks are unknown, it returns none. If the tensor is unknown or no rank blocks it, the text is
// empty. It is also empty if the request of the rank by has not arrived yet: then the tensor may be an
// earlier one of the same name, or by may wait for the next cycle in lock-step.
func (s *setState) blocked(by topo.Rank, tensor string) (kind message.Kind, ranks []topo.Rank, why string) {
	if g := s.held.find(tensor); g != nil {
		kind = g.items[g.index(tensor)].kind()
		why = fmt.Sprintf("its group %q has %d of %d tensors", g.name, len(g.items), g.size)
		s.eachWaiting(func(_ *wait, key groupKey, stall func() Stall) {
			if ranks != nil || key != g.groupKey {
				return
			}
			if st := stall(); st.Group == "" {
				ranks = st.Missing
				why = fmt.Sprintf("its group %q waits for %s, which %s not submitted", g.name,
					label(st.Kind, st.Name), have(ranks))
			}
		})
		return kind, ranks, why
	}
	did, like := "submitted it", ""
	bit, cached := s.cache.BitOf(tensor)
	switch row := s.table[tensor]; {
	case row != nil && !row.complete:
		first := firstOf(row.requests)
		kind, ranks, like = first.Kind, s.rowMissing(row), likeText(s.addedAlike(first))
	case cached && s.bitWaiting(bit):
		kind, ranks = s.cache.At(bit).Kind, s.bitMissing(bit)
	// Exclude "", because it is the element of s.joined.names for a rank that has not joined.
	case tensor != "" && slices.Contains(s.joined.names, tensor):
		kind, ranks, did = message.Join, s.joining(), "joined"
	default:
		return message.NoKind, nil, ""
	}
	if slices.Contains(ranks, by) {
		return message.NoKind, nil, ""
	}
	return kind, ranks, have(ranks) + " not " + did + like
}

// addAwaited adds the ranks for which the given ranks wait. The given ranks have not submitted an operation
// in time, perhaps only because they wait for other operations, which other ranks have not submitted. It is
// not known whether a rank that waits does nothing else meanwhile, so the given ranks stay in the list. A
// rank that waits for a rank in the list is not added. addAwaited also extends why, which says what the given
// ranks have not submitted.
func (t *setTable) addAwaited(ranks []topo.Rank, why string) ([]topo.Rank, string) {
	type awaited struct {
		Stall
		missing, waiting message.Bits // ranks
	}
	var operations []awaited
	t.eachAwaited(func(st Stall, waiting []topo.Rank) {
		operations = append(operations, awaited{st, bitsOf(st.Missing), bitsOf(waiting)})
	})
	late := bitsOf(ranks)
	var waitToo message.Bits // the ranks that wait for a rank in late
	update := func() {
		for i := range operations {
			if operations[i].missing.Intersects(late) {
				waitToo.Or(operations[i].waiting)
			}
		}
	}
	update()
	for more := true; more; {
		more = false
		for _, op := range operations {
			if op.Group != "" || !op.waiting.Intersects(late) {
				continue
			}
			added := slices.DeleteFunc(slices.Clone(op.Missing), func(r topo.Rank) bool {
				return late.Has(uint32(r)) || waitToo.Has(uint32(r))
			})
			if len(added) == 0 {
				continue
			}
			by := slices.DeleteFunc(ranksIn(op.waiting), func(r topo.Rank) bool {
				return !late.Has(uint32(r))
			})
			why += fmt.Sprintf(", while %s %s, which %s not submitted", waitFor(by),
				label(op.Kind, op.Name), have(added))
			late.Or(bitsOf(added))
			update()
			more = true
		}
	}
	return ranksIn(late), why
}

// bitsOf returns a vector with the bits of the given ranks.
func bitsOf(ranks []topo.Rank) (v message.Bits) {
	for _, r := range ranks {
		v.Set(uint32(r))
	}
	return v
}

// eachAwaited calls visit for each operation of any process set, including joins, for which some ranks wait.
func (t *setTable) eachAwaited(visit func(st Stall, waiting []topo.Rank)) {
	for _, s := range t.sets {
		s.eachAwaited(visit)
	}
}

// isReady reports whether a tensor waits only for the gate to open.
func (s *setState) isReady(tensor string) bool {
	return slices.ContainsFunc(s.ready, func(i readyItem) bool { return i.response.Name == tensor })
}

// unfinished returns the ranks that keep a granted tensor from being done, and a text that says what they
// have not finished. The grants of a set run in order, so the ranks whose heartbeats name the oldest grant of
// the set hold up the other ranks. Grants whose ages differ by less than a heartbeat period count as equally
// old. If no heartbeat names a grant of the set, unfinished returns none.
func (t *roster) unfinished(set topo.ProcessSetID) (ranks []topo.Rank, why string) {
	oldest := Never
	for r := range t.all {
		if x := &t.all[r].executing; x.tensor != "" && x.set == set {
			oldest = min(oldest, x.since)
		}
	}
	named := make(map[string]bool)
	for r := range t.all {
		e := &t.all[r].executing
		if e.tensor == "" || e.set != set || e.since-oldest >= heartbeatPeriod {
			continue
		}
		ranks = append(ranks, topo.Rank(r))
		if named[e.tensor] {
			continue
		}
		named[e.tensor] = true
		var at []topo.Rank
		t.eachExecution(e, func(r topo.Rank, _ *execution) { at = append(at, r) })
		if why != "" {
			why += ", "
		}
		why += fmt.Sprintf("%s not finished %q", have(at), e.tensor)
	}
	return ranks, why
}

// unfinishedBut is like unfinished for all sets in which ranks other than r execute operations.
func (t *roster) unfinishedBut(r topo.Rank) (ranks []topo.Rank, why string) {
	var sets []topo.ProcessSetID
	for other := range t.all {
		x := &t.all[other].executing
		if topo.Rank(other) == r || x.tensor == "" || slices.Contains(sets, x.set) {
			continue
		}
		sets = append(sets, x.set)
		more, text := t.unfinished(x.set)
		ranks = append(ranks, more...)
		if why != "" {
			why += ", "
		}
		why += text
	}
	slices.Sort(ranks)
	return slices.Compact(ranks), why
}
