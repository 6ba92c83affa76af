package controller

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// departure is what the coordinator knows about the shutdown of a rank. A rank leaves in four steps. First it
// announces that it will submit nothing more. When none of its requests can be granted anymore, the
// coordinator stops it. When it has finished its grants, it sends bye. When no other rank still executes an
// operation with it or waits for its messages, the coordinator closes it.
type departure struct {
	leaving bool // whether the rank has announced that it will submit nothing more
	told    bool // whether the other ranks know that
	// These fields describe the frame in which the rank announced its shutdown. at is the time at which the
	// frame arrived.
	at         time.Duration
	operations uint64        // number of responses that the rank had finished by then
	last       string        // the last of these responses, such as `allreduce "g"`
	sinceLast  time.Duration // the time between the end of this response and the shutdown
	reason     string        // the reason that the rank's program passed to Shutdown, or ""
	// channels are the channels over which the rank sends a last frame, each with the rank at the other end.
	channels []message.Channel

	stop   uint64 // the cycle that stopped the rank, or 0 if the rank was not stopped
	stops  bool   // whether the cycle that is being decided stops the rank
	bye    bool
	closed bool
	// holders are the ranks that may still need this rank after its bye, for an operation or for messages.
	holders message.Bits
}

// leave records that rank r will submit nothing more.
func (c *Coordinator) leave(r topo.Rank, up *message.Up) error {
	k := &c.ranks.all[r]
	if k.leaving {
		return fmt.Errorf("got a second shutdown")
	}
	k.departure = departure{
		leaving: true, at: c.now, operations: up.Operations, last: up.Tensor,
		sinceLast: time.Duration(up.Millis) * time.Millisecond, reason: up.Reason,
		channels: slices.Clone(up.Channels),
	}
	c.leaving++
	for _, s := range c.sets.sets {
		s.completeRows()
	}
	if c.leaving == len(c.ranks.all) && c.state == running {
		c.state, c.progress = stopping, c.now
	}
	return nil
}

func (t *roster) isLeaving(r topo.Rank) bool { return t.all[r].leaving }

// leavers returns those of the given ranks that will submit nothing more.
func (t *roster) leavers(ranks []topo.Rank) []topo.Rank {
	return slices.DeleteFunc(slices.Clone(ranks), func(r topo.Rank) bool { return !t.isLeaving(r) })
}

// checkLeavers stops the job if a rank waits for an operation that a leaving rank has not submitted.
func (c *Coordinator) checkLeavers() {
	for _, s := range c.sets.sets {
		if !slices.ContainsFunc(s.Ranks, c.ranks.isLeaving) {
			continue
		}
		s.eachAwaited(func(st Stall, waiting []topo.Rank) {
			gone := c.ranks.leavers(st.Missing)
			waiting = slices.DeleteFunc(waiting, c.ranks.isLeaving)
			if len(gone) > 0 && len(waiting) > 0 {
				c.stopFor(gone, c.ranks.awaitedText(s, &st, gone, waiting))
			}
		})
	}
}

// outstanding returns what keeps the leaving rank r from being stopped, because it may still be granted: an
// operation for which r waits for other ranks, and a set of r that has ready tensors. It returns nil if there
// is none.
func (t *setTable) outstanding(r topo.Rank) (awaited *Stall, ready *setState) {
	for _, s := range t.sets {
		if s.index(r) < 0 {
			continue
		}
		if len(s.ready) > 0 {
			ready = s
		}
		// A rank that has joined takes part in every operation that is granted.
		joined := s.joined.has(s.index(r))
		s.eachAwaited(func(st Stall, waiting []topo.Rank) {
			waits := joined && s.concerns(&st, s.index(r)) || slices.Contains(waiting, r)
			if waits && awaited == nil && !slices.ContainsFunc(st.Missing, t.leaving) {
				awaited = &st
			}
		})
	}
	return awaited, ready
}

// canStop reports whether the next cycle will stop a leaving rank.
func (c *Coordinator) canStop() bool {
	for r := range c.ranks.all {
		if c.stopsAlone(topo.Rank(r)) {
			return true
		}
	}
	return false
}

// stopsAlone reports whether the next cycle will stop rank r because it is leaving.
func (c *Coordinator) stopsAlone(r topo.Rank) bool {
	k := &c.ranks.all[r]
	if !k.leaving || k.stop != 0 {
		return false
	}
	awaited, ready := c.sets.outstanding(r)
	return awaited == nil && ready == nil
}

