package controller

import (
	"fmt"
	"time"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/responsecache"
	"github.com/gohvd/gohvd/topo"
)

// MemberConfig is what a Member needs to know.
type MemberConfig struct {
	Rank topo.Rank
	// Sets are the process sets of which the rank is a member, ascending by id.
	Sets []Set
	// LivenessTimeout is the silence after which the coordinator has failed.
	LivenessTimeout time.Duration
}

type memberState uint8

const (
	memberRunning  memberState = iota
	memberDraining             // STOP is applied, granted work is being finished
	memberBye                  // it is finished and the coordinator knows
	memberClosed
	memberFailed
)

// Member is a rank's side of the negotiation. It is not safe for concurrent use.
//
// A turn is: Tick; Submit and the like for whatever happened at this rank; Ready, send what it says, Advance;
// then for each frame Step, Ready, run what it says, Advance. Requests are classified against the cache as of
// the last frame applied, which is why what Submit wrote must be taken before the next Step.
type Member struct {
	cfg   MemberConfig
	sets  []*memberSet
	state memberState

	now   time.Duration
	heard time.Duration // when the last frame came
	spoke time.Duration // when the last frame was made
	seen  uint64        // last cycle applied

	up           message.Up // next frame
	news         bool       // up holds something
	shutdown     bool       // Shutdown was called
	stopAnnounce bool       // STOP was just applied
	grants       []*Grant   // to run
	free         []*Grant   // released
	suspected    *Verdict   // our own suspicion
	suspectedAt  time.Duration
	suspectFrame bool // the suspicion is to be sent
	bye          bool // bye is to be sent
	verdict      *Verdict
}

// memberSet is a process set as seen by a member.
type memberSet struct {
	Set
	me    int // position in the set
	cache responsecache.Cache
}

// Ready is what a Member wants done.
type Ready struct {
	// Ups are frames to send to the coordinator, in order.
	Ups [2]*message.Up
	// Grants are responses to run, in order within their sets. Give each to Finished when it has run.
	Grants []*Grant
	// Stop says that nothing more will be granted: what was not is to be answered with the shutdown.
	Stop bool
}

// NewMember makes the member of an epoch that begins at the given time.
func NewMember(cfg MemberConfig, now time.Duration) *Member {
	m := &Member{cfg: cfg, now: now, heard: now, spoke: now}
	for _, s := range cfg.Sets {
		m.sets = append(m.sets, &memberSet{Set: s, me: s.index(cfg.Rank)})
	}
	m.up.Type = message.UpNews
	return m
}

// Tick says what time it is.
func (m *Member) Tick(now time.Duration) {
	if g := gap(m.now, now); g > 0 {
		m.heard += g
		m.suspectedAt += g
	}
	m.now = now
	switch m.state {
	case memberClosed, memberFailed:
		return
	}
	switch {
	case m.suspected != nil && now-m.suspectedAt >= verdictTimeout:
		m.fail(m.suspected)
	case now-m.heard >= m.cfg.LivenessTimeout:
		m.Lost(fmt.Sprintf("silent for %v", m.cfg.LivenessTimeout))
	}
}

// Submit makes a request of this rank. It must have passed Check, and its name must not be in flight. After
// STOP it is ignored: the engine answers it with the shutdown.
func (m *Member) Submit(id topo.ProcessSetID, q *message.Request) error {
	if m.state != memberRunning {
		return nil
	}
	s := m.set(id)
	if s == nil {
		return fmt.Errorf("%v %q: rank %d is not a member of process set %d", q.Kind, q.Name, m.cfg.Rank, id)
	}
	u := m.up.At(id)
	m.news = true
	switch bit, state := s.cache.Lookup(q, s.me); state {
	case responsecache.Hit:
		u.Hits.Set(bit)
	case responsecache.Invalid:
		u.Invalid.Set(bit)
		fallthrough
	default:
		u.Requests = append(u.Requests, *q)
	}
	return nil
}

