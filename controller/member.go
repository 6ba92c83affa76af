package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/responsecache"
)

// MemberConfig configures a Member.
type MemberConfig struct {
	Rank topo.Rank
	// Sets are process sets with which the job begins, in ascending order of ID. With Lockstep, these are all
	// process sets of the job. Otherwise, they are the sets that contain the rank.
	Sets []Set
	// Leader is the rank to which the rank has its control connection: its leader, or rank 0.
	Leader topo.Rank
	// Combiner passes on the frames of the ranks that this rank leads. It is nil if this rank is no leader.
	Combiner *Combiner
	// Keeps is set if this rank leads other ranks, or is the lowest of ranks that share memory
	// (CoordinatorConfig.Groups). Then it stays in the job for these ranks.
	Keeps bool
	// LivenessTimeout is the maximum time between two frames from the coordinator. If the coordinator is
	// silent for longer, it has failed.
	LivenessTimeout time.Duration
	// Lockstep is set if a controller.Lockstep carries the requests and the cycles.
	Lockstep bool
}

type memberState uint8

const (
	memberRunning  memberState = iota
	memberDraining             // the stop was applied; granted operations still run
	memberBye                  // all grants have finished, and bye was sent or is about to be
	memberClosed
	memberFailed
)

// Member takes part in the negotiation for one rank. It is not safe for concurrent use.
//
// In each turn, call Tick, then Submit, Finished and so on for events at this rank, then Ready. Send the
// frames that Ready returns and call Advance. Then, for each received frame, call Step and Ready, run the
// grants that Ready returns, and call Advance. Send the frames that Ready returns before the next Step,
// because the requests in them refer to the cache as it is before that Step.
type Member struct {
	cfg   MemberConfig
	sets  []*memberSet
	state memberState

	now          time.Duration
	lastReceived time.Duration // the time at which the last frame arrived
	lastSent     time.Duration // the time at which the last frame was created
	lastBeat     time.Duration // the time at which the last heartbeat was created
	seen         uint64        // the last cycle that this rank has applied

	segmentBytes int        // the segment size of the grants from now on
	up           message.Up // the next frame
	news         bool       // whether up has content
	shutdown     bool       // whether Shutdown was called
	announced    bool       // whether the coordinator has been notified of the shutdown
	reason       string     // the arguments of Shutdown
	channels     []message.Channel
	operations   uint64       // number of responses that this rank has finished
	lastKind     message.Kind // the kind of the last of these responses, which ended at lastAt
	lastName     string
	lastAt       time.Duration
	stopped      bool        // whether a stop was just applied
	grants       []*Grant    // grants that the next Ready returns
	running      grantList   // all unfinished grants, including those in grants
	free         []*Grant    // grants that may be reused
	left         []topo.Rank // ranks that have left (DownLeft) but that this rank still needs
	receives     []topo.Rank // the argument of Receives
	stopReason   string
	stopRanks    []topo.Rank
	reports      []message.Up // frames about timeouts and broken channels to send
	expired      *message.Up  // the last timeout of this turn, or nil
	suspected    *Verdict     // the suspicion that this rank has reported
	suspectedAt  time.Duration
	suspectFrame bool // whether the suspicion has yet to be sent
	bye          bool // whether bye has yet to be sent
	reported     bool // whether the last heartbeat named a grant
	heartbeat    message.Up
	ups          []*message.Up // reused memory of Ready
	verdict      *Verdict
}

// memberSet is a process set as a member sees it.
type memberSet struct {
	Set
	me        int  // the position of the rank in the set, or -1 if it is not a member
	byMembers bool // whether only the members have added the set and only they may remove it
	voteState      // used in lock-step
	cache     responsecache.Cache
	join      string // the name of the join for which this rank waits, or ""
	grants    uint64
}

func newMemberSet(s Set, r topo.Rank) *memberSet { return &memberSet{Set: s, me: s.index(r)} }