// eachAwaited calls visit for each operation of the set, including joins, for which some ranks wait. The
// argument waiting holds these ranks, which have made the request.
func (s *setState) eachAwaited(visit func(st Stall, waiting []topo.Rank)) {
	s.eachWaiting(func(_ *wait, key groupKey, stall func() Stall) {
		st := stall()
		held := s.held.has(key) // every member has requested the held tensors, so every member waits
		missing := st.Missing
		visit(st, s.missing(func(m int) bool {
			late := len(missing) > 0 && missing[0] == s.Ranks[m] // both are in the same order
			if late {
				missing = missing[1:]
			}
			return !s.concerns(&st, m) || late && !held
		}))
	})
	if s.joined.count > 0 && s.joined.count < len(s.Ranks) {
		var joined []topo.Rank
		for m, r := range s.Ranks {
			if s.joined.has(m) {
				joined = append(joined, r)
			}
		}
		visit(Stall{Set: s.ID, Kind: message.Join, Name: s.joined.names[s.index(joined[0])],
			Missing: s.joining()}, joined)
	}
}

// isAwaited reports whether some rank of the set waits for the operation st. Ranks that were stopped do not
// count.
func (t *roster) isAwaited(s *setState, st Stall) bool {
	for m, r := range s.Ranks {
		if t.all[r].stop == 0 && s.concerns(&st, m) && (st.Group != "" || !slices.Contains(st.Missing, r)) {
			return true
		}
	}
	return false
}

// awaitedText returns a text about ranks that have shut down while other ranks wait for the operation st. The
// slice gone holds the ranks that have shut down, and the slice waiting holds the ranks that wait.
func (t *roster) awaitedText(s *setState, st *Stall, gone, waiting []topo.Rank) string {
	first := gone[0]
	for _, r := range gone {
		if t.all[r].at < t.all[first].at {
			first = r
		}
	}
	k := &t.all[first]
	var b strings.Builder
	b.WriteString("shut down")
	if len(gone) > 1 {
		fmt.Fprintf(&b, ", rank %d first", first)
	}
	if k.reason != "" {
		fmt.Fprintf(&b, " (%s)", k.reason)
	}
	if k.operations > 0 {
		s := "s"
		if k.operations == 1 {
			s = ""
		}
		fmt.Fprintf(&b, " after %d operation%s, the last %s", k.operations, s, k.last)
		if k.sinceLast >= 100*time.Millisecond {
			fmt.Fprintf(&b, " %s earlier", seconds(k.sinceLast))
		}
	}
	fmt.Fprintf(&b, ", while %s ", waitFor(waiting))
	if st.Group != "" {
		fmt.Fprintf(&b, "the missing tensors of group %q", st.Group)
	} else {
		b.WriteString(label(st.Kind, st.Name))
	}
	if bit, ok := s.cache.BitOf(st.Name); ok && st.Kind != message.Join {
		if n := s.cache.Grants(bit); n > 0 {
			fmt.Fprintf(&b, ", step %d", n+1)
		}
	}
	if st.Kind == message.Allreduce {
		b.WriteString(": a rank whose data runs out first must call Join before Shutdown")
	}
	return b.String()
}

// stopFor ends the job with the next cycle, because the given ranks have left and other ranks wait for them.
func (c *Coordinator) stopFor(ranks []topo.Rank, reason string) {
	if c.state == running {
		c.stop(reason)
		c.stopRanks = ranks
	}
}

// expireShutdown gives the verdict because the context of the Shutdown of rank r has ended. If Shutdown has
// waited until its deadline, the ranks for which it waits have failed. If it was canceled, r has failed,
// unless another rank is silent. If nothing keeps r from leaving, there is no verdict.
func (c *Coordinator) expireShutdown(r topo.Rank, u *message.Up) {
	if silent := c.ranks.silent(2 * heartbeatPeriod); len(silent) > 0 {
		c.fail(silent, timeoutText(message.NoKind, r, u, c.ranks.silentText(silent)))
		return
	}
	if c.overdue() {
		return // the ranks may have called Shutdown; r repeats the report
	}
	if !u.Granted { // r has finished all grants since its last heartbeat
		c.ranks.all[r].executing = execution{}
	}
	ranks, why := c.holdUp(r, u.Granted)
	switch {
	case u.Millis > 0 && len(ranks) > 0:
		c.fail(ranks, timeoutText(message.NoKind, r, u, why))
	case len(ranks) > 0:
		c.fail([]topo.Rank{r}, "its Shutdown was canceled: "+why)
	case u.Millis == 0 && u.Granted:
		c.fail([]topo.Rank{r}, "its Shutdown was canceled while it executed operations")
	}
}

