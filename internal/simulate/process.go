package simulate

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// process simulates a rank. Its turns are those of internal/engine (events.turn in negotiation.go).
type process struct {
	j        *job
	rank     topo.Rank
	host     *host
	member   *controller.Member
	coord    *controller.Coordinator // at rank 0
	combiner *controller.Combiner    // at leaders
	// connected are the processes with a connection to this one, except the one upstream, and behind is the
	// number of ranks behind a leader, and the leader.
	connected []*process
	behind    int

	inbox    []event
	queued   []asked // requests to submit
	finished []*controller.Grant
	burst    int // number of submitted parts of the step
	left     int // number of tensors of the step that have not been granted
	wake     time.Duration
	busy     time.Duration // the time at which the last turn ends
	// The fields below are used with Config.Cores: whether a turn occupies a core, whether the rank then has
	// something to do again, and whether it waits for a core.
	runs, again, waits bool
	at                 time.Duration // the time in the current turn
	load               Load
	dead               bool // whether it was killed
	over               bool // whether it has a verdict
	up                 message.Up
	parts              []message.Part
}

// content counts the votes and the full requests in a frame of a rank.
type content struct{ votes, asks int }

// build makes the processes.
func (j *job) build() {
	cfg, n := &j.cfg, j.cfg.Ranks
	sets := cfg.Workload.sets(n)
	j.hosts = make([]host, (n+cfg.PerHost-1)/cfg.PerHost)
	if cfg.Policy != Star {
		names := make([]string, n)
		for r := range names {
			names[r] = strconv.Itoa(r / cfg.PerHost)
		}
		leaders, list := topo.HostLeaders(names)
		if cfg.Policy == Levels {
			leaders.Group(list, cmp.Or(cfg.Group, 16))
		}
		j.leaders = leaders
	}
	// The sets of each rank.
	own := make([][]controller.Set, n)
	for _, s := range sets {
		for _, r := range s.Ranks {
			own[r] = append(own[r], s)
		}
	}
	for r := range n {
		p := &process{j: j, rank: topo.Rank(r), host: &j.hosts[r/cfg.PerHost], wake: controller.Never}
		p.combiner = controller.NewCombiner(p.rank, j.leaders, sets, 0)
		m := controller.MemberConfig{Rank: p.rank, Sets: own[r], Leader: j.leaders.Upstream(p.rank),
			LivenessTimeout: cfg.Liveness, Combiner: p.combiner, Keeps: p.combiner != nil}
		p.member = controller.NewMember(m, 0)
		j.all = append(j.all, p)
	}
	for _, p := range j.all[1:] {
		up := j.all[j.leaders.Upstream(p.rank)]
		up.connected = append(up.connected, p)
		for q := p; ; q = up {
			q.behind++
			if up = j.all[j.leaders.Upstream(q.rank)]; up.rank == 0 {
				break
			}
		}
	}
	j.all[0].coord = controller.NewCoordinator(controller.CoordinatorConfig{
		Sets: sets, CacheCapacity: cfg.CacheCapacity, FusionThresholdBytes: 128 << 20,
		LivenessTimeout: cfg.Liveness, StallWarning: time.Minute, Leaders: j.leaders,
		Plan: func([]topo.Rank, *message.Response, int64, *message.Tuning) (message.Backend,
			message.Algorithm, error,
		) {
			return message.TCP, message.Ring, nil
		},
	}, 0)
}

// wakeAt makes a turn begin at the given time at the latest.
func (p *process) wakeAt(at time.Duration) {
	if at < p.wake {
		p.wake = at
		p.j.post(event{at: at, to: p, kind: wake})
	}
}

// spend adds CPU time to the current turn.
func (p *process) spend(d time.Duration, times int) {
	p.at += d * time.Duration(times)
}

