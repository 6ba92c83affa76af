package controller

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/responsecache"
	"github.com/gohvd/gohvd/topo"
)

// LockstepConfig is what a Lockstep needs to know. It is the same at all ranks but for Rank.
type LockstepConfig struct {
	Rank topo.Rank
	// Sets are all process sets with which the job begins, ascending by id, the global one first.
	Sets                 []Set
	CacheCapacity        int
	FusionThresholdBytes int64
	DisableGroupFusion   bool
	Deterministic        bool
	Plan                 Planner
}

// Lockstep is a rank's side of the negotiation where all ranks enter every cycle (NEGOTIATION §9; Horovod's
// shape). Rank 0's is the coordinator too. It is not safe for concurrent use.
//
// A cycle is: Submit and Shutdown for whatever happened at this rank; Vectors, which all ranks combine by
// bitwise AND and OR; Combine; if it says so, Gather at rank 0, and a broadcast of what rank 0's Decide gives;
// Apply, and run the grants in order. There are no late votes: every rank has seen the last cycle.
type Lockstep struct {
	cfg    LockstepConfig
	sets   []*lockstepSet
	table  *setTable // rank 0 only
	policy policy    // rank 0 only
	words  int       // of a set's bit vector

	shutdown bool
	stopped  bool
	cycle    uint64

	and, or []uint64 // scratch of Vectors
	up      message.Up
	combine combined
}

// lockstepSet is a process set at one rank; me is -1 if the rank is no member.
type lockstepSet struct {
	memberSet
	votes    message.Bits // this rank's unanswered votes, presented every cycle
	invalid  message.Bits // bits that this rank invalidates in this cycle
	requests []message.Request
	told     bool      // rank 0 knows that this rank has joined, and what it had voted for
	state    *setState // rank 0 only
}

// combined is the outcome of a cycle's allreduce.
type combined struct {
	and, or  []uint64
	requests bool
	shutdown bool
}

const (
	flagShutdown = 1 << iota
	flagRequests
)

// NewLockstep makes the controller of one rank.
func NewLockstep(cfg LockstepConfig) *Lockstep {
	l := &Lockstep{cfg: cfg, words: (min(cfg.CacheCapacity, message.MaxCacheBits) + 63) / 64}
	if cfg.Rank == 0 {
		l.table = newSetTable(cfg.Sets, cfg.CacheCapacity, newWaits(0, 0, 0, len(cfg.Sets[0].Ranks)))
		l.policy = policy{
			fusion: fusion.Options{ThresholdBytes: cfg.FusionThresholdBytes, DisableGroupFusion: cfg.DisableGroupFusion, Deterministic: cfg.Deterministic},
			plan:   cfg.Plan, sets: l.table,
		}
	}
	for _, s := range cfg.Sets {
		l.addSet(s)
	}
	return l
}

// addSet makes the rank's side of a set; at rank 0 its controller is in the table already.
func (l *Lockstep) addSet(s Set) {
	ls := &lockstepSet{memberSet: *newMemberSet(s, l.cfg.Rank)}
	if l.table != nil {
		ls.state = l.table.find(s.ID)
	}
	l.sets = append(l.sets, ls)
}

// Submit makes a request of this rank, as Member.Submit does.
func (l *Lockstep) Submit(id topo.ProcessSetID, q *message.Request) error {
	if l.stopped {
		return nil
	}
	s := l.set(id)
	if s == nil || s.me < 0 {
		return fmt.Errorf("%v %q: rank %d is not a member of process set %d", q.Kind, q.Name, l.cfg.Rank, id)
	}
	if err := s.admit(q); err != nil {
		return err
	}
	if q.Kind == message.Join {
		s.join = q.Name
		s.requests = append(s.requests, *q)
		return nil
	}
	switch bit, state := s.cache.Lookup(q, s.me); state {
	case responsecache.Hit:
		s.votes.Set(bit)
	case responsecache.Invalid:
		s.invalid.Set(bit)
		fallthrough
	default:
		s.requests = append(s.requests, *q)
	}
	return nil
}

// Shutdown asks for the end of the job.
func (l *Lockstep) Shutdown() { l.shutdown = true }

// Vectors is what this rank contributes to the cycle's allreduce. The lengths are the same at all ranks. For
// each set in order, and has the unanswered votes (all ones where the rank is no member or has joined), and or has
// the votes, then the invalid bits, after one word of flags. They are valid until the next call.
func (l *Lockstep) Vectors() (and, or []uint64) {
	l.and, l.or = l.and[:0], append(l.or[:0], 0)
	if l.shutdown {
		l.or[0] |= flagShutdown
	}
	for _, s := range l.sets {
		if len(s.requests) > 0 {
			l.or[0] |= flagRequests
		}
		for w := range l.words {
			if s.me < 0 || s.join != "" {
				l.and = append(l.and, ^uint64(0))
			} else {
				l.and = append(l.and, word(s.votes, w))
			}
			l.or = append(l.or, word(s.votes, w))
		}
		for w := range l.words {
			l.or = append(l.or, word(s.invalid, w))
		}
	}
	return l.and, l.or
}

