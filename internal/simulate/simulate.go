// Package simulate runs the negotiation of a job with up to 16,384 ranks and more in one goroutine, over a
// virtual clock and a virtual network.
//
// The state machines and the encoding of frames are those of real ranks: controller.Member,
// controller.Coordinator with its response cache, controller.Combiner, and package message. Every rank is
// simulated by a state machine of its own; none stands for others. A frame that several ranks receive is
// decoded once, because they only read the result. Package simulate has what is around the state machines in
// a rank: turns of the loop, connections, and the program that submits tensors. The time of everything is
// computed from a table of measured costs (Costs). The same Config gives the same frames at the same times.
//
// The join of the ranks (Join) is a model of the messages of internal/rendezvous with their real encoding,
// because the real one consists of goroutines and sockets.
package simulate

import (
	"container/heap"
	"encoding/binary"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Policy says how the frames of the ranks of a host reach rank 0.
type Policy string

// These are the policies.
const (
	Star    Policy = "star"    // every rank has a connection to rank 0
	Leaders Policy = "leaders" // the leader of each host has a connection to rank 0
	Levels  Policy = "levels"  // the leaders of hosts have leaders, as in real jobs with more than 64 other hosts
)

// Config describes a simulated job.
type Config struct {
	Ranks, PerHost int
	Policy         Policy
	Group          int // with Levels, the greatest size of a group of leaders; 0 means 16, as in real jobs
	Workload       *Workload
	Steps          int           // number of training steps; in the first one nothing is cached
	Bursts         int           // number of parts in which a rank submits the tensors of a step
	Backward       time.Duration // time from the first to the last part
	Jitter         float64       // greatest relative deviation of a rank's Backward
	CacheCapacity  int
	Seed           uint64
	Costs          Costs
	// Cores is the number of cores that all ranks share: a rank that has something to do waits until a core
	// is free. The rank that was woken last gets the next free core, and in a step rank 0 is woken last. This
	// rule is not what the kernel does; it gives rank 0 more turns than most jobs of real processes have
	// (docs/scale.md). If Cores is 0, every rank has a core to itself.
	Cores int
	// CPU, if not nil, reads a clock of CPU time, which measures what the state machines use (Load.Real).
	CPU func() time.Duration

	Straggler int           // this rank is later than the others by Late in every step, if Late is not 0
	Late      time.Duration // the delay of Straggler
	Fault     Fault
	Liveness  time.Duration // HVD_LIVENESS_SECONDS; 0 means 10 s
}

// Fault ends processes before the last step.
type Fault struct {
	// Rank is killed: its connections end. If Host is set, all ranks of its host vanish, and no connection
	// ends.
	Rank int
	Host bool
}

// Load is what the loop of a rank has done: frames, bytes and CPU time.
type Load struct {
	FramesIn, FramesOut, BytesIn, BytesOut int64
	CPU                                    time.Duration
	Turns                                  int64
	// Real is the CPU time that the state machines have used in the simulation (Config.CPU).
	Real time.Duration
}

func (l *Load) sub(o Load) Load {
	return Load{l.FramesIn - o.FramesIn, l.FramesOut - o.FramesOut, l.BytesIn - o.BytesIn,
		l.BytesOut - o.BytesOut, l.CPU - o.CPU, l.Turns - o.Turns, l.Real - o.Real}
}

func (l *Load) add(o Load) {
	*l = Load{l.FramesIn + o.FramesIn, l.FramesOut + o.FramesOut, l.BytesIn + o.BytesIn,
		l.BytesOut + o.BytesOut, l.CPU + o.CPU, l.Turns + o.Turns, l.Real + o.Real}
}

// Step is the result of one step.
type Step struct {
	// Latency is the time from the last rank's last submission to the last grant of the step at the last
	// rank.
	Latency                      time.Duration
	Root, Leader, Member         Load // of rank 0; mean of the leaders; mean of the other ranks
	Grants, Connections, Leaders int  // grants at rank 0; connections of rank 0; number of leaders
}

// Result is the result of a simulated job.
type Result struct {
	Steps []Step
	// Verdict is the time from the fault to the verdict at the last living rank, and Blamed has the ranks
	// that it names.
	Verdict time.Duration
	Blamed  []topo.Rank
	// Digest is a hash of the frames of all connections and their times.
	Digest uint64
}

// job is a running simulation.
type job struct {
	cfg     Config
	rng     *rand.Rand
	now     time.Duration
	queue   queue
	seq     uint64
	free    int        // number of cores on which no rank runs
	ready   []*process // ranks that wait for a core; the one that was woken last runs first
	all     []*process
	hosts   []host
	leaders topo.Leaders
	digest  hash.Hash64
	err     error

	step      int
	waiting   int // ranks that have not finished the step
	lastAsk   time.Duration
	lastGrant time.Duration
	loads     []Load // at the start of the step
	grants    int
	result    Result
	killed    time.Duration
	verdicts  int
	living    int // the number of ranks that the fault has not killed

	// decoded is the last frame from rank 0 that was decoded.
	decoded struct {
		frame []byte
		down  *message.Down
	}
	operations map[operation]*running
}

// host has the resources that its ranks share.
type host struct {
	out, in  time.Duration // the time at which the network card is free
	vanished bool
}

// operation identifies a grant, and running has the members that have received it.
type operation struct {
	set    topo.ProcessSetID
	number uint64
}

type running struct {
	members []*process
	grants  []*controller.Grant
}

// event wakes a process, or delivers a frame or the end of a connection to it.
type event struct {
	at   time.Duration
	seq  uint64
	to   *process
	kind eventKind
	from topo.Rank
	// frame is the delivered frame, or nil if the connection has ended.
	frame []byte
	has   content
}

type eventKind uint8

const (
	wake eventKind = iota
	deliver
	submit
	release // the rank has run on a core until now
)

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = event{}
	*q = (*q)[:last]
	return e
}

