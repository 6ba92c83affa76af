package elastic

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// Machine decides which processes are the ranks of a job. Each method that tells it of an event returns what
// the launcher is to do. The times that it gets must not decrease.
type Machine struct {
	cfg Config
	now time.Time

	hosts    []Host // in the order in which they were seen first; a host that is not offered has no slots
	excluded map[Slot]*exclusion
	started  map[Slot]int  // how many processes were started at the slot
	departed map[Slot]bool // the process at the slot has left; the slot stays empty while it is offered

	members []*member // the living processes and the ranks of the newest roster, in the order of their start
	roster  *Roster   // the newest one, or nil
	earlier []*Roster // some before the newest one
	begun   bool      // processes were started
	skipped bool      // a process has ended with status 0 before there were ranks
	noted   int       // how many slots there were in the newest note about them, or -1
	resets  int
	trains  uint64  // the last generation that has resumed the training
	culprit *Member // the first rank that has failed since the newest roster, or process before the first one
	held    bool    // the job ends when the culprit has ended

	index map[Member]*member // the elements of members
	ranks []*member          // the members of roster, in the order of their ranks

	extended   time.Time // the deadline for the other answers to the newest roster after an answer (see due)
	waitsSince time.Time // when the job began to wait for slots, or the zero time
	readySince time.Time // when the first process became ready that is not in a roster yet, or the zero time
	synced     bool      // some process has had the state of the training
	finished   bool      // the present training has returned in a process
	closed     bool      // a training has returned in a process, so no process is added any more
	past       int       // how many trainings there were before the present one
	ended      bool
	out        Output
}

// member is a process.
type member struct {
	Member
	state   state
	offered bool   // discovery has found its slot
	since   uint64 // the generation in which it became a rank, or 0
	synced  bool   // it has the state of the training
	done    bool   // the present training has returned in the process, so it is no rank of a later roster
	ran     int    // how many trainings have returned in the process
	leaving string // why the process has asked to leave, or ""
	lost    string // how the process has failed or ended before the training had returned in it, or ""
	missed  bool   // done is set, but other ranks of the newest roster wait for the process
	// deadline is the time by which an active process must have answered the newest roster (see due). A
	// killed one may end by itself until then, and is killed afterwards. It is the zero time if there is
	// none.
	deadline time.Time
}

type state int

const (
	starting state = iota // the process was started
	waiting               // it is ready to become a rank
	active                // it is in the newest roster
	outside               // it was in a roster and is not in the newest one, so it ends by itself
	killed                // it is killed, perhaps only at its deadline, and has not ended yet
	dead                  // it has ended, and is in the newest roster
)

// exclusion says that no process is started at a slot or, with the index -1, on a host.
type exclusion struct {
	failures int
	until    time.Time // the zero time means for ever
	over     bool
}

// New returns the machine of a job. The job waits for slots from the time now.
func New(cfg Config, now time.Time) *Machine {
	return &Machine{cfg: cfg, now: now, waitsSince: now, noted: -1, index: make(map[Member]*member),
		excluded: make(map[Slot]*exclusion), started: make(map[Slot]int), departed: make(map[Slot]bool)}
}

// HasRoster reports whether there have been ranks.
func (m *Machine) HasRoster() bool { return m.roster != nil }

// Discovered tells which hosts there are now.
func (m *Machine) Discovered(now time.Time, hosts []Host) Output {
	m.now = now
	slots := make(map[string]int, len(hosts))
	for i := range m.hosts {
		m.hosts[i].Slots = 0
	}
	for _, h := range hosts {
		slots[h.Name] = h.Slots
		if i := slices.IndexFunc(m.hosts, func(o Host) bool { return o.Name == h.Name }); i >= 0 {
			m.hosts[i].Slots = h.Slots
		} else {
			m.hosts = append(m.hosts, h)
		}
	}
	maps.DeleteFunc(m.departed, func(s Slot, _ bool) bool { return s.Index >= slots[s.Host] })
	for _, k := range m.members {
		k.offered = k.Index < slots[k.Host]
		if !k.offered && (k.state == starting || k.state == waiting) {
			m.kill(k)
		}
	}
	return m.step()
}