// turn executes a turn of the loop, at the time j.now.
func (p *process) turn() {
	c := &p.j.cfg.Costs
	now := p.j.now
	p.at = now
	if now > p.busy {
		p.spend(c.Wake, 1) // it has parked after the last turn
	}
	p.spend(c.Turn, 1)
	var begun time.Duration
	if p.j.cfg.CPU != nil {
		begun = p.j.cfg.CPU()
	}
	p.member.Tick(now)
	if p.combiner != nil {
		p.combiner.Tick(now)
	}
	if p.coord != nil {
		p.coord.Tick(now)
	}
	for _, g := range p.finished {
		p.member.Finished(g)
	}
	p.finished = p.finished[:0]
	for _, q := range p.queued {
		p.spend(c.Submit, 1)
		if err := p.member.Submit(q.set, q.request); err != nil {
			p.j.fail("rank %d: %w", p.rank, err)
		}
	}
	p.queued = p.queued[:0]
	p.memberReady()
	inbox := p.inbox
	p.inbox = nil
	for _, e := range inbox {
		p.receive(e)
	}
	p.inbox = inbox[:0]
	p.member.Expire()
	if p.coord != nil {
		p.coord.Expire()
	}
	for again := true; again; {
		if p.coord != nil {
			p.coordinatorReady()
		}
		again = p.memberReady() && p.coord != nil
	}
	if p.combiner != nil {
		p.combinerReady()
	}
	p.load.Turns++
	if p.j.cfg.CPU != nil {
		p.load.Real += p.j.cfg.CPU() - begun
	}
	p.load.CPU += p.at - now
	p.busy = p.at
	if v := p.member.Verdict(); v != nil && !p.over {
		p.over = true
		p.j.verdicts++
		p.j.result.Verdict = max(p.j.result.Verdict, p.at-p.j.killed)
		p.j.result.Blamed = v.Ranks
		if p.j.killed == 0 {
			p.j.fail("rank %d: %w", p.rank, v)
		}
	}
	next := p.member.Next()
	if p.coord != nil {
		next = min(next, p.coord.Next())
	}
	if p.combiner != nil {
		next = min(next, p.combiner.Next())
	}
	if next != controller.Never {
		p.wakeAt(max(next, p.busy))
	}
}

// memberReady sends the frames of the member and starts its grants. It reports whether it has sent a frame.
func (p *process) memberReady() (sent bool) {
	if !p.member.HasOutput() {
		return false
	}
	r := p.member.Ready()
	for _, up := range r.Ups {
		frame, err := message.AppendUp(nil, up)
		if err != nil {
			p.j.fail("rank %d: %w", p.rank, err)
			return false
		}
		sent = true
		switch {
		case p.coord != nil:
			p.coordinatorStep(p.rank, frame)
		case p.combiner != nil:
			p.combine(p.rank, frame, count(up))
		default:
			p.send(p.j.leaders.Upstream(p.rank), frame, count(up))
		}
	}
	for _, g := range r.Grants {
		p.run(g)
	}
	p.member.Advance()
	return sent
}

// run starts an operation. It ends at all members when the last of them has received the grant and the time
// of the transfer has passed.
func (p *process) run(g *controller.Grant) {
	p.spend(p.j.cfg.Costs.Dispatch, 1)
	p.left -= len(g.Responses)
	p.j.lastGrant = max(p.j.lastGrant, p.at)
	if p.rank == 0 {
		p.j.grants++
	}
	if p.left == 0 {
		p.j.waiting--
	}
	key := operation{g.Set, g.Number}
	o := p.j.operations[key]
	if o == nil {
		o = new(running)
		p.j.operations[key] = o
	}
	o.members, o.grants = append(o.members, p), append(o.grants, g)
	if len(o.members) < p.j.cfg.Workload.members(g.Set, p.j.cfg.Ranks) {
		return
	}
	delete(p.j.operations, key)
	for i, m := range o.members {
		m.finished = append(m.finished, o.grants[i])
		m.wakeAt(p.at + p.j.cfg.Costs.Operation)
	}
}

// receive handles a frame or the end of a connection.
func (p *process) receive(e event) {
	c := &p.j.cfg.Costs
	led := p.combiner != nil && e.from != p.j.leaders.Upstream(p.rank)
	if e.frame == nil {
		const why = "its control connection ended"
		switch {
		case led:
			p.combiner.Lost(e.from, why)
		case p.coord != nil:
			p.coord.Lost(e.from, why)
		default:
			p.member.Lost(why)
		}
		return
	}
	p.load.FramesIn++
	p.load.BytesIn += int64(len(e.frame) + headerBytes)
	p.spend(c.Frame, 1)
	p.spend(c.KiB*time.Duration(len(e.frame))/1024, 1)
	switch {
	case led && message.IsCombined(e.frame):
		p.relay(e.from, e.frame)
	case led:
		p.combine(e.from, e.frame, e.has)
	case p.combiner != nil:
		p.distribute(e.frame)
	case p.coord != nil && message.IsCombined(e.frame):
		p.combinedStep(e.from, e.frame)
	case p.coord != nil:
		p.coordinatorStep(e.from, e.frame)
	default:
		p.memberStep(e.frame)
	}
}

// headerBytes is the length of the header of a frame on a control connection.
const headerBytes = 8