func word(v message.Bits, w int) uint64 {
	if w < len(v) {
		return v[w]
	}
	return 0
}

// Combine takes the allreduced vectors, which it keeps until the end of the cycle. It says whether all ranks
// now gather at rank 0, and whether rank 0 then broadcasts a frame; the answers are the same at all ranks.
func (l *Lockstep) Combine(and, or []uint64) (gather, broadcast bool, err error) {
	if len(and) != len(l.sets)*l.words || len(or) != 1+2*len(l.sets)*l.words {
		return false, false, fmt.Errorf("controller: vectors of %d and %d words, want %d and %d: do all ranks have the same HOROVOD_CACHE_CAPACITY?",
			len(and), len(or), len(l.sets)*l.words, 1+2*len(l.sets)*l.words)
	}
	l.combine = combined{and: and, or: or, requests: or[0]&flagRequests != 0, shutdown: or[0]&flagShutdown != 0}
	for i := range l.sets {
		if l.invalidBits(i).Any() {
			gather = true
		}
		if l.readyBits(i).Any() {
			broadcast = true
		}
	}
	gather = gather || l.combine.requests || l.combine.shutdown
	return gather, broadcast || gather, nil
}

// Quiet reports whether no rank had anything to say in the combined vectors. All ranks answer the same.
func (l *Lockstep) Quiet() bool { return !message.Bits(l.combine.or).Any() }

// invalidBits and anyVotes and readyBits are what the ranks together say about set i.
func (l *Lockstep) invalidBits(i int) message.Bits {
	from := 1 + (2*i+1)*l.words
	return l.combine.or[from : from+l.words]
}

func (l *Lockstep) anyVotes(i int) message.Bits {
	from := 1 + 2*i*l.words
	return l.combine.or[from : from+l.words]
}

func (l *Lockstep) readyBits(i int) message.Bits {
	ready := append(message.Bits(nil), l.combine.and[i*l.words:(i+1)*l.words]...)
	for w, bad := range l.invalidBits(i) {
		ready[w] &^= bad
	}
	// Where every rank is outside the set's cache, AND is all ones: only voted bits count.
	ready.And(l.anyVotes(i))
	return ready
}

// Gather is what this rank sends to rank 0: its requests in full, among them those that it had voted for by bits
// that turned out invalid. With a JOIN it also sends the votes that are left: from then on its vectors do not tell
// what it has asked for, and rank 0 makes requests of what turns out invalid. It is valid until the next cycle.
func (l *Lockstep) Gather() *message.Up {
	l.up.Reset()
	l.up.Type, l.up.Seen, l.up.Shutdown = message.UpNews, l.cycle, l.shutdown
	for i, s := range l.sets {
		if s.me < 0 {
			continue
		}
		u := l.up.At(s.ID)
		invalid := l.invalidBits(i)
		for bit, ok := invalid.Next(0); ok; bit, ok = invalid.Next(bit + 1) {
			if s.votes.Has(bit) {
				s.votes.Clear(bit)
				if !s.told {
					u.Requests = append(u.Requests, s.cache.At(bit).Request(s.me))
				}
			}
		}
		u.Requests = append(u.Requests, s.requests...)
		if s.join != "" && !s.told {
			u.Hits.Or(s.votes)
			s.told = true
		}
		s.requests = s.requests[:0]
		s.invalid.Reset()
	}
	return &l.up
}

// Decide is rank 0's decision, to be broadcast to all ranks. ups are what the ranks sent, by rank; nil if
// there was no gather. An error is a *BreachError if one rank alone is at fault.
func (l *Lockstep) Decide(ups []*message.Up) (*message.Down, error) {
	next := l.cycle + 1
	d := &message.Down{Type: message.DownCycle, Cycle: next, Stop: l.combine.shutdown}
	for i, s := range l.sets {
		if err := s.state.allInvalid(l.invalidBits(i)); err != nil {
			return nil, err
		}
	}
	for r, up := range ups {
		if err := l.news(topo.Rank(r), up); err != nil {
			return nil, err
		}
	}
	// After the news: a rank that joins in this cycle has said there what of the ready bits it had voted for.
	for i, s := range l.sets {
		if err := s.state.allVoted(l.readyBits(i)); err != nil {
			return nil, err
		}
		s.state.joinAll()
	}
	for i, s := range l.sets {
		if l.table.find(s.ID) == nil {
			continue // this cycle removes it
		}
		s.state.decide(d.AddSet(s.ID), next, &l.policy, l.anyVotes(i))
		s.state.done = s.state.granted // executed before the next cycle
		s.state.cache.Forget(next)
	}
	l.table.forget(next)
	for r, up := range ups {
		if up.Shutdown {
			d.Ranks = append(d.Ranks, topo.Rank(r))
		}
	}
	if len(d.Ranks) == len(l.cfg.Sets[0].Ranks) {
		d.Ranks = nil // nobody is left who could wait for them
	} else if d.Stop {
		d.Reason = "shut down, which ends the job of all ranks where HVD_NEGOTIATION is lockstep"
	}
	return d, nil
}