// Ready tells that process p can become a rank or, if it is one, that it has got the newest roster.
func (m *Machine) Ready(now time.Time, p Member) Output {
	k := m.index[p]
	if k != nil && k.state == active && !k.deadline.IsZero() {
		k.deadline, m.extended = time.Time{}, now.Add(m.cfg.Answer)
	}
	if k == nil || k.state != starting {
		return m.pass(now)
	}
	m.now, k.state = now, waiting
	if m.readySince.IsZero() {
		m.readySince = now
	}
	out := m.step()
	if !m.ended && k.state == waiting && m.cfg.Spares > 0 && m.roster != nil &&
		len(m.roster.Members) >= m.cfg.Max {
		out.Notes = append(out.Notes, fmt.Sprintf("%v is ready as a spare", p))
	}
	return out
}

// Synced tells that all ranks of a generation have the state of the training. New ranks have got it from
// others. stopped is how long the training has stopped since the generation before.
func (m *Machine) Synced(now time.Time, generation uint64, stopped time.Duration) Output {
	m.now = now
	if r := m.roster; r != nil && r.Generation == generation && generation > 1 && m.trains < generation {
		m.trains = generation
		m.out.Resume = &Resume{generation, stopped, r.Lost}
	}
	for _, k := range m.members {
		if k.since > 0 && k.since <= generation && k.state <= outside {
			k.synced, m.synced = true, true
		}
	}
	return m.step()
}

// Leave tells that process p asks to leave after its current step, for example because its host is about to
// be taken away. If p is no rank yet, it is killed.
func (m *Machine) Leave(now time.Time, p Member, why string) Output {
	m.now = now
	return m.leave(why, func(k *member) bool { return k.Member == p })
}

// LeaveHost is like Leave for all processes on a host. No process is started there until the host was away.
func (m *Machine) LeaveHost(now time.Time, host, why string) Output {
	m.now = now
	for _, h := range m.hosts {
		for i := range h.Slots {
			if h.Name == host {
				m.departed[Slot{h.Name, i}] = true
			}
		}
	}
	return m.leave(why, func(k *member) bool { return k.Host == host })
}

// leave makes the processes leave for which is returns true.
func (m *Machine) leave(why string, is func(*member) bool) Output {
	var leaving []*member
	for _, k := range m.members {
		if !is(k) || k.leaving != "" || k.state >= killed {
			continue
		}
		leaving = append(leaving, k)
		k.leaving = why
		m.departed[k.Slot] = true
		if k.state == starting || k.state == waiting {
			m.kill(k)
		}
	}
	out := m.step()
	for _, k := range leaving {
		if k.state == active && out.Publish == nil && !m.finished && !m.ended {
			until := "there are other ranks"
			if m.closed {
				until = "it ends"
			}
			out.Notes = append(out.Notes, fmt.Sprintf("%s is to leave (%s), but the training needs it until %s",
				m.title(k), why, until))
		}
	}
	return out
}

// Done tells that the training has returned in process p. It may have returned before p has learned of the
// newest roster.
func (m *Machine) Done(now time.Time, p Member) Output {
	m.now = now
	if k := m.index[p]; k != nil && (k.state == active || k.state == outside) {
		m.closed = true
		if k.ran++; k.ran > m.past {
			k.done, m.finished = true, true
		}
	}
	return m.step()
}

// Again tells that another training begins in process p after Done. Then the training goes on in all ranks,
// also in those that have not begun the other training yet. But no process is added, because a new one would
// begin with the first training of its program.
func (m *Machine) Again(now time.Time, p Member) Output {
	m.now = now
	k := m.index[p]
	if k == nil || k.state != active || k.ran <= m.past {
		return m.step()
	}
	m.past, m.finished = k.ran, false
	for _, k := range m.members {
		switch {
		case k.state < active:
			m.kill(k)
		case k.state >= killed && k.lost == "" && k.done:
			k.lost = "ended after the training before"
		case k.state >= killed && k.lost == "": // finish has killed it
			k.lost = "was ended with the training before"
		}
		k.done = k.ran > m.past || k.missed
	}
	return m.step()
}

// maxEarlier is how many rosters before the newest one are kept, for verdicts that arrive late.
const maxEarlier = 16

