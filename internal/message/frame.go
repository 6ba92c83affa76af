package message

import (
	"github.com/gohvd/gohvd/internal/topo"
)

// Probe measures the clock of a rank against the clock of rank 0. A rank sends it to rank 0, which sends it
// back. Times are in nanoseconds since the engine of the rank that reads the clock has started.
type Probe struct {
	// Sent is the time at which the sender sent the probe, by its own clock.
	Sent uint64
	// Received and Replied are by the clock of rank 0. They are 0 on the way to rank 0.
	Received, Replied uint64
	// Monotonic is what rank 0's clock showed when its engine started, and Domain names that clock: a rank
	// that reads the same clock needs no measurement. They are 0 and empty on the way to rank 0.
	Monotonic uint64
	Domain    string
}

// UpType says what an Up frame is.
type UpType uint8

// The Up frames.
const (
	// UpNews carries votes, requests, finished grants and flags.
	UpNews UpType = iota + 1
	// UpHeartbeat shows that the rank lives.
	UpHeartbeat
	// UpBye is the last frame of a rank that has finished all its work after STOP.
	UpBye
	// UpSuspect reports that the data channel to a rank has failed.
	UpSuspect
	// UpTimeout says that an operation has not finished within the timeout of its caller.
	UpTimeout
	// UpReleased answers DownLeft: the sender has finished everything that it ran together with a rank that
	// has left.
	UpReleased
)

// Up is a frame from a rank to the coordinator.
type Up struct {
	Type UpType
	// Seen is the number of the last cycle that the sender had applied when it wrote the votes.
	Seen uint64
	// Shutdown says that the sender submits nothing after this frame. It belongs to UpNews and is sent once,
	// with what explains it to others: Operations, Tensor, Millis and Reason.
	Shutdown bool
	// Operations counts the responses that the sender has finished. It belongs to Shutdown.
	Operations uint64
	// Sets has the process sets with news, each at most once.
	Sets []UpSet
	// Suspect is the suspected rank of UpSuspect, or the rank of UpReleased that has left.
	Suspect topo.Rank
	// Reason belongs to UpSuspect and to Shutdown, where it may be empty.
	Reason string
	// Tensor, its Set and Millis belong to UpTimeout, where they are the operation and the time it had, and
	// to UpHeartbeat, where they are the oldest grant that the rank has not finished, if there is one, and
	// its age. With Shutdown, Tensor is the last operation, as `allreduce "g"`, and Millis how long ago it
	// ended.
	Tensor string
	Set    topo.ProcessSetID
	Millis uint32
	// Granted belongs to UpTimeout: the sender knows that the operation is granted, and has not finished it.
	Granted bool
}

// UpSet is a rank's news of one process set.
type UpSet struct {
	Set topo.ProcessSetID
	// Hits are new votes: bit b stands for a request equal to what b held at Seen.
	Hits Bits
	// Invalid are bits whose tensor the sender now submits with other parameters; the request follows in
	// full.
	Invalid Bits
	// Requests are new requests in full.
	Requests []Request
	// Done is the number of grants that this rank finished since its last frame. Only the set's lowest rank
	// reports it.
	Done uint32
}

// At returns the news of a set in u and adds it if necessary. It reuses the memory of earlier uses.
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

// Reset makes u empty and keeps its memory.
func (u *Up) Reset() {
	*u = Up{Sets: u.Sets[:0]}
}

// DownType says what a Down frame is.
type DownType uint8

// The Down frames.
const (
	// DownCycle carries the decisions of one cycle.
	DownCycle DownType = iota + 1
	// DownHeartbeat shows that the coordinator lives.
	DownHeartbeat
	// DownFail is the verdict: the epoch is over because Ranks failed.
	DownFail
	// DownClose lets the recipient, which has said bye, close its connections: no rank needs them any more.
	DownClose
	// DownLeft says that Ranks have left the job in order. UpReleased answers it.
	DownLeft
)

// Down is a frame from the coordinator to a rank. Cycles are a log that every rank replays.
type Down struct {
	Type DownType
	// Cycle is the number of the cycle. It rises, with gaps.
	Cycle uint64
	// Stop says that nothing more will be granted to the recipient.
	Stop bool
	// Sets has the process sets of the recipient about which something was decided.
	Sets []DownSet
	// Ranks are those that failed (DownFail), that have left (DownLeft), or whose shutdown stops the others
	// (Stop).
	Ranks []topo.Rank
	// Reason says why, with DownFail, and with Stop unless the recipient has asked for it.
	Reason string
}

// DownSet is what was decided in one process set. It is applied in the order of its fields.
type DownSet struct {
	Set    topo.ProcessSetID
	Grants []Grant
	// Erase are cache bits that become free.
	Erase []uint32
	// Puts are responses of Grants that get a cache bit.
	Puts []Put
}

// Grant is one fused response: the tensors to run together, those in Bits first.
type Grant struct {
	Backend   Backend
	Algorithm Algorithm
	// Absent are the members, ascending, that have joined without asking for these tensors. They contribute
	// neutral elements.
	Absent []topo.Rank
	// Bits are tensors that the cache holds.
	Bits []uint32
	// Full are tensors that the cache does not hold.
	Full []*Response
}

// Put gives bit Bit to Grants[Grant].Full[Tensor].
type Put struct {
	Grant, Tensor uint32
	Bit           uint32
}

// Reset makes d empty and keeps its memory.
func (d *Down) Reset() {
	*d = Down{Sets: d.Sets[:0], Ranks: d.Ranks[:0]}
}

// AddSet appends an empty set, reusing the memory of earlier uses.
func (d *Down) AddSet(set topo.ProcessSetID) *DownSet {
	s := grow(&d.Sets)
	s.Set = set
	s.Grants, s.Erase, s.Puts = s.Grants[:0], s.Erase[:0], s.Puts[:0]
	return s
}

// AddGrant appends an empty grant, reusing the memory of earlier uses.
func (s *DownSet) AddGrant() *Grant {
	g := grow(&s.Grants)
	g.Backend, g.Algorithm = NoBackend, NoAlgorithm
	g.Absent, g.Bits = g.Absent[:0], g.Bits[:0]
	// Drop the references, because an unused element would keep responses alive that no cache holds any more.
	clear(g.Full)
	g.Full = g.Full[:0]
	return g
}

// grow lengthens *s by one and returns the new element, which keeps its old value if there was capacity.
func grow[T any](s *[]T) *T {
	if len(*s) < cap(*s) {
		*s = (*s)[:len(*s)+1]
	} else {
		var zero T
		*s = append(*s, zero)
	}
	return &(*s)[len(*s)-1]
}