// combine passes a frame of a rank of this host to the combiner.
func (p *process) combine(from topo.Rank, frame []byte, has content) {
	c := &p.j.cfg.Costs
	p.spend(c.Forward, 1)
	p.spend(c.HeldVote, has.votes)
	p.spend(c.HeldAsk, has.asks)
	p.combiner.Up(from, frame)
}

// relay passes a frame of another leader to the combiner.
func (p *process) relay(from topo.Rank, frame []byte) {
	c := &p.j.cfg.Costs
	var err error
	if p.parts, err = message.DecodeCombined(frame, p.parts); err != nil {
		p.j.fail("leader %d: %w", from, err)
		return
	}
	for i := range p.parts {
		part := &p.parts[i]
		has := content{}
		if message.DecodeUp(part.Frame, &p.up) == nil {
			has = count(&p.up)
		}
		ranks := len(part.Ranks)
		if part.All {
			ranks = 1 // held as one
		}
		p.spend(c.Forward, 1)
		p.spend(c.HeldVote, has.votes*ranks)
		p.spend(c.HeldAsk, has.asks*ranks)
		p.combiner.Relay(from, part)
	}
}

// count returns what a frame has.
func count(u *message.Up) (has content) {
	for i := range u.Sets {
		for bit, ok := u.Sets[i].Hits.Next(0); ok; bit, ok = u.Sets[i].Hits.Next(bit + 1) {
			has.votes++
		}
		has.asks += len(u.Sets[i].Requests)
	}
	return has
}

// combinerReady sends the frames of the combiner.
func (p *process) combinerReady() {
	parts, quiet := p.combiner.Ready()
	if len(parts) > 0 {
		p.send(p.j.leaders.Upstream(p.rank), message.AppendCombined(nil, parts), content{})
	}
	p.combiner.Advance()
	if len(quiet) > 0 {
		p.sendDown(quiet, &message.Down{Type: message.DownHeartbeat})
	}
	if v := p.member.Verdict(); v != nil {
		if to := p.combiner.Fail(); len(to) > 0 {
			p.sendDown(to, &message.Down{Type: message.DownFail, Ranks: v.Ranks, Reason: v.Reason})
		}
	}
}

func (p *process) sendDown(to []topo.Rank, d *message.Down) {
	frame, err := message.AppendDown(nil, d)
	if err != nil {
		p.j.fail("rank %d: %w", p.rank, err)
	}
	p.pass(to, frame)
}

// pass sends a frame to ranks behind this rank, or to all of them if none are given. A leader gets it once
// for the ranks behind it.
func (p *process) pass(to []topo.Rank, frame []byte) {
	if len(to) == 0 || len(to) == p.j.cfg.Ranks {
		for _, q := range p.connected {
			if q.combiner != nil {
				p.send(q.rank, message.AppendAddressed(nil, nil, frame), content{})
			} else {
				p.send(q.rank, frame, content{})
			}
		}
		return
	}
	for i := 0; i < len(to); {
		first := i
		hop := p.j.leaders.Hop(p.rank, to[first])
		for i++; i < len(to) && p.j.leaders.Hop(p.rank, to[i]) == hop; i++ {
		}
		switch {
		case hop == p.rank:
		case p.j.all[hop].combiner != nil:
			b := make([]byte, 0, 16+4*(i-first)+len(frame))
			behind := to[first:i]
			if len(behind) == p.j.all[hop].behind {
				behind = nil
			}
			p.send(hop, message.AppendAddressed(b, behind, frame), content{})
		default:
			p.send(hop, frame, content{})
		}
	}
}

// distribute passes on a frame from rank 0.
func (p *process) distribute(frame []byte) {
	to, frame, err := message.DecodeAddressed(frame, nil)
	if err != nil {
		p.j.fail("leader %d: %w", p.rank, err)
		return
	}
	d := p.decode(frame)
	p.combiner.Down(to, d)
	p.pass(to, frame)
	if len(to) == 0 || slices.Contains(to, p.rank) {
		p.apply(d)
	}
}

// decode decodes a frame from rank 0, unless it is equal to the last one.
func (p *process) decode(frame []byte) *message.Down {
	last := &p.j.decoded
	if last.down == nil || !bytes.Equal(last.frame, frame) {
		last.frame, last.down = frame, new(message.Down)
		if err := message.DecodeDown(frame, last.down); err != nil {
			p.j.fail("rank %d: %w", p.rank, err)
		}
	}
	return last.down
}

func (p *process) memberStep(frame []byte) { p.apply(p.decode(frame)) }