// admit returns an error if this rank must not make the request q now. Otherwise it returns nil.
func (s *memberSet) admit(q *message.Request) error {
	switch {
	case s.join != "":
		return fmt.Errorf("%v %q: this rank has joined process set %d: wait for the join to end", q.Kind,
			q.Name, s.ID)
	case changesSets(q.Kind):
		if err := s.checkChange(s.byMembers, q); err != nil {
			return fmt.Errorf("%v %q: %w", q.Kind, q.Name, err)
		}
	}
	return nil
}

// Ready is the output of Member.Ready.
type Ready struct {
	// Ups are frames to send to the coordinator, in order.
	Ups []*message.Up
	// Grants are the grants to run, in order within each set. Pass each of them to Finished after it has run.
	Grants []*Grant
	// Stop is set if nothing more will be granted. The caller must end all requests without a grant with the
	// error of the shutdown.
	Stop bool
	// StopReason is the reason for the stop. It is empty if the job stops only because this rank, or all
	// ranks, have asked for that. StopRanks are the ranks whose shutdown is the reason.
	StopReason string
	StopRanks  []topo.Rank
}

// NewMember returns the member for an epoch that begins at the time now.
func NewMember(cfg MemberConfig, now time.Duration) *Member {
	m := &Member{cfg: cfg, now: now, lastReceived: now, lastSent: now, lastBeat: now}
	for _, s := range cfg.Sets {
		m.sets = append(m.sets, newMemberSet(s, cfg.Rank))
	}
	m.up.Type = message.UpNews
	return m
}

// Tick sets the current time to now.
func (m *Member) Tick(now time.Duration) {
	if g := gap(m.now, now); g > 0 {
		m.lastReceived += g
		m.suspectedAt += g
		for running := m.running.oldest; running != nil; running = running.newer {
			running.since += g
		}
	}
	m.now = now
}

// Expire fails rank 0 or the leader of this rank if it has been silent for too long. Like
// [Coordinator.Expire], it must be called after the frames that had arrived at the time of the last Tick were
// applied.
func (m *Member) Expire() {
	switch {
	case m.state == memberClosed || m.state == memberFailed:
	case m.now >= m.ownVerdictDue() && m.state != memberBye && slices.Equal(m.suspected.Ranks,
		[]topo.Rank{m.cfg.Rank}):
		m.fail(m.suspected) // perhaps the verdict cannot reach this rank because of its failure
	case m.now >= m.ownVerdictDue():
		m.Lost(fmt.Sprintf("silent for %s, and rank %d suspects %s: %s", seconds(m.now-m.lastReceived),
			m.cfg.Rank, topo.FormatRanks(m.suspected.Ranks), m.suspected.Reason))
	case m.now-m.lastReceived >= m.cfg.LivenessTimeout:
		m.Lost(fmt.Sprintf("silent for %v", m.cfg.LivenessTimeout))
	case m.expired != nil && m.now-m.lastReceived >= 2*heartbeatPeriod:
		m.Lost(fmt.Sprintf("silent for %s, and %s", seconds(m.now-m.lastReceived),
			expiredText(message.NoKind, m.expired)))
	}
	m.expired = nil
}

// Submit adds a request of this rank. The request must have passed Check, and no tensor with its name may be
// in flight. After the stop, Submit ignores requests, and the engine ends them with the error of the
// shutdown.
func (m *Member) Submit(id topo.ProcessSetID, q *message.Request) error {
	if m.state != memberRunning {
		return nil
	}
	s := m.set(id)
	if s == nil || s.me < 0 {
		return fmt.Errorf("%v %q: rank %d is not a member of process set %d", q.Kind, q.Name, m.cfg.Rank, id)
	}
	if err := s.admit(q); err != nil {
		return err
	}
	if q.Kind == message.Join {
		s.join = q.Name // a join is not a tensor and is not looked up in the cache
		m.addRequest(id, q)
		return nil
	}
	switch bit, state := s.cache.Lookup(q, s.me); {
	case state == responsecache.Hit && m.cfg.Lockstep:
		s.votes.Set(bit)
	case state == responsecache.Hit:
		m.up.At(id).Hits.Set(bit)
		m.news = true
	case state == responsecache.Invalid:
		m.up.At(id).Invalid.Set(bit)
		fallthrough
	default:
		m.addRequest(id, q)
	}
	return nil
}