// holdUp returns the ranks for which the Shutdown of rank r waits, and a text that says what they have not
// done. If there are none, or if they are not known yet, it returns none. executes says whether r has
// unfinished grants.
func (c *Coordinator) holdUp(r topo.Rank, executes bool) (ranks []topo.Rank, why string) {
	k := &c.ranks.all[r]
	if k.stop == 0 && c.state == running {
		switch st, ready := c.sets.outstanding(r); {
		case st != nil:
			return c.sets.addAwaited(st.Missing, have(st.Missing)+" not submitted "+label(st.Kind, st.Name))
		case ready != nil: // earlier grants of the set keep the gate closed
			return c.ranks.unfinished(ready.ID)
		}
	}
	switch {
	case executes && k.executing.tensor != "":
		return c.ranks.unfinished(k.executing.set)
	case executes: // no heartbeat has named the grant yet
		return nil, ""
	case c.state == stopping && r == 0:
		return c.ranks.unfinishedBut(r)
	case c.state == running && (r == 0 || c.cfg.Lockstep):
		stay := slices.DeleteFunc(c.ranks.present(), func(other topo.Rank) bool {
			return other == r || c.ranks.isLeaving(other)
		})
		if len(stay) > 0 {
			return stay, have(stay) + " not called Shutdown"
		}
	}
	return nil, ""
}

// handleBye records the bye of a rank, which has finished all its grants. The rank is closed when every other
// rank has finished the grants that it executes together with this rank, and has received the messages of
// this rank. Rank 0 is closed last, because it is the coordinator.
func (c *Coordinator) handleBye(r topo.Rank) {
	c.ranks.all[r].bye, c.ranks.all[r].executing = true, execution{}
	if !c.ranks.all[r].lost {
		c.ranks.eachKeeper(r, func(keeper topo.Rank) { c.ranks.all[keeper].active-- })
	}
	c.progress = c.now
	if c.byes++; c.byes == len(c.ranks.all) {
		c.close()
		return
	}
	for other := range c.ranks.all {
		c.released(topo.Rank(other), r)
	}
	if c.state != running || r == 0 {
		return
	}
	c.left = append(c.left, r)
}

// tellLeft tells the ranks that stay which ranks have sent bye in this turn. If each bye had a frame, the
// shutdown of a job of n ranks would have n^2 frames.
func (c *Coordinator) tellLeft() {
	if len(c.left) == 0 || c.state != running {
		return
	}
	var others []topo.Rank
	for i := range c.ranks.all {
		if o := &c.ranks.all[i]; !o.bye && !o.lost {
			others = append(others, topo.Rank(i))
			for _, r := range c.left {
				c.ranks.all[r].holders.Set(uint32(i))
			}
		}
	}
	if len(others) > 0 {
		c.emitLeavers(message.DownLeft, c.left, others)
	}
	for _, r := range c.left {
		c.closeReleased(r)
	}
	c.left = nil // the frame has the old slice
}

// emitLeavers emits frames of type t that name ranks which have left or are leaving. A recipient gets those
// channels of these ranks that lead to it.
func (c *Coordinator) emitLeavers(t message.DownType, leavers, to []topo.Rank) {
	var channels map[topo.Rank][]message.Channel // by recipient
	for _, from := range leavers {
		for _, ch := range c.ranks.all[from].channels {
			if channels == nil {
				channels = make(map[topo.Rank][]message.Channel)
			}
			channels[ch.Rank] = append(channels[ch.Rank], message.Channel{Set: ch.Set, Rank: from})
		}
	}
	others := make([]topo.Rank, 0, len(to)) // the recipients without such channels
	for _, r := range to {
		if own := channels[r]; own != nil {
			c.emit(&message.Down{Type: t, Cycle: c.cycle, Ranks: leavers, Channels: own}, []topo.Rank{r})
		} else {
			others = append(others, r)
		}
	}
	if len(others) > 0 {
		c.emit(&message.Down{Type: t, Cycle: c.cycle, Ranks: leavers}, others)
	}
}

// released records that a rank needs rank r no more. The argument by is that rank. If r has not left,
// released has no effect.
func (c *Coordinator) released(r, by topo.Rank) {
	if k := &c.ranks.all[r]; k.holders.Has(uint32(by)) {
		k.holders.Clear(uint32(by))
		c.closeReleased(r)
	}
}

// closeReleased closes rank r, which has sent bye, if no other rank needs it. A leader is closed after the
// ranks behind it, and the lowest rank of a group that shares memory after the others of the group.
func (c *Coordinator) closeReleased(r topo.Rank) {
	if k := &c.ranks.all[r]; !k.holders.Any() && k.open == 0 {
		c.closeRank(r)
	}
}

// closeRank closes rank r, which has sent bye, unless it is closed or lost.
func (c *Coordinator) closeRank(r topo.Rank) {
	k := &c.ranks.all[r]
	if k.closed || k.lost {
		return
	}
	c.emit(&message.Down{Type: message.DownClose, Cycle: c.cycle}, []topo.Rank{r})
	k.closed = true
	c.ranks.eachKeeper(r, func(keeper topo.Rank) { c.ranks.all[keeper].open-- })
	c.closeKeepers(r)
}