// apply applies a frame from rank 0 to the member.
func (p *process) apply(d *message.Down) {
	c := &p.j.cfg.Costs
	for i := range d.Sets {
		for _, g := range d.Sets[i].Grants {
			p.spend(c.GrantBit, len(g.Bits))
			p.spend(c.GrantFull, len(g.Full))
		}
	}
	if err := p.member.Step(d); err != nil {
		p.j.fail("rank %d: %w", p.rank, err)
	}
}

// coordinatorStep applies a frame of a rank.
func (p *process) coordinatorStep(from topo.Rank, frame []byte) {
	if err := message.DecodeUp(frame, &p.up); err != nil {
		p.j.fail("rank %d: %w", from, err)
		return
	}
	p.coordinated(1, false)
	p.coord.Step(from, &p.up)
}

// coordinated spends the CPU time for a frame that stands for those of several ranks, or of all ranks behind
// a leader.
func (p *process) coordinated(ranks int, all bool) {
	c := &p.j.cfg.Costs
	has := count(&p.up)
	p.spend(c.Part, 1)
	p.spend(c.PartAsk, has.asks)
	p.spend(c.Vote, has.votes)
	if all {
		p.spend(c.AskAll, ranks*has.asks)
		return
	}
	if ranks > 1 && has.votes > 0 && has.asks == 0 {
		p.spend(c.Led, ranks)
		return
	}
	p.spend(c.Step, ranks)
	p.spend(c.Ask, ranks*has.asks)
}

// combinedStep applies a frame of a leader.
func (p *process) combinedStep(leader topo.Rank, frame []byte) {
	var err error
	if p.parts, err = message.DecodeCombined(frame, p.parts); err != nil {
		p.j.fail("leader %d: %w", leader, err)
		return
	}
	for i := range p.parts {
		part := &p.parts[i]
		if err := message.DecodeUp(part.Frame, &p.up); err != nil {
			p.j.fail("leader %d: %w", leader, err)
			return
		}
		ranks := len(part.Ranks)
		if part.All {
			ranks = p.j.all[leader].behind
		}
		p.coordinated(ranks, part.All)
		p.coord.Relay(leader, part, &p.up)
	}
}

// coordinatorReady sends the decisions of the coordinator, to this rank last.
func (p *process) coordinatorReady() {
	c := &p.j.cfg.Costs
	decided := 0
	for _, o := range p.coord.Ready() {
		decided += len(o.Down.Sets)
		frame, err := message.AppendDown(nil, o.Down)
		if err != nil {
			p.j.fail("rank 0: %w", err)
			return
		}
		for i := range o.Down.Sets {
			for _, g := range o.Down.Sets[i].Grants {
				p.spend(c.DecideBit, len(g.Bits))
				p.spend(c.DecideFull, len(g.Full))
			}
		}
		p.pass(o.To, frame)
		if slices.Contains(o.To, 0) {
			p.memberStep(frame)
		}
	}
	if decided > 1 {
		p.spend(c.Scan, decided*p.j.cfg.Ranks)
	}
	p.coord.Advance()
}

// send sends a frame. The time of the turn goes on, and the frame arrives after that.
func (p *process) send(to topo.Rank, frame []byte, has content) {
	j, c := p.j, &p.j.cfg.Costs
	numBytes := len(frame) + headerBytes
	p.load.FramesOut++
	p.load.BytesOut += int64(numBytes)
	p.spend(c.Frame, 1)
	p.spend(c.KiB*time.Duration(len(frame))/1024, 1)
	q := j.all[to]
	if q.dead {
		return
	}
	at := p.at
	if p.host != q.host {
		took := time.Duration(float64(numBytes) / c.BytesPerSecond * 1e9)
		p.host.out = max(p.host.out, at) + took
		q.host.in = max(q.host.in, p.host.out+j.latency(p, q)-took) + took
		at = q.host.in
	} else {
		at += j.latency(p, q)
	}
	j.post(event{at: at, to: q, kind: deliver, from: p.rank, frame: frame, has: has})
}

func (j *job) latency(p, q *process) time.Duration {
	if p.host == q.host {
		return j.cfg.Costs.Loopback
	}
	return j.cfg.Costs.Latency
}

func (j *job) fail(format string, args ...any) {
	if j.err == nil {
		j.err = fmt.Errorf("simulate: step %d, %v: "+format, append([]any{j.step, j.now}, args...)...)
	}
}

func (j *job) stuck() error {
	return fmt.Errorf("simulate: step %d, %v: no rank has anything to do, and %d of %d ranks have not finished",
		j.step, j.now, j.waiting, len(j.all))
}