// addRequest adds the whole request, instead of its cache bit, to the next frame.
func (m *Member) addRequest(id topo.ProcessSetID, q *message.Request) {
	u := m.up.At(id)
	u.Requests = append(u.Requests, *q)
	m.news = true
}

// Finished records that a grant has run. Afterwards the member may reuse the Grant. Finished must be called
// even if the process set of the grant was removed. It reports whether the member has something to send, or
// is about to leave. Otherwise the caller need not call Ready before the next event.
func (m *Member) Finished(g *Grant) (more bool) {
	m.running.remove(g)
	if n := len(g.Responses); n > 0 {
		m.operations += uint64(n)
		m.lastKind, m.lastName, m.lastAt = g.Responses[n-1].Kind, g.Responses[n-1].Name, m.now
	}
	if s := m.set(g.Set); s != nil && s.me == 0 && !m.cfg.Lockstep && (m.state == memberRunning ||
		m.state == memberDraining) {
		m.up.At(g.Set).Done++
		m.news = true
	}
	clear(g.Responses)
	g.Responses = g.Responses[:0]
	m.free = append(m.free, g)
	return m.news || len(m.left) > 0 || m.state != memberRunning
}

// Shutdown records that this rank will submit nothing more. The rank is stopped when its requests have been
// answered. If reason is not empty, it appears in the errors of ranks that still need this rank. The argument
// channels has the channels over which this rank sends a last frame (message.Up.Channels).
func (m *Member) Shutdown(reason string, channels []message.Channel) {
	if m.state == memberRunning && !m.shutdown {
		m.shutdown, m.reason, m.channels, m.news = true, reason, channels, true
	}
}

// Receives sets the ranks that have announced their shutdown and whose last messages have not arrived at this
// rank yet. Until they have, this rank does not release these ranks. The caller must not change the slice.
func (m *Member) Receives(from []topo.Rank) { m.receives = from }

// Drained records that this rank was stopped and that all its grants have run.
func (m *Member) Drained() {
	if m.state == memberDraining {
		m.state, m.bye = memberBye, true
	}
}

// Suspect reports a failure of one of the given ranks, which are in ascending order. If there is one, and it
// is another rank, the data connection to it has failed. If there is only this rank, this rank itself fails.
// If there are several, this rank cannot tell which of them has failed. The coordinator answers with a
// verdict. The first suspicion of a rank counts, but one of several ranks gives way to one of a single rank.
// After its bye, this rank executes nothing that could fail, so only a failure of this rank itself counts.
func (m *Member) Suspect(ranks []topo.Rank, reason string) {
	switch {
	case m.state == memberClosed || m.state == memberFailed:
		return
	case m.state == memberBye && !slices.Equal(ranks, []topo.Rank{m.cfg.Rank}):
		return
	case m.suspected != nil && !clearer(ranks, m.suspected.Ranks):
		return
	}
	m.suspected = &Verdict{Ranks: ranks, Reason: reason}
	m.suspectedAt, m.suspectFrame = m.now, true
}

// ownVerdictDue returns the time at which this rank stops waiting for the verdict about its suspicion, or
// never. By then, the coordinator has missed two heartbeats. So the verdict of this rank is that rank 0, or
// the leader that sends them, has failed, unless it suspects itself. Ranks that suspect nobody come to that
// verdict later.
func (m *Member) ownVerdictDue() time.Duration {
	if m.suspected == nil {
		return Never
	}
	return max(m.suspectedAt+verdictTimeout, m.lastReceived+2*heartbeatPeriod)
}