// Finished says that a grant has run and may be used again by the member.
func (m *Member) Finished(g *Grant) {
	if s := m.set(g.Set); s.me == 0 && (m.state == memberRunning || m.state == memberDraining) {
		m.up.At(g.Set).Done++
		m.news = true
	}
	clear(g.Responses)
	g.Responses = g.Responses[:0]
	m.free = append(m.free, g)
}

// Shutdown asks for the end of the job.
func (m *Member) Shutdown() {
	if m.state == memberRunning && !m.shutdown {
		m.shutdown, m.news = true, true
	}
}

// Drained says that all grants have run after STOP.
func (m *Member) Drained() {
	if m.state == memberDraining {
		m.state, m.bye = memberBye, true
	}
}

// Suspect says that the data channel to a rank failed. The coordinator's verdict follows; if it does not come in
// time the suspicion is the verdict.
func (m *Member) Suspect(r topo.Rank, reason string) {
	if m.suspected != nil || m.state == memberClosed || m.state == memberFailed {
		return
	}
	m.suspected = &Verdict{Ranks: []topo.Rank{r}, Reason: reason}
	m.suspectedAt, m.suspectFrame = m.now, true
}

// Lost says that the connection to the coordinator ended. Without a verdict that is one: rank 0 failed. When
// all work is done and said to be, it is the end.
func (m *Member) Lost(reason string) {
	switch m.state {
	case memberClosed, memberFailed:
	case memberBye:
		m.state = memberClosed
	default:
		m.fail(&Verdict{Ranks: []topo.Rank{0}, Reason: reason})
	}
}

func (m *Member) fail(v *Verdict) {
	m.state, m.verdict = memberFailed, v
	// What a frame granted before its fault is not run either.
	clear(m.grants)
	m.grants = m.grants[:0]
}

// Step applies a frame of the coordinator. An error means that the coordinator broke the protocol; it has
// then failed.
func (m *Member) Step(d *message.Down) error {
	if m.state == memberClosed || m.state == memberFailed {
		return nil
	}
	if m.news {
		panic("controller: Step while requests that were classified before wait in Ready")
	}
	m.heard = m.now
	var err error
	switch d.Type {
	case message.DownFail:
		if len(d.Ranks) == 0 {
			err = fmt.Errorf("a verdict that names no rank")
		} else {
			m.fail(&Verdict{Ranks: append([]topo.Rank(nil), d.Ranks...), Reason: d.Reason})
		}
	case message.DownClose:
		if m.state == memberRunning {
			err = fmt.Errorf("close without a stop")
		} else {
			m.state = memberClosed
		}
	case message.DownCycle:
		err = m.apply(d)
	}
	if err != nil {
		m.fail(&Verdict{Ranks: []topo.Rank{0}, Reason: fmt.Sprintf("it broke the protocol: %v", err)})
	}
	return err
}

func (m *Member) apply(d *message.Down) error {
	if d.Cycle <= m.seen {
		return fmt.Errorf("cycle %d after cycle %d", d.Cycle, m.seen)
	}
	if m.state != memberRunning {
		return fmt.Errorf("cycle %d after the stop", d.Cycle)
	}
	for i := range d.Sets {
		ds := &d.Sets[i]
		s := m.set(ds.Set)
		if s == nil {
			return fmt.Errorf("cycle %d has process set %d, of which rank %d is no member", d.Cycle, ds.Set, m.cfg.Rank)
		}
		var err error
		if m.grants, err = s.apply(ds, m.grants, m.newGrant); err != nil {
			return fmt.Errorf("cycle %d: %w", d.Cycle, err)
		}
	}
	m.seen = d.Cycle
	if d.Stop {
		m.state, m.stopAnnounce = memberDraining, true
	}
	return nil
}