// allInvalid erases bits that ranks submit with other parameters.
func (s *setState) allInvalid(bits message.Bits) error {
	for bit, ok := bits.Next(0); ok; bit, ok = bits.Next(bit + 1) {
		if s.cache.At(bit) == nil {
			return fmt.Errorf("controller: bit %d of process set %d is invalid but free", bit, s.ID)
		}
		if s.held.bits.Has(bit) {
			return fmt.Errorf("controller: bit %d of process set %d is invalid though all ranks voted for it", bit, s.ID)
		}
		if err := s.invalidate(bit); err != nil {
			return err
		}
	}
	return nil
}

// allVoted completes bits for which every rank votes or has joined. What is held for a group is so in every cycle.
func (s *setState) allVoted(bits message.Bits) error {
	for bit, ok := bits.Next(0); ok; bit, ok = bits.Next(bit + 1) {
		if s.cache.At(bit) == nil {
			return fmt.Errorf("controller: all ranks voted for bit %d of process set %d, which is free", bit, s.ID)
		}
		if !s.held.bits.Has(bit) {
			s.completeBit(bit)
		}
	}
	return nil
}

// news takes what a rank sent to rank 0.
func (l *Lockstep) news(r topo.Rank, up *message.Up) error {
	for i := range up.Sets {
		u := &up.Sets[i]
		s := l.set(u.Set)
		member := -1
		if s != nil {
			member = s.index(r)
		}
		if member < 0 {
			return &BreachError{Rank: r, Err: fmt.Errorf("news of process set %d, of which it is no member", u.Set)}
		}
		if u.Hits.Any() && !slices.ContainsFunc(u.Requests, func(q message.Request) bool { return q.Kind == message.Join }) {
			return &BreachError{Rank: r, Err: fmt.Errorf("votes of process set %d without a join", s.ID)}
		}
		for bit, ok := u.Hits.Next(0); ok; bit, ok = u.Hits.Next(bit + 1) {
			late, err := s.state.cache.Vote(member, bit, l.cycle)
			if err == nil && late != nil {
				err = fmt.Errorf("vote for bit %d of process set %d, which is invalid", bit, s.ID)
			}
			if err != nil {
				return &BreachError{Rank: r, Err: err}
			}
		}
		for _, q := range u.Requests {
			if err := s.state.request(member, q); err != nil {
				return &BreachError{Rank: r, Err: err}
			}
		}
	}
	return nil
}

// Apply replays rank 0's decision. The grants are to be run before the next cycle.
func (l *Lockstep) Apply(d *message.Down) ([]*Grant, error) {
	if d.Type != message.DownCycle || d.Cycle != l.cycle+1 {
		return nil, fmt.Errorf("controller: frame of type %d for cycle %d, want cycle %d", d.Type, d.Cycle, l.cycle+1)
	}
	var grants []*Grant
	for i := range d.Sets {
		ds := &d.Sets[i]
		s := l.set(ds.Set)
		if s == nil {
			return nil, fmt.Errorf("controller: cycle %d has unknown process set %d", d.Cycle, ds.Set)
		}
		if s.me < 0 {
			continue
		}
		for g := range ds.Grants {
			for _, bit := range ds.Grants[g].Bits {
				s.votes.Clear(bit)
			}
			// What is cached is answered in full if no backend runs it.
			for _, r := range ds.Grants[g].Full {
				if bit, ok := s.cache.BitOf(r.Name); ok {
					s.votes.Clear(bit)
				}
			}
		}
		first := len(grants)
		var err error
		if grants, err = s.apply(ds, grants, func() *Grant { return new(Grant) }); err != nil {
			return nil, fmt.Errorf("controller: cycle %d: %w", d.Cycle, err)
		}
		s.told = s.told && s.join != ""
		for _, g := range grants[first:] {
			if err := l.change(g.Responses[0]); err != nil {
				return nil, fmt.Errorf("controller: cycle %d: %w", d.Cycle, err)
			}
		}
	}
	l.cycle, l.stopped = d.Cycle, d.Stop
	return grants, nil
}

// Stopped reports whether nothing will be granted any more.
func (l *Lockstep) Stopped() bool { return l.stopped }

// Digest is that of this rank's cache of a set.
func (l *Lockstep) Digest(id topo.ProcessSetID) uint64 {
	if s := l.set(id); s != nil {
		return s.cache.Digest()
	}
	return 0
}

func (l *Lockstep) set(id topo.ProcessSetID) *lockstepSet {
	for _, s := range l.sets {
		if s.ID == id {
			return s
		}
	}
	return nil
}

// BreachError is a frame of a rank that breaks the protocol.
type BreachError struct {
	Rank topo.Rank
	Err  error
}

func (e *BreachError) Error() string {
	return fmt.Sprintf("controller: rank %d broke the protocol: %v", e.Rank, e.Err)
}

func (e *BreachError) Unwrap() error { return e.Err }