// SuspectChannel records that the channel for messages of a process set to a rank has failed. If other ranks
// have removed the set already, that is no failure. The coordinator knows whether they have, so in a set that
// can be removed this rank does not decide about the suspicion by itself.
func (m *Member) SuspectChannel(set topo.ProcessSetID, ranks []topo.Rank, reason string) {
	switch {
	case set == topo.Global:
		m.Suspect(ranks, reason)
	case m.state == memberRunning || m.state == memberDraining:
		m.reports = append(m.reports,
			message.Up{Type: message.UpSuspect, Set: set, Suspects: ranks, Reason: reason})
	}
}

// Lost records that the connection to rank 0, or to the leader, has ended. If this rank has sent bye, and
// leads no rank that has not, the epoch is over. Otherwise, unless there is a verdict already, the verdict is
// that the rank at the other end has failed.
func (m *Member) Lost(reason string) {
	switch {
	case m.state == memberClosed || m.state == memberFailed:
	case m.state == memberBye && !m.leads():
		m.state = memberClosed
	default:
		m.fail(&Verdict{Ranks: []topo.Rank{m.cfg.Leader}, Reason: reason})
	}
}

// leads reports whether this rank leads a rank that has not sent bye.
func (m *Member) leads() bool { return m.cfg.Combiner != nil && m.cfg.Combiner.leads() }

func (m *Member) fail(v *Verdict) {
	m.state, m.verdict = memberFailed, v
	// Do not run grants from the faulty frame, even if they come before the fault.
	clear(m.grants)
	m.grants = m.grants[:0]
}

// Step applies a frame from the coordinator. If it returns an error, the coordinator has broken the protocol,
// and the verdict is that rank 0 has failed.
func (m *Member) Step(d *message.Down) error {
	if m.state == memberClosed || m.state == memberFailed {
		return nil
	}
	if m.news && d.Type == message.DownCycle {
		panic("controller: Step while requests that were classified before wait in Ready")
	}
	m.lastReceived = m.now
	var err error
	switch d.Type {
	case message.DownFail:
		if len(d.Ranks) == 0 {
			err = fmt.Errorf("got a verdict that names no failed rank")
		} else {
			m.fail(&Verdict{Ranks: append([]topo.Rank(nil), d.Ranks...), Reason: d.Reason})
		}
	case message.DownLeft:
		m.left = append(m.left, d.Ranks...)
	case message.DownClose:
		if m.state == memberRunning {
			err = fmt.Errorf("got a close frame before the cycle that stops the job")
		} else {
			m.state = memberClosed
		}
	case message.DownCycle:
		err = m.apply(d)
	}
	if err != nil {
		m.fail(&Verdict{Ranks: []topo.Rank{0}, Reason: fmt.Sprintf("protocol error: %v", err)})
	}
	return err
}

func (m *Member) apply(d *message.Down) error {
	if d.Cycle <= m.seen {
		return fmt.Errorf("got cycle %d after cycle %d", d.Cycle, m.seen)
	}
	if m.state != memberRunning {
		return fmt.Errorf("got cycle %d after the cycle that stopped the job", d.Cycle)
	}
	if d.Tuning != nil {
		m.segmentBytes = d.Tuning.SegmentBytes
	}
	for i := range d.Sets {
		ds := &d.Sets[i]
		s := m.set(ds.Set)
		if s == nil {
			s = m.found(ds)
		}
		if s == nil || s.me < 0 && !m.cfg.Lockstep {
			return fmt.Errorf("cycle %d has decisions for process set %d, but rank %d is not a member of it", d.Cycle,
				ds.Set, m.cfg.Rank)
		}
		if s.me < 0 {
			m.follow(ds)
			continue
		}
		first := len(m.grants)
		var err error
		if m.grants, err = s.apply(ds, m.grants, m.newGrant, m.announced); err != nil {
			return fmt.Errorf("cycle %d: %w", d.Cycle, err)
		}
		for _, g := range m.grants[first:] {
			m.running.add(g, m.now)
			g.SegmentBytes = m.segmentBytes
			if err := m.change(s, g.Responses[0]); err != nil {
				return fmt.Errorf("cycle %d: %w", d.Cycle, err)
			}
		}
	}
	m.seen = d.Cycle
	if d.Stop {
		m.state, m.stopped, m.stopReason = memberDraining, true, d.Reason
		m.stopRanks = append([]topo.Rank(nil), d.Ranks...)
	}
	return nil
}

