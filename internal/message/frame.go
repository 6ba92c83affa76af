package message

import (
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// Probe measures the clock of a rank against the clock of rank 0. The rank sends the probe to rank 0. Rank 0
// sets all fields except Sent, and sends the probe back. All times are in nanoseconds since the start of the
// engine of the rank whose clock was read.
type Probe struct {
	// Sent is the time at which the rank sent the probe, by its own clock.
	Sent uint64
	// Received and Replied are the times at which rank 0 received the probe and sent it back, by the clock of
	// rank 0. They are 0 in the probe to rank 0.
	Received, Replied uint64
	// Monotonic is the reading of rank 0's clock at the start of rank 0's engine. Domain identifies that
	// clock. If a rank reads the same clock, it needs no measurement. Both fields are zero in the probe to
	// rank 0.
	Monotonic uint64
	Domain    string
}

// UpType is the type of an Up frame.
type UpType uint8

// These are the types of Up frames.
const (
	// UpNews has votes, requests, numbers of finished grants, and possibly the sender's shutdown.
	UpNews UpType = iota + 1
	// UpHeartbeat shows that the sender lives.
	UpHeartbeat
	// UpBye is the last frame of a rank. The rank has received Stop and has finished all its work.
	UpBye
	// UpSuspect reports that the data connection to a rank has failed, that one of several ranks has failed
	// and the sender cannot tell which, or that the sender itself fails.
	UpSuspect
	// UpTimeout reports that an operation has not finished within the timeout of its caller, or that the
	// context of the sender's Shutdown has ended before the sender has left.
	UpTimeout
	// UpReleased answers DownLeft. The sender has finished all operations that it executed together with
	// ranks that have left.
	UpReleased
	// UpLost reports that the control connection of a rank to its leader has ended. The leader sends it.
	UpLost
	// UpFault reports that a rank has broken the protocol on its control connection to its leader. The leader
	// sends it.
	UpFault
)

// Up is a frame from a rank to the coordinator.
type Up struct {
	Type UpType
	// Seen is the number of the last cycle that the sender had applied when it made the frame.
	Seen uint64
	// Shutdown says that the sender submits nothing after this frame. It is set at most once, in an UpNews.
	// With Shutdown, the fields Operations, Tensor, Millis and Reason explain the shutdown to other ranks.
	Shutdown bool
	// Channels are the channels for messages over which the sender sends a last frame, which says that no
	// more messages follow. Each has the rank at its other end. They are set only with Shutdown.
	Channels []Channel
	// Operations is the number of responses that the sender has finished. It is set only with Shutdown.
	Operations uint64
	// Sets has one element for each process set about which the sender has news.
	Sets []UpSet
	// Suspect is the rank at the other end of the connection in an UpLost and an UpFault, and the rank with
	// which the sender exchanges the message in an UpTimeout with Message. That is the sender itself if it
	// can be any rank.
	Suspect topo.Rank
	// Released are the ranks that have left in an UpReleased.
	Released []topo.Rank
	// Suspects are the suspected ranks in an UpSuspect, in ascending order. At least one of them has failed.
	Suspects []topo.Rank
	// Reason is why the sender suspects ranks (UpSuspect), what has happened to a connection (UpLost and
	// UpFault), or why the sender shuts down (Shutdown). With Shutdown, Reason may be empty.
	Reason string
	// Tensor, Set and Millis are used in three cases. In an UpTimeout, they are the operation, its process
	// set and the time limit of the operation. If Tensor is empty, Millis is how long the sender's Shutdown
	// has waited until its deadline, or 0 if it was canceled. In an UpHeartbeat, they are the oldest grant
	// that the sender has not finished, its process set and its age. They are zero if there is no such grant.
	// With Shutdown, Tensor is the last operation that the sender has finished, such as `allreduce "g"`, and
	// Millis is the time since its end. In an UpSuspect, Set alone is used: if a channel for messages has
	// failed, it is the process set of the channel, otherwise the global set.
	Tensor string
	Set    topo.ProcessSetID
	Millis uint32
	// Granted is used in an UpTimeout. It says that the sender has received the grant of the operation but
	// has not finished the operation.
	Granted bool
	// Message is used in an UpTimeout. It says that the operation is a message, which the coordinator does
	// not know.
	Message bool
}

// Channel is a channel for messages of a process set between the rank Rank and another one.
type Channel struct {
	Set  topo.ProcessSetID
	Rank topo.Rank
}

// UpSet is a rank's news about one process set.
type UpSet struct {
	Set topo.ProcessSetID
	// Hits are new votes. If bit b is set, it is a vote for the entry that cache bit b had at cycle Seen.
	Hits Bits
	// Invalid are the cache bits of tensors that the sender now submits with other parameters. Requests has
	// the new requests in full.
	Invalid Bits
	// Requests are new requests, which are sent in full.
	Requests []Request
	// Done is the number of grants that this rank has finished since its last frame. Only the lowest rank of
	// the set sends it.
	Done uint32
}

// At returns the news about a set in u. If there is none, At adds an empty UpSet. It reuses the memory of an
// earlier UpSet if possible.
func (u *Up) At(set topo.ProcessSetID) *UpSet {
	for i := range u.Sets {
		if u.Sets[i].Set == set {
			return &u.Sets[i]
		}
	}
	s := grow(&u.Sets)
	s.Set, s.Done = set, 0
	s.Hits.Reset()
	s.Invalid.Reset()
	s.Requests = s.Requests[:0]
	return s
}

// Reset makes u empty. It keeps the memory of u.
func (u *Up) Reset() {
	*u = Up{Sets: u.Sets[:0], Channels: u.Channels[:0]}
}

// DownType is the type of a Down frame.
type DownType uint8

// These are the types of Down frames.
const (
	// DownCycle has the decisions of one cycle.
	DownCycle DownType = iota + 1
	// DownHeartbeat shows that the coordinator lives.
	DownHeartbeat
	// DownFail is the verdict: the epoch is over because the ranks in Down.Ranks have failed.
	DownFail
	// DownClose tells the recipient, which has sent UpBye, that no rank needs it anymore and that it may
	// close its connections.
	DownClose
	// DownLeft says that the ranks in Down.Ranks have left the job in an orderly way. When a
	// recipient needs some of these ranks no more, it names them in an UpReleased.
	DownLeft
)

// Down is a frame from the coordinator to ranks. The cycles form a log that every rank replays.
type Down struct {
	Type DownType
	// Cycle is the number of the cycle. A rank receives cycles with ascending numbers, possibly with gaps.
	Cycle uint64
	// Stop says that nothing more will be granted to the recipient.
	Stop bool
	// Brief says that leaders need not pass on when each of their ranks has made a vote or a request, if all
	// of them have made it. Only cycles have it.
	Brief bool
	// Tuning has the values that hold from the grants of this cycle on. It is nil if they do not change.
	Tuning *Tuning
	// Sets has the decisions about the recipient's process sets. It omits sets without decisions.
	Sets []DownSet
	// Ranks are the ranks that have failed (DownFail), have left (DownLeft), or have announced their shutdown
	// and not left for a while (DownHeartbeat). With Stop, they are the ranks whose shutdown is the reason
	// for the stop.
	Ranks []topo.Rank
	// Channels are the channels over which ranks in Ranks send a last frame to the recipient (DownLeft and
	// DownHeartbeat). Over all others they send nothing more.
	Channels []Channel
	// Reason is why the ranks in Ranks have failed, or why the recipient is stopped. It is empty if the
	// recipient has asked for the stop.
	Reason string
}

// Tuning has the settings that rank 0 may change during a job.
type Tuning struct {
	// FusionThresholdBytes is the maximum number of bytes of a fused response.
	FusionThresholdBytes int64
	// CycleTime is the minimum time between two cycles.
	CycleTime time.Duration
	// SegmentBytes is the size of the segments into which the backend tcp cuts the data of an operation. 0
	// stands for the backend's default.
	SegmentBytes int
	// CacheOff is set if nothing is put into the caches and their entries are erased.
	CacheOff bool
	// OneLevelAllreduce is set if no allreduce, reducescatter or broadcast runs on two levels, and
	// OneLevelAllgather if no allgather does.
	OneLevelAllreduce, OneLevelAllgather bool
	// Allreduce is the algorithm of the allreduces over the backend tcp that it can serve. NoAlgorithm leaves
	// the choice to the backend.
	Allreduce Algorithm
}

// OneLevel reports whether no operation of kind k runs on two levels. A nil Tuning changes nothing.
func (t *Tuning) OneLevel(k Kind) bool {
	if k == Allgather {
		return t != nil && t.OneLevelAllgather
	}
	return t != nil && t.OneLevelAllreduce
}

// AllreduceText returns the name of t.Allreduce, or "table" if the backend chooses the algorithm.
func (t *Tuning) AllreduceText() string {
	if t.Allreduce == NoAlgorithm {
		return "table"
	}
	return t.Allreduce.String()
}

// MaxSegmentBytes is the maximum of Tuning.SegmentBytes, because a rank allocates memory for segments.
const MaxSegmentBytes = 64 << 20

// DownSet has the decisions about one process set. The recipient applies the fields in the order of their
// declarations.
type DownSet struct {
	Set    topo.ProcessSetID
	Grants []Grant
	// Erase are the cache bits whose entries are erased.
	Erase []uint32
	// Puts assigns cache bits to responses in Grants. Each of these responses is put into the cache under its
	// bit.
	Puts []Put
}

// Grant is one fused response. Its tensors are first the cached tensors in Bits, and then the tensors in
// Full.
type Grant struct {
	Backend   Backend
	Algorithm Algorithm
	// Absent are the members that have joined without requesting these tensors, in ascending order. They
	// contribute neutral elements.
	Absent []topo.Rank
	// Bits are the cache bits of tensors whose responses are in the cache.
	Bits []uint32
	// Full has the responses of tensors that are not granted by a cache bit.
	Full []*Response
}

// Put assigns the cache bit Bit to the response Grants[Grant].Full[Tensor].
type Put struct {
	Grant, Tensor uint32
	Bit           uint32
}

// Reset makes d empty. It keeps the memory of d.
func (d *Down) Reset() {
	*d = Down{Sets: d.Sets[:0], Ranks: d.Ranks[:0], Channels: d.Channels[:0]}
}

// AddSet appends an empty DownSet for a process set. It reuses the memory of an earlier DownSet if possible.
func (d *Down) AddSet(set topo.ProcessSetID) *DownSet {
	s := grow(&d.Sets)
	s.Set = set
	s.Grants, s.Erase, s.Puts = s.Grants[:0], s.Erase[:0], s.Puts[:0]
	return s
}

// AddGrant appends an empty Grant. It reuses the memory of an earlier Grant if possible.
func (s *DownSet) AddGrant() *Grant {
	g := grow(&s.Grants)
	g.Backend, g.Algorithm = NoBackend, NoAlgorithm
	g.Absent, g.Bits = g.Absent[:0], g.Bits[:0]
	// Clear the references. Otherwise the unused part of the slice would keep responses in memory that no
	// cache holds anymore.
	clear(g.Full)
	g.Full = g.Full[:0]
	return g
}

// grow adds an element to *s and returns the element. If *s had capacity for it, the element has the value of
// an earlier use. Otherwise it is zero.
func grow[T any](s *[]T) *T {
	if len(*s) < cap(*s) {
		*s = (*s)[:len(*s)+1]
	} else {
		var zero T
		*s = append(*s, zero)
	}
	return &(*s)[len(*s)-1]
}