func (j *job) post(e event) {
	j.seq++
	e.seq = j.seq
	heap.Push(&j.queue, e)
}

// Run simulates a job. It returns an error if a rank breaks the protocol, or if the job does not end.
func Run(cfg Config) (*Result, error) {
	j, err := run(cfg)
	if err != nil {
		return nil, err
	}
	return &j.result, nil
}

func run(cfg Config) (*job, error) {
	if cfg.Liveness == 0 {
		cfg.Liveness = 10 * time.Second
	}
	j := &job{cfg: cfg, free: cfg.Cores, rng: rand.New(rand.NewPCG(cfg.Seed, 0)), digest: fnv.New64a(),
		operations: make(map[operation]*running)}
	j.build()
	for j.step = range cfg.Steps {
		last := j.step == cfg.Steps-1
		j.begin()
		if last && cfg.Fault != (Fault{}) {
			j.kill()
		}
		for j.err == nil && !j.stepEnded() {
			if len(j.queue) == 0 {
				return nil, j.stuck()
			}
			j.handle(heap.Pop(&j.queue).(event))
		}
		if j.err != nil {
			return nil, j.err
		}
		if j.killed == 0 {
			j.record()
		}
	}
	j.result.Digest = j.digest.Sum64()
	return j, nil
}

// begin schedules the submissions of a step.
func (j *job) begin() {
	j.waiting, j.grants = len(j.all), 0
	j.loads = j.loads[:0]
	for _, p := range j.all {
		j.loads = append(j.loads, p.load)
	}
	for i := range j.all {
		p := j.all[i]
		if j.cfg.Cores > 0 {
			p = j.all[len(j.all)-1-i] // rank 0 is woken last (Config.Cores)
		}
		p.left, p.burst = len(j.cfg.Workload.of(p.rank)), 0
		late := time.Duration(float64(j.cfg.Backward) * j.cfg.Jitter * j.rng.Float64())
		if j.cfg.Late > 0 && int(p.rank) == j.cfg.Straggler {
			late += j.cfg.Late
		}
		for b := range max(j.cfg.Bursts, 1) {
			at := j.now + late
			if j.cfg.Bursts > 1 {
				at += time.Duration(b) * (j.cfg.Backward + late) / time.Duration(j.cfg.Bursts-1)
			}
			j.lastAsk = max(j.lastAsk, at)
			j.post(event{at: at, to: p, kind: submit})
		}
	}
}