// apply applies those decisions of a frame that are about the set, and appends the grants to the slice
// grants. leaving says whether this rank has announced its shutdown.
func (s *memberSet) apply(ds *message.DownSet, grants []*Grant, newGrant func() *Grant,
	leaving bool) ([]*Grant, error) {
	for i := range ds.Grants {
		dg := &ds.Grants[i]
		g := newGrant()
		s.grants++
		g.Set, g.Number, g.Backend, g.Algorithm = s.ID, s.grants, dg.Backend, dg.Algorithm
		g.Asked = s.ID
		if s.byMembers && s.grants == 1 {
			g.Asked = topo.Global
		}
		g.Absent = append(g.Absent[:0], dg.Absent...)
		g.Bits = append(g.Bits[:0], dg.Bits...)
		for _, bit := range dg.Bits {
			r := s.cache.At(bit)
			if r == nil {
				return grants, fmt.Errorf("got a grant of cache bit %d, but the cache has no entry for this bit", bit)
			}
			s.answered(bit)
			g.Responses = append(g.Responses, r)
		}
		for _, r := range dg.Full {
			// The coordinator grants a cached request in full if the response has become an error or if it
			// depends on absent ranks.
			if bit, ok := s.cache.BitOf(r.Name); ok {
				s.answered(bit)
			}
			g.Responses = append(g.Responses, r)
		}
		if err := checkGrant(s, g, leaving); err != nil {
			return grants, err
		}
		if r := g.Responses[0]; r.Kind == message.Join {
			mine := *r // the names of joins may differ between ranks, so use this rank's name
			mine.Name, s.join, s.joinKnown = s.join, "", false
			g.Responses[0] = &mine
		}
		grants = append(grants, g)
	}
	for _, bit := range ds.Erase {
		s.answered(bit) // the coordinator has turned the vote into a request
		if err := s.cache.Erase(bit); err != nil {
			return grants, err
		}
	}
	for _, p := range ds.Puts {
		if err := s.cache.Put(p.Bit, ds.Grants[p.Grant].Full[p.Tensor]); err != nil {
			return grants, err
		}
	}
	return grants, nil
}

// checkGrant returns an error if the grant is invalid and must not be executed. Only a faulty coordinator
// sends such a grant. leaving says whether this rank has announced its shutdown.
func checkGrant(s *memberSet, g *Grant, leaving bool) error {
	if len(g.Responses) == 0 {
		return fmt.Errorf("got a grant without a response")
	}
	first := g.Responses[0]
	for i, r := range g.Absent {
		if s.index(r) < 0 || i > 0 && r <= g.Absent[i-1] {
			return fmt.Errorf("got a grant of %v %q with absent ranks %v, want members of process set %d in ascending order", first.Kind, first.Name, g.Absent, s.ID)
		}
	}
	for i, r := range g.Responses {
		if i > 0 && !fusion.Compatible(first, r) {
			return fmt.Errorf("got a grant of %v %q together with %v %q, which cannot be fused", r.Kind, r.Name,
				first.Kind, first.Name)
		}
		if err := checkResponse(s, g, r); err != nil {
			return err
		}
	}
	agrees := first.Kind == message.Error || leaving && first.Kind == message.RemoveProcessSet
	if !agrees && s.join == "" && slices.Contains(g.Absent, s.Ranks[s.me]) {
		return fmt.Errorf("got a grant of %v %q with absent rank %d, which has not joined", first.Kind, first.Name,
			s.Ranks[s.me])
	}
	return nil
}