// apply replays what a frame decided about the set and appends its grants to grants.
func (s *memberSet) apply(ds *message.DownSet, grants []*Grant, newGrant func() *Grant) ([]*Grant, error) {
	for i := range ds.Grants {
		dg := &ds.Grants[i]
		g := newGrant()
		g.Set, g.Backend, g.Algorithm = s.ID, dg.Backend, dg.Algorithm
		for _, bit := range dg.Bits {
			r := s.cache.At(bit)
			if r == nil {
				return grants, fmt.Errorf("grant of bit %d, which is free", bit)
			}
			g.Responses = append(g.Responses, r)
		}
		g.Responses = append(g.Responses, dg.Full...)
		if err := checkGrant(s, g); err != nil {
			return grants, err
		}
		grants = append(grants, g)
	}
	for _, bit := range ds.Erase {
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

// checkGrant keeps the data plane from computing with what a broken coordinator sent.
func checkGrant(s *memberSet, g *Grant) error {
	if len(g.Responses) == 0 {
		return fmt.Errorf("grant of nothing")
	}
	first := g.Responses[0]
	if len(g.Responses) > 1 && first.Kind != message.Allreduce {
		return fmt.Errorf("grant of %d tensors for %v %q, which runs alone", len(g.Responses), first.Kind, first.Name)
	}
	for _, r := range g.Responses {
		if r.Kind != first.Kind || r.DType != first.DType || r.Op != first.Op || r.Prescale != first.Prescale || r.Postscale != first.Postscale {
			return fmt.Errorf("grant of %v %q together with %v %q, which one reduction cannot serve", r.Kind, r.Name, first.Kind, first.Name)
		}
		if r.Kind == message.Allgather && len(r.FirstDims) != len(s.Ranks) {
			return fmt.Errorf("allgather %q with %d first dimensions for %d ranks", r.Name, len(r.FirstDims), len(s.Ranks))
		}
		if r.Kind == message.Broadcast && s.index(r.Root) < 0 {
			return fmt.Errorf("broadcast %q with root %d, which is no member of process set %d", r.Name, r.Root, s.ID)
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

// Ready is what to do now. It is valid until Advance.
func (m *Member) Ready() Ready {
	r := Ready{Grants: m.grants, Stop: m.stopAnnounce}
	if m.state == memberClosed || m.state == memberFailed {
		return r
	}
	n := 0
	add := func(u *message.Up) {
		r.Ups[n] = u
		n++
	}
	if m.news {
		m.up.Seen, m.up.Shutdown = m.seen, m.shutdown
		add(&m.up)
	}
	switch {
	case m.suspectFrame:
		add(&message.Up{Type: message.UpSuspect, Seen: m.seen, Suspect: m.suspected.Ranks[0], Reason: m.suspected.Reason})
	case m.bye:
		add(&message.Up{Type: message.UpBye, Seen: m.seen})
	case n == 0 && m.now-m.spoke >= heartbeatPeriod:
		add(&message.Up{Type: message.UpHeartbeat, Seen: m.seen})
	}
	return r
}

// Advance says that the outputs of the last Ready were taken.
func (m *Member) Advance() {
	if m.news || m.suspectFrame || m.bye || m.now-m.spoke >= heartbeatPeriod {
		m.spoke = m.now
	}
	if m.news {
		m.up.Reset()
		m.up.Type = message.UpNews
		m.news = false
	}
	m.suspectFrame, m.bye, m.stopAnnounce = false, false, false
	clear(m.grants)
	m.grants = m.grants[:0]
}

// Verdict is why the epoch failed, or nil.
func (m *Member) Verdict() *Verdict { return m.verdict }

// Closed reports whether the shutdown is complete at every rank.
func (m *Member) Closed() bool { return m.state == memberClosed }

// Next is the time at which Tick and Ready are wanted again if nothing happens before.
func (m *Member) Next() time.Duration {
	if m.state == memberClosed || m.state == memberFailed {
		return never
	}
	next := min(m.spoke+heartbeatPeriod, m.heard+m.cfg.LivenessTimeout)
	if m.suspected != nil {
		next = min(next, m.suspectedAt+verdictTimeout)
	}
	return next
}

// Digest is that of the member's cache of a set.
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