// Processes returns the processes that had the given ranks in a generation, and seem to have failed, as the
// rank by of that generation has found. It omits those that it does not know, and all if that rank itself has
// failed or is killed: of ranks that find each other silent, those whose verdict arrives first go on.
// starting says that the ranks had not begun the generation yet. Then it omits them if there is a later one,
// because the others leave a generation that has not begun at once.
func (m *Machine) Processes(generation uint64, by topo.Rank, ranks []topo.Rank,
	starting bool) (processes []Member) {
	if starting && m.roster != nil && m.roster.Generation > generation {
		return nil
	}
	for _, r := range append(m.earlier, m.roster) {
		if r == nil || r.Generation != generation || by < 0 || int(by) >= len(r.Members) {
			continue
		}
		if k := m.index[r.Members[by]]; k == nil || k.state == killed || k.lost != "" {
			return nil
		}
		for _, rank := range ranks {
			if rank >= 0 && int(rank) < len(r.Members) {
				processes = append(processes, r.Members[rank])
			}
		}
	}
	return processes
}

// Failed tells that ranks have found processes that have failed, though they may not have ended. The others
// go on at once. A process that has reported its own failure, for example an exception, is about to end with
// a status that tells more than SIGKILL does, so each process may end by itself within Config.Notice. If the
// training has returned in such a process, the ranks that wait for it go on without it.
func (m *Machine) Failed(now time.Time, processes []Member, why string) Output {
	news := false
	for _, p := range processes {
		k := m.index[p]
		if k == nil || k.state >= killed && !k.done || k.missed {
			continue
		}
		m.now, news = now, true
		if k.done {
			k.missed = m.roster.Rank(p) >= 0
			continue
		}
		if k.state < outside {
			m.fail(k, why)
		}
		k.state, k.deadline = killed, now.Add(m.cfg.Notice)
	}
	if !news {
		return m.pass(now)
	}
	return m.step()
}

// Ended tells that processes have ended, at the same time if there are several, for example because their
// host is lost.
func (m *Machine) Ended(now time.Time, exits ...Exit) Output {
	m.now = now
	for _, x := range exits {
		if k := m.index[x.Member]; k != nil && k.state != dead {
			m.record(k, x)
		}
	}
	m.out.Kill = slices.DeleteFunc(m.out.Kill, func(p Member) bool {
		return slices.ContainsFunc(exits, func(x Exit) bool { return x.Member == p })
	})
	return m.step()
}

// record handles the end x of process k.
func (m *Machine) record(k *member, x Exit) {
	switch {
	case k.state == killed:
	case k.done && x.Status != 0 && (k.state == active || !m.leaves(k)):
		m.end(fmt.Sprintf("%s: %s after the training", m.title(k), x.How), &k.Member)
	case k.done || k.state == outside:
	case x.Status == 0:
		m.departed[k.Slot] = true
		m.skipped = m.skipped || m.roster == nil
		k.lost = x.How + " before the end of the training"
	case k.leaving != "":
		k.lost = x.How // where it ran, nothing is started anyway
		m.blame(k)
	default:
		m.fail(k, x.How)
	}
	k.state = dead
	if m.roster == nil || m.roster.Rank(k.Member) < 0 {
		m.members = slices.DeleteFunc(m.members, func(o *member) bool { return o == k })
		delete(m.index, k.Member)
	}
}

// Tick tells that the time is now. The launcher calls it at the time of Next.
func (m *Machine) Tick(now time.Time) Output {
	m.now = now
	return m.step()
}

// pass does what Tick does, for an event from which nothing follows. There may be thousands at once: all
// ranks of a job find the same failure, and all answer the new roster.
func (m *Machine) pass(now time.Time) Output {
	if next := m.Next(); next.IsZero() || next.After(now) {
		m.now = now
		return Output{}
	}
	return m.Tick(now)
}

// Stop tells that the launcher ends the job for a reason of its own. After that, the machine has no output.
func (m *Machine) Stop() { m.ended = true }

// Over reports whether the job is over, so that the events do not matter any more.
func (m *Machine) Over() bool { return m.ended }