// checkResponse returns an error if a response of the grant is invalid for the process set.
func checkResponse(s *memberSet, g *Grant, r *message.Response) error {
	switch {
	case r.Kind.HasRoot() && s.index(r.Root) < 0:
		return fmt.Errorf("%v %q: root rank %d is not a member of process set %d", r.Kind, r.Name, r.Root,
			s.ID)
	case r.Kind.HasRoot() && slices.Contains(g.Absent, r.Root):
		return fmt.Errorf("%v %q: root rank %d is absent", r.Kind, r.Name, r.Root)
	}
	if r.Devices != nil {
		if len(r.Devices) != len(s.Ranks) {
			return fmt.Errorf("%v %q: got %d devices, want %d, one for each rank", r.Kind, r.Name,
				len(r.Devices), len(s.Ranks))
		}
		for i, d := range r.Devices {
			if d == tensor.Host && !slices.Contains(g.Absent, s.Ranks[i]) {
				return fmt.Errorf("%v %q: got device %v for rank %d, want a CUDA device, as at the other ranks",
					r.Kind, r.Name, d, s.Ranks[i])
			}
		}
	}
	switch r.Kind {
	case message.Allgather:
		if len(r.FirstDims) != len(s.Ranks) {
			return fmt.Errorf("allgather %q: got %d first dimensions, want %d, one for each rank", r.Name,
				len(r.FirstDims), len(s.Ranks))
		}
		for _, a := range g.Absent {
			if n := r.FirstDims[s.index(a)]; n != 0 {
				return fmt.Errorf("allgather %q: got %d rows from absent rank %d, want 0", r.Name, n, a)
			}
		}
	case message.Join:
		if s.join == "" {
			return fmt.Errorf("got the end of a join of process set %d, but rank %d has not joined", s.ID,
				s.Ranks[s.me])
		}
	case message.AddProcessSet, message.RemoveProcessSet:
		if g.Asked == topo.Global {
			break
		}
		if err := s.checkChange(s.byMembers, &message.Request{Kind: r.Kind, Set: r.Set}); err != nil {
			return fmt.Errorf("%v %q: %w", r.Kind, r.Name, err)
		}
	}
	return nil
}

func (m *Member) newGrant() *Grant {
	if n := len(m.free); n > 0 {
		g := m.free[n-1]
		m.free = m.free[:n-1]
		return g
	}
	return new(Grant)
}

// HasOutput reports whether Ready has anything to return. If not, the caller need not call Ready and Advance.
func (m *Member) HasOutput() bool {
	return len(m.grants) > 0 || m.stopped || m.news && !m.cfg.Lockstep || len(m.left) > 0 || m.suspectFrame ||
		len(m.reports) > 0 || m.bye || m.now >= m.nextHeartbeat(false)
}

// Ready returns the frames to send and the grants to run now. The result is valid until Advance.
func (m *Member) Ready() Ready {
	m.ups = m.ups[:0]
	if m.state != memberClosed && m.state != memberFailed {
		m.appendFrames()
	}
	return Ready{Ups: m.ups, Grants: m.grants, Stop: m.stopped, StopReason: m.stopReason,
		StopRanks: m.stopRanks}
}