func (j *job) handle(e event) {
	j.now = e.at
	p := e.to
	if e.kind == release {
		j.release(p)
		return
	}
	if p.dead {
		return
	}
	switch e.kind {
	case deliver:
		p.inbox = append(p.inbox, e)
		j.trace(e)
	case submit:
		p.queued = append(p.queued, j.cfg.Workload.burst(p.rank, p.burst, max(j.cfg.Bursts, 1))...)
		p.burst++
	case wake:
		if p.wake != e.at {
			return // an earlier turn has made this one unnecessary
		}
		p.wake = controller.Never
	}
	switch {
	case j.cfg.Cores > 0:
		j.wait(p)
	case p.busy > j.now:
		p.wakeAt(p.busy)
	default:
		p.turn()
	}
}

// wait makes p run on a core, now or when one is free. If p runs on one, it finds what it has to do when its
// turn has ended.
func (j *job) wait(p *process) {
	switch {
	case p.runs:
		p.again = true
	case p.waits:
	case j.free > 0:
		j.free--
		j.run(p)
	default:
		p.waits = true
		j.ready = append(j.ready, p)
	}
}

// run executes a turn of p on a core.
func (j *job) run(p *process) {
	p.waits, p.runs, p.again = false, true, false
	if !p.dead {
		p.turn()
	}
	j.post(event{at: max(p.busy, j.now), to: p, kind: release})
}

// release ends the time of p on its core. If p has something to do, it goes on without parking. Otherwise the
// core is for the next rank.
func (j *job) release(p *process) {
	p.runs = false
	switch {
	case p.again:
		j.run(p)
	case len(j.ready) > 0:
		last := len(j.ready) - 1
		next := j.ready[last]
		j.ready = j.ready[:last]
		j.run(next)
	default:
		j.free++
	}
}

// trace adds a delivered frame to the digest.
func (j *job) trace(e event) {
	var b [24]byte
	binary.LittleEndian.PutUint64(b[:], uint64(e.at))
	binary.LittleEndian.PutUint64(b[8:], uint64(e.from))
	binary.LittleEndian.PutUint64(b[16:], uint64(e.to.rank))
	j.digest.Write(b[:])
	j.digest.Write(e.frame)
}

// stepEnded reports whether all ranks have finished the step or, after a fault, have a verdict.
func (j *job) stepEnded() bool {
	if j.killed == 0 {
		return j.waiting == 0
	}
	return j.verdicts == j.living
}

// record stores the result of a step.
func (j *job) record() {
	s := Step{Latency: j.lastGrant - j.lastAsk, Grants: j.grants}
	members := 0
	for i, p := range j.all {
		l := p.load.sub(j.loads[i])
		switch {
		case p.rank == 0:
			s.Root = l
		case p.combiner != nil:
			s.Leader.add(l)
			s.Leaders++
		default:
			s.Member.add(l)
			members++
		}
		if p.rank != 0 && j.leaders.Upstream(p.rank) == 0 {
			s.Connections++
		}
	}
	s.Leader.mean(s.Leaders)
	s.Member.mean(members)
	j.result.Steps = append(j.result.Steps, s)
}

func (l *Load) mean(n int) {
	if n > 0 {
		k := int64(n)
		*l = Load{l.FramesIn / k, l.FramesOut / k, l.BytesIn / k, l.BytesOut / k, l.CPU / time.Duration(n),
			l.Turns / k, l.Real / time.Duration(n)}
	}
}

// kill ends the processes of the fault.
func (j *job) kill() {
	j.killed, j.living = j.now, len(j.all)
	j.result.Verdict = 0
	f := j.all[j.cfg.Fault.Rank]
	for _, p := range j.all {
		if p == f || j.cfg.Fault.Host && p.host == f.host {
			p.dead = true
			j.waiting--
			j.living--
		}
	}
	if j.cfg.Fault.Host {
		f.host.vanished = true
		return
	}
	for _, p := range j.all {
		if !p.dead && (j.leaders.Upstream(p.rank) == f.rank || j.leaders.Upstream(f.rank) == p.rank) {
			j.post(event{at: j.now + j.latency(f, p), to: p, kind: deliver, from: f.rank})
		}
	}
}