// Next returns when Tick is to be called, or the zero time if only events matter.
func (m *Machine) Next() (next time.Time) {
	if m.ended {
		return next
	}
	earlier := func(t time.Time) {
		if t.After(m.now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if !m.waitsSince.IsZero() {
		earlier(m.waitsSince.Add(m.cfg.Timeout))
	}
	if !m.readySince.IsZero() {
		earlier(m.readySince.Add(m.patience()))
	}
	for _, k := range m.members {
		if k.state == active || k.state == killed {
			earlier(m.due(k))
		}
	}
	for _, x := range m.excluded {
		if !x.over && !x.until.IsZero() {
			earlier(x.until)
		}
	}
	return next
}

// title returns the name of a process for users.
func (m *Machine) title(k *member) string {
	if m.roster != nil {
		if r := m.roster.Rank(k.Member); r >= 0 {
			return fmt.Sprintf("rank %d (%v)", r, k.Member)
		}
	}
	return k.Member.String()
}

// fail records that process k has failed, and excludes its slot or host.
func (m *Machine) fail(k *member, how string) {
	k.lost = how
	m.blame(k)
	if k.state != active {
		m.note("%v: %s, before it was a rank", k.Member, how)
	}
	m.exclude(m.unit(k.Slot))
	if !m.cfg.ByHost {
		return
	}
	for _, other := range m.members {
		if other != k && other.Host == k.Host && other.state < outside && !other.done {
			other.lost = "on the host of " + m.title(k)
			m.kill(other)
		}
	}
}

// blame makes process k, which has failed, the culprit if it is the first one.
func (m *Machine) blame(k *member) {
	if m.culprit == nil && (k.state == active || m.roster == nil) {
		m.culprit = &k.Member
	}
}

// Blames reports whether process p is the first that has failed since the newest roster, or before the first
// one. If the job fails, End names it.
func (m *Machine) Blames(p Member) bool { return m.culprit != nil && *m.culprit == p }

// exclude makes no process start at a slot or host for some time.
func (m *Machine) exclude(unit Slot) {
	x := m.excluded[unit]
	if x == nil {
		x = new(exclusion)
		m.excluded[unit] = x
	}
	x.failures++
	x.until, x.over = time.Time{}, false
	if lo, hi := m.cfg.Cooldown[0], m.cfg.Cooldown[1]; hi > 0 {
		wait := hi
		if x.failures < 30 {
			wait = lo<<x.failures + time.Duration(m.cfg.Random()*float64(lo))
		}
		x.until = m.now.Add(min(max(wait, lo), hi))
	}
}

// unit returns the key of the exclusion of a slot.
func (m *Machine) unit(s Slot) Slot {
	if m.cfg.ByHost {
		s.Index = -1
	}
	return s
}

func (m *Machine) kill(k *member) {
	k.state, k.deadline = killed, time.Time{}
	m.out.Kill = append(m.out.Kill, k.Member)
}

func (m *Machine) note(format string, args ...any) {
	m.out.Notes = append(m.out.Notes, fmt.Sprintf(format, args...))
}

// end ends the job, unless it has ended. If the culprit is about to end, the job ends only afterwards. If
// reason is empty, the job has succeeded.
func (m *Machine) end(reason string, culprit *Member) {
	if m.ended {
		return
	}
	if culprit != nil {
		if k := m.index[*culprit]; k != nil && k.mayEnd() {
			m.held = true
			return
		}
	}
	for _, k := range m.members {
		if k.mayEnd() {
			m.kill(k)
		}
	}
	m.ended = true
	m.out.End = &End{Reason: reason, Culprit: culprit}
}

// mayEnd reports whether k is killed only at its deadline.
func (k *member) mayEnd() bool { return k.state == killed && !k.deadline.IsZero() }

// due returns when the deadline of k passes, or the zero time if it has none. An answer of another process
// extends that of an active one, because the answers of many processes may wait for the launcher one behind
// the other.
func (m *Machine) due(k *member) time.Time {
	if !k.deadline.IsZero() && k.state == active && m.extended.After(k.deadline) {
		return m.extended
	}
	return k.deadline
}

// overdue kills the processes whose deadlines have passed. If this is noticed long after the deadline, the
// launcher was stopped or busy, and the answers of the processes may wait for it. Then they get a new
// deadline.
func (m *Machine) overdue() {
	for _, k := range m.members {
		switch due := m.due(k); {
		case due.IsZero() || due.After(m.now):
		case k.state == active && m.now.Sub(due) > m.cfg.Answer/10:
			k.deadline = m.now.Add(m.cfg.Answer)
		case k.state == active && !k.done:
			m.fail(k, fmt.Sprintf("did not answer hvdrun within %v", m.cfg.Answer))
			m.kill(k)
		case k.state == killed:
			m.kill(k)
		}
	}
}

// isExcluded reports whether no process may be started at the slot because of earlier failures.
func (m *Machine) isExcluded(s Slot) bool {
	x := m.excluded[m.unit(s)]
	if x == nil {
		return false
	}
	x.over = x.over || !x.until.IsZero() && !x.until.After(m.now)
	return !x.over
}

// usable returns the slots at which a process runs or may be started, in the order of the hosts.
func (m *Machine) usable() (slots []Slot) {
	for _, h := range m.hosts {
		for i := range h.Slots {
			if s := (Slot{h.Name, i}); !m.isExcluded(s) && !m.departed[s] {
				slots = append(slots, s)
			}
		}
	}
	return slots
}

// lasting returns the number of slots at which a process runs or may be started at some time. A rank that is
// to leave runs as long as the training needs it.
func (m *Machine) lasting() (n int) {
	stays := make(map[Slot]bool)
	for _, k := range m.members {
		if k.state == active && k.lost == "" && !k.done {
			stays[k.Slot] = true
		}
	}
	for _, h := range m.hosts {
		for i := range h.Slots {
			s := Slot{h.Name, i}
			x := m.excluded[m.unit(s)]
			if stays[s] || !m.departed[s] && (x == nil || x.over || !x.until.IsZero()) {
				n++
			}
		}
	}
	return n
}

// step decides what follows from all events so far.
func (m *Machine) step() (out Output) {
	over := m.ended && m.out.End == nil
	m.held = false
	if !m.ended {
		m.overdue()
		m.finish()
	}
	if !m.ended && !m.held {
		m.start()
		m.form()
	}
	out, m.out = m.out, Output{}
	switch {
	case over:
		return Output{}
	case out.End != nil:
		out.Start, out.Publish = nil, nil
	}
	return out
}

// finish ends the job if no process is left that has the state of the training.
func (m *Machine) finish() {
	ranks, training, synced := 0, 0, 0 // ranks includes those in which the training has returned
	for _, k := range m.members {
		if k.state == active && !k.done {
			training++
			if k.synced {
				synced++
			}
		}
		if k.state == active || k.state == outside && k.done {
			ranks++
		}
	}
	switch {
	case m.finished && ranks == 0:
		m.end("", nil)
	case m.finished && (training == 0 || m.synced && synced == 0):
		for _, k := range m.members { // no rank is left that could give them the state
			if k.state < outside && !k.done {
				m.kill(k)
			}
		}
	case m.finished:
	case m.roster != nil && ranks == 0 && m.culprit == nil:
		m.end("", nil) // a program without the functions for elastic training
	case m.roster != nil && (ranks == 0 || m.synced && synced == 0):
		m.end(fmt.Sprintf("all ranks with the state of the training have ended: %s", m.reason(nil)), m.culprit)
	case m.roster != nil || !m.begun || len(m.members) > 0:
	case m.culprit == nil && m.skipped:
		m.end("", nil) // a program that does not join
	case m.culprit != nil:
		m.end("all processes have ended before they were ranks", m.culprit)
	}
}

// start starts processes at free slots.
func (m *Machine) start() {
	free := 0
	for _, h := range m.hosts {
		free += h.Slots
	}
	for _, k := range m.members {
		if k.offered && k.state != dead {
			free--
		}
	}
	if m.closed || m.begun && free == 0 {
		return
	}
	slots := m.usable()
	if !m.begun && len(slots) < max(m.cfg.Start, m.cfg.Min) {
		return
	}
	if !m.begun {
		m.begun, m.waitsSince = true, time.Time{}
	}
	count, taken := 0, make(map[Slot]bool)
	for _, k := range m.members {
		if k.state == dead {
			continue
		}
		taken[k.Slot] = true
		if k.state < outside && !m.leaves(k) {
			count++
		}
	}
	for _, s := range slots {
		if taken[s] || m.cfg.Max > 0 && count >= m.cfg.Max+m.cfg.Spares {
			continue
		}
		m.started[s]++
		count++
		p := Member{s, m.started[s]}
		k := &member{Member: p, offered: true}
		m.members = append(m.members, k)
		m.index[p] = k
		m.out.Start = append(m.out.Start, p)
	}
}

// leaves reports whether process k is to be in no later roster.
func (m *Machine) leaves(k *member) bool { return k.leaving != "" || !k.offered }

// form publishes a new roster if one is needed and possible.
func (m *Machine) form() {
	least := m.cfg.Min
	if m.closed {
		least = 1 // no process will be added, so they go on with any number
	}
	ranks, lost, leaving, added := m.next(least)
	switch {
	case m.roster == nil && !m.begun:
		m.awaitSlots()
	case m.finished && (!lost || len(ranks) == 0),
		!lost && !leaving && !added && (m.roster != nil || len(m.members) > 0):
		m.waitsSince = time.Time{}
	case m.finished:
		m.publish(ranks, lost)
	case len(ranks) < least && m.roster != nil && !lost:
		// The ranks of the newest roster go on until there are enough new ones.
	case len(ranks) < least:
		m.pause(ranks)
	case !lost && !leaving && !m.settled() && (m.cfg.Max == 0 || len(ranks) < m.cfg.Max):
	case m.roster != nil && m.cfg.ResetLimit >= 0 && m.resets >= m.cfg.ResetLimit:
		m.end(fmt.Sprintf("the number of resets exceeds the limit of %d: %s", m.cfg.ResetLimit,
			m.reason(ranks)), m.culprit)
	default:
		m.publish(ranks, lost)
	}
}

// awaitSlots waits for the slots that there must be before any process is started.
func (m *Machine) awaitSlots() {
	have, want := len(m.usable()), max(m.cfg.Start, m.cfg.Min)
	if have != m.noted {
		verb, slots := "are", "slots"
		m.noted = have
		if have == 1 {
			verb = "is"
		}
		if want == 1 {
			slots = "slot"
		}
		m.note("waiting up to %v for %d %s; there %s %d", m.cfg.Timeout, want, slots, verb, have)
	}
	m.expire(have, want)
}

// next returns the members of the next roster, which should be at least least, and how they differ from those
// of the newest one: ranks are lost because they have failed, leave, or are new. Processes in which the
// training has returned do not count as a difference, unless others wait for them.
func (m *Machine) next(least int) (ranks []*member, lost, leave, isNew bool) {
	var remaining, added []*member
	synced, missed := !m.synced, false
	for _, k := range m.ranks {
		switch {
		case k.done:
			missed = missed || k.missed
		case k.state >= killed && k.lost == "": // finish has killed it
		case k.lost != "":
			lost = true
		case m.leaves(k):
			remaining = append(remaining, k)
		default:
			ranks, remaining, synced = append(ranks, k), append(remaining, k), synced || k.synced
		}
	}
	leave = len(remaining) > len(ranks)
	lost = lost || missed && len(remaining) > 0
	for _, k := range m.members {
		full := m.cfg.Max > 0 && len(ranks)+len(added) >= m.cfg.Max
		if k.state == waiting && !m.closed && !m.leaves(k) && !full {
			added = append(added, k)
		}
	}
	if leave && (!synced || lost && len(ranks)+len(added) < least) {
		// The ranks that are to leave stay until others have the state of the training and, if the others
		// need a new roster, until there are enough. In a pause they count.
		leave, ranks = false, remaining
		if m.cfg.Max > 0 {
			added = added[:min(len(added), max(0, m.cfg.Max-len(ranks)))]
		}
	}
	return append(ranks, added...), lost, leave, len(added) > 0
}

// pause makes the job wait until there are enough ranks. There are the given ones.
func (m *Machine) pause(ranks []*member) {
	first, have := m.roster == nil, len(ranks)
	if first && m.starting() > 0 && len(m.usable()) >= m.cfg.Min && !m.settled() {
		m.waitsSince = time.Time{}
		return
	}
	if n := m.lasting(); m.cfg.Fixed && n < m.cfg.Min {
		why := "the training cannot start: "
		if !first {
			why = m.reason(nil) + "; "
		}
		slots := "slots"
		if n == 1 {
			slots = "slot"
		}
		m.end(fmt.Sprintf("%sprocesses may still run at %d %s of the hosts, which do not change, want at least %d", why, n,
			slots, m.cfg.Min), m.culprit)
		return
	}
	if m.waitsSince.IsZero() {
		m.waitsSince = m.now
		what := "the training cannot start: "
		if !first {
			old := slices.DeleteFunc(slices.Clone(ranks), func(k *member) bool { return k.state == waiting })
			what = fmt.Sprintf("the training pauses: %s; ", m.reason(old))
		}
		m.note("%sonly %s, and at least %d are needed; waiting up to %v for more", what, ready(have),
			m.cfg.Min, m.cfg.Timeout)
	}
	m.expire(have, m.cfg.Min)
}

func ready(processes int) string {
	if processes == 1 {
		return "1 process is ready"
	}
	return fmt.Sprintf("%d processes are ready", processes)
}

// expire ends the job if it has waited for slots for too long.
func (m *Machine) expire(have, want int) {
	if !m.waitsSince.IsZero() && m.now.Sub(m.waitsSince) >= m.cfg.Timeout {
		m.end(fmt.Sprintf("timed out waiting for slots: got %d, want at least %d, after %v", have, want,
			m.cfg.Timeout), m.culprit)
	}
}

func (m *Machine) starting() (n int) {
	for _, k := range m.members {
		if k.state == starting {
			n++
		}
	}
	return n
}

// settled reports whether new ranks may be added now, because no other process is about to become ready.
func (m *Machine) settled() bool {
	return m.starting() == 0 || !m.readySince.IsZero() && m.now.Sub(m.readySince) >= m.patience()
}

// patience returns how long a process that is ready waits for others.
func (m *Machine) patience() time.Duration {
	if m.roster == nil {
		return m.cfg.StartTimeout
	}
	return m.cfg.Settle
}

// reason says why the roster of ranks differs from the newest one.
func (m *Machine) reason(ranks []*member) string {
	var clauses, added []string
	for _, k := range m.ranks {
		switch {
		case k.missed:
			clauses = append(clauses, m.title(k)+": its training has returned before that of other ranks")
		case k.done:
		case k.lost != "":
			clauses = append(clauses, m.title(k)+": "+k.lost)
		case slices.Contains(ranks, k):
		case k.leaving != "":
			clauses = append(clauses, m.title(k)+" leaves: "+k.leaving)
		case !k.offered:
			clauses = append(clauses, m.title(k)+" leaves: its slot is not offered any more")
		}
	}
	for _, k := range ranks {
		if k.state == waiting {
			added = append(added, k.Member.String())
		}
	}
	if len(added) > 0 {
		clauses = append(clauses, "new: "+strings.Join(added, ", "))
	}
	return strings.Join(clauses, "; ")
}

// late names the processes that are still starting when the first roster begins without them, or returns "".
func (m *Machine) late(ranks []*member) string {
	var late []string
	for _, k := range m.members {
		if k.state == starting && (m.cfg.Max == 0 || len(ranks) < m.cfg.Max) {
			late = append(late, k.Member.String())
		}
	}
	if len(late) == 0 {
		return ""
	}
	return fmt.Sprintf("not ready within %v: %s", m.cfg.StartTimeout, strings.Join(late, ", "))
}

// publish makes the ranks the newest roster.
func (m *Machine) publish(ranks []*member, lost bool) {
	r := &Roster{Generation: 1, Lost: lost}
	inRoster := make(map[*member]bool, len(ranks))
	for _, k := range ranks {
		r.Members, inRoster[k] = append(r.Members, k.Member), true
	}
	if m.roster != nil {
		m.earlier = append(m.earlier[max(0, len(m.earlier)+1-maxEarlier):], m.roster)
		m.resets++
		r.Generation, r.Reason = m.roster.Generation+1, m.reason(ranks)
		for _, k := range ranks {
			if k.state == waiting {
				r.Change |= Added
			}
		}
		if slices.ContainsFunc(m.ranks, func(k *member) bool { return !inRoster[k] }) {
			r.Change |= Removed
		}
	}
	if m.roster == nil {
		r.Reason = m.late(ranks)
	}
	m.roster, m.ranks, m.out.Publish, m.culprit = r, ranks, r, nil
	m.waitsSince, m.readySince, m.extended = time.Time{}, time.Time{}, time.Time{}
	for _, k := range m.members {
		switch {
		case inRoster[k]:
			if k.state == waiting {
				k.since = r.Generation
			}
			k.state = active
			if r.Generation > 1 && m.cfg.Answer > 0 {
				k.deadline = m.now.Add(m.cfg.Answer)
			}
		case k.state == active:
			k.state = outside
		}
	}
	m.members = slices.DeleteFunc(m.members, func(k *member) bool {
		if k.state == dead {
			delete(m.index, k.Member)
		}
		return k.state == dead
	})
}