// appendFrames creates the frames of a turn and appends them to the slice ups.
func (m *Member) appendFrames() {
	if m.news && !m.cfg.Lockstep {
		m.completeNews()
		m.ups = append(m.ups, &m.up)
	}
	var released []topo.Rank
	m.left = slices.DeleteFunc(m.left, func(r topo.Rank) bool {
		if m.executes(r) || slices.Contains(m.receives, r) {
			return false
		}
		released = append(released, r)
		return true
	})
	if released != nil {
		m.ups = append(m.ups, &message.Up{Type: message.UpReleased, Seen: m.seen, Released: released})
	}
	if m.suspectFrame { // before a timeout, which the suspicion may explain
		m.ups = append(m.ups, &message.Up{Type: message.UpSuspect, Seen: m.seen,
			Suspects: m.suspected.Ranks, Reason: m.suspected.Reason})
	}
	for i := range m.reports {
		u := &m.reports[i]
		u.Seen, u.Granted = m.seen, u.Type == message.UpTimeout && m.running.has(u.Set, u.Tensor)
		m.ups = append(m.ups, u)
	}
	switch {
	case m.bye && !m.suspectFrame:
		m.ups = append(m.ups, &message.Up{Type: message.UpBye, Seen: m.seen})
	case m.now >= m.nextHeartbeat(len(m.ups) > 0):
		m.ups = append(m.ups, m.heartbeatFrame())
	}
}

// completeNews sets those fields of the next news frame that are known only when the frame is sent.
func (m *Member) completeNews() {
	m.up.Seen = m.seen
	if m.shutdown && !m.announced {
		m.up.Shutdown, m.up.Operations, m.up.Reason = true, m.operations, m.reason
		m.up.Channels = append(m.up.Channels, m.channels...)
		if m.operations > 0 {
			m.up.Tensor, m.up.Millis = m.lastOperation(), millis(m.now-m.lastAt)
		}
		m.announced = true
	}
}

// newsTaken starts a new news frame, because Ready has taken the previous one.
func (m *Member) newsTaken() {
	m.up.Reset()
	m.up.Type = message.UpNews
	m.news = false
}

// lastOperation returns the operation and the name of the last response that this rank has finished, as text.
func (m *Member) lastOperation() string {
	if m.lastKind == message.Error { // an error response does not contain the operation
		return label(message.NoKind, m.lastName)
	}
	return label(m.lastKind, m.lastName)
}

// executes reports whether this rank may still execute an operation with r: it does if an unfinished grant
// belongs to a process set that contains r.
func (m *Member) executes(r topo.Rank) bool {
	for g := m.running.oldest; g != nil; g = g.newer {
		// The members of a removed process set are unknown, so r may be one of them.
		if s := m.set(g.Set); s == nil || s.index(r) >= 0 {
			return true
		}
	}
	return false
}

// Advance drops the frames and grants that the last Ready has returned.
func (m *Member) Advance() {
	if len(m.ups) > 0 {
		m.lastSent = m.now
		if last := m.ups[len(m.ups)-1]; last.Type == message.UpHeartbeat {
			m.lastBeat, m.reported = m.now, last.Tensor != ""
		}
	}
	m.ups = m.ups[:0]
	m.reports = m.reports[:0]
	if m.news && !m.cfg.Lockstep {
		m.newsTaken()
	}
	m.suspectFrame, m.bye, m.stopped, m.stopReason, m.stopRanks = false, false, false, "", nil
	clear(m.grants)
	m.grants = m.grants[:0]
}

// Verdict returns why the epoch has failed, or nil if it has not.
func (m *Member) Verdict() *Verdict { return m.verdict }

// Closed reports whether this rank has left the job in an orderly way and no other rank needs it anymore.
func (m *Member) Closed() bool { return m.state == memberClosed }

// Next returns the time by which Tick and Ready must be called again, even if nothing happens before.
func (m *Member) Next() time.Duration {
	if m.state == memberClosed || m.state == memberFailed {
		return Never
	}
	return min(m.nextHeartbeat(false), m.lastReceived+m.cfg.LivenessTimeout, m.ownVerdictDue())
}

// Digest returns a digest of the member's cache of a set. It is equal at all members that have applied the
// same cycles.
func (m *Member) Digest(id topo.ProcessSetID) uint64 {
	if s := m.set(id); s != nil {
		return s.cache.Digest()
	}
	return 0
}

func (m *Member) set(id topo.ProcessSetID) *memberSet {
	for _, s := range m.sets {
		if s.ID == id {
			return s
		}
	}
	return nil
}
