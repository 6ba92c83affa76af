// Package p2p sends messages between two ranks of a process set, without negotiation.
//
// A message goes from one rank to another and has a tag. The receiver matches it with the oldest receive that
// was posted for its tag, and for its sender or for any sender. Messages of one sender and one tag are
// matched in the order in which they were sent.
//
// A message of up to 64 KiB is sent at once, and its send is done. If the receiver has not posted a receive
// for it, the receiver keeps it. The messages that a peer keeps for this rank may have 1 MiB. Larger
// messages, and messages beyond this limit, wait at the sender: the sender offers the message, the receiver
// accepts it when a receive matches, and then the data goes into the memory of the receive. If the two ranks
// share memory and the message is in an arena, the receiver copies it from there (shared.go).
//
// All messages of a process set use one lane of a transport.Mesh. A rank opens the channel to a peer when it
// first sends to the peer or waits for a message of it. Each channel has a goroutine that reads and one that
// writes.
package p2p

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// AnySource is the Peer of a receive that takes messages of all ranks.
const AnySource topo.Rank = -1

// MaxTag is the largest tag of a message.
const MaxTag = 1<<31 - 1

const (
	// maxEagerBytes is the largest size of a message that is sent before the receiver has accepted it.
	maxEagerBytes = 64 << 10
	// maxKeptBytes limits the eager messages that were sent to a peer and have not been matched there. Each
	// counts with its size and headerBytes.
	maxKeptBytes = 1 << 20
	// maxOffers limits the messages that wait at the sender until a receive of the peer matches them.
	maxOffers = 1 << 20
	// maxUnmatched is how many messages of a peer can wait for receives: its offers, and messages that are
	// here. A peer that sends more has failed.
	maxUnmatched = maxOffers + maxKeptBytes/headerBytes
)

// Op is one message that this rank sends or receives. The caller must not change it before Done is called.
type Op struct {
	// Peer is the rank to which a message is sent, or the rank from which it is received. In a receive it may
	// be AnySource.
	Peer  topo.Rank
	Tag   uint32
	DType tensor.DType
	// Buf is the data to send, or the memory for the message, which must have exactly this size.
	Buf []byte
	// Timeout is the time limit of the operation. 0 means that there is none.
	Timeout time.Duration
	// Done is called once when the operation has ended. Buf is not used any more.
	Done func(err error)
	// Source is the sender of the message. It is valid when a receive has ended without an error.
	Source topo.Rank

	// The Exchange sets the fields below. They are valid when the operation has ended, and in calls of
	// Exchange.Each. Begun is when the operation began. Matched is when this rank learned that the other rank
	// has begun its operation, or when the message was sent without waiting for that. Number is the number of
	// the message among those that its sender has sent to its receiver in the process set, counted from 1.
	// Matched and Number are zero while they are not known.
	Begun, Matched time.Time
	Number         uint64

	receive bool
	shared  bool      // whether the receiver copies the message from the memory of the sender
	stalls  time.Time // when OnStall is called next, or zero
	expires time.Time // when OnTimeout is called next, or zero
}

// Name returns the name of the messages from one rank to another with the given tag, such as "rank 2 to rank
// 0, tag 7". Both ranks use it in their records and errors. from may be AnySource.
func Name(from, to topo.Rank, tag uint32) string {
	if from == AnySource {
		return fmt.Sprintf("any rank to rank %d, tag %d", to, tag)
	}
	return fmt.Sprintf("rank %d to rank %d, tag %d", from, to, tag)
}

// Receives reports whether the operation is a receive.
func (o *Op) Receives() bool { return o.receive }

// Other returns the other rank of the operation. It is AnySource if a receive does not know its sender yet.
func (o *Op) Other() topo.Rank {
	if o.receive && !o.Matched.IsZero() {
		return o.Source
	}
	return o.Peer
}

// Shared reports whether the receiver has copied the message from the memory of the sender. It is valid when
// the operation has ended.
func (o *Op) Shared() bool { return o.shared }

// String returns a text such as "recv from rank 2, tag 7".
func (o *Op) String() string {
	switch {
	case o.receive && o.Peer == AnySource:
		return fmt.Sprintf("recv from any rank, tag %d", o.Tag)
	case o.receive:
		return fmt.Sprintf("recv from rank %d, tag %d", o.Peer, o.Tag)
	}
	return fmt.Sprintf("send to rank %d, tag %d", o.Peer, o.Tag)
}

// SizeError is the error of a receive that has matched a message with another type or size. The message is
// dropped. The sender does not get an error.
type SizeError struct {
	// Source is the rank that has sent the message.
	Source topo.Rank
	// Got is the type and size of the message, and Want that of the receive.
	Got, Want string
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("got %s from rank %d, want %s", e.Got, e.Source, e.Want)
}

// LeftError is the error of an operation that waits for ranks that have shut down.
type LeftError struct{ Ranks []topo.Rank }

func (e *LeftError) Error() string { return topo.FormatRanks(e.Ranks) + " shut down" }

// Config configures an Exchange.
type Config struct {
	Mesh  transport.Mesh
	Lane  transport.Lane
	Ranks []topo.Rank
	Me    int // the position of this rank in Ranks
	// Memory is the memory that this rank shares with other ranks. It may be nil. Groups has, for each rank
	// of the job, the lowest rank with which it shares memory.
	Memory transport.Memory
	Groups []topo.Rank
	// Failed is called when the channel to a peer has failed. Operations that wait for the peer go on until
	// the Exchange is closed.
	Failed func(error)
	// Silent is called when Receives begins to return false for a rank.
	Silent func()
	// StallWarning is how long an operation waits before OnStall is called, and again after each further
	// period. 0 means never.
	StallWarning time.Duration
	OnStall      func(o *Op, waited time.Duration)
	// OnTimeout is called when an operation has not ended within its time limit, and again every second. The
	// operation goes on until the Exchange is closed.
	OnTimeout func(o *Op)
}

// Exchange sends and receives the messages of one rank in one process set. Its methods are safe for
// concurrent use.
type Exchange struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // the goroutines of the channels and of check

	mu       sync.Mutex
	peers    []*peer     // by position in the set
	posted   []*Op       // receives without a message, in the order of their calls
	arrivals uint64      // number of messages that have arrived
	err      error       // why no operation can begin any more, or nil
	timer    *time.Timer // calls check at due; nil if no operation has needed it yet
	due      time.Time   // when the next operation stalls or expires, or zero
	closed   bool
	revoked  *uint32 // the word of this rank that peers check after they have copied messages (shared.go)
}

// New makes an Exchange. It opens no channels and starts no goroutines before the first operation.
func New(cfg Config) *Exchange {
	x := &Exchange{cfg: cfg}
	x.ctx, x.cancel = context.WithCancel(context.Background())
	for i, r := range cfg.Ranks {
		p := &peer{x: x, rank: r, self: i == cfg.Me, near: cfg.Memory != nil && i != cfg.Me &&
			cfg.Groups[r] == cfg.Groups[cfg.Ranks[cfg.Me]]}
		p.wake.L = &x.mu
		x.peers = append(x.peers, p)
	}
	return x
}

// Send begins to send o. An error means that nothing was begun and Done is never called.
func (x *Exchange) Send(o *Op) error {
	x.mu.Lock()
	p, err := x.begin(o)
	if err == nil && p.departed() {
		err = &LeftError{[]topo.Rank{p.rank}}
	}
	if err != nil {
		x.mu.Unlock()
		return err
	}
	p.open()
	p.sent++
	o.Number = p.sent
	cost := len(o.Buf) + headerBytes
	if len(o.Buf) > maxEagerBytes || p.kept+cost > maxKeptBytes {
		err = p.offer(o)
		x.mu.Unlock()
		return err
	}
	p.kept += cost
	o.Matched = o.Begun
	h := header{kind: eager, tag: o.Tag, dt: o.DType, numBytes: uint64(len(o.Buf)), id: o.Number}
	p.write(outgoing{frame: append(h.append(make([]byte, 0, cost)), o.Buf...)})
	x.mu.Unlock()
	o.Done(nil)
	return nil
}

// Receive begins to receive a message into o. An error means that nothing was begun and Done is never called.
func (x *Exchange) Receive(o *Op) error {
	o.receive = true
	x.mu.Lock()
	p, err := x.begin(o)
	if err != nil {
		x.mu.Unlock()
		return err
	}
	for _, q := range x.peers {
		if p == nil || p == q {
			q.open()
		}
	}
	done, found := x.match(o)
	if !found {
		if err = x.unreachable(o); err == nil {
			x.posted = append(x.posted, o)
		}
	}
	x.mu.Unlock()
	if done != nil {
		done()
	}
	return err
}

// begin checks o and returns its peer, which is nil for AnySource. The caller holds mu.
func (x *Exchange) begin(o *Op) (*peer, error) {
	if x.err != nil {
		return nil, x.err
	}
	o.begin(x.cfg.StallWarning)
	x.schedule(o)
	if o.Peer == AnySource && o.receive {
		return nil, nil
	}
	i := slices.Index(x.cfg.Ranks, o.Peer)
	switch {
	case i < 0:
		return nil, fmt.Errorf("got rank %d, want a rank of %v", o.Peer, x.cfg.Ranks)
	case i == x.cfg.Me:
		return nil, fmt.Errorf("got rank %d, which is this rank, want another rank", o.Peer)
	}
	return x.peers[i], nil
}

// match looks for a message for the receive o, the one that has arrived first. If the message is here, match
// returns a function that completes o, to be called without mu. If it was offered, match accepts it. The
// caller holds mu.
func (x *Exchange) match(o *Op) (done func(), found bool) {
	var from *peer
	var at int
	for _, p := range x.peers {
		if o.Peer != AnySource && o.Peer != p.rank {
			continue
		}
		i := slices.IndexFunc(p.unexpected, func(m message) bool { return m.tag == o.Tag })
		if i >= 0 && (from == nil || p.unexpected[i].arrival < from.unexpected[at].arrival) {
			from, at = p, i
		}
	}
	if from == nil {
		return nil, false
	}
	m := from.unexpected[at]
	from.unexpected = without(from.unexpected, at)
	if m.kind == eager {
		from.stored -= len(m.payload) + headerBytes
	}
	return from.take(o, m), true
}

// without removes the element at i from s. It does not move the others if it is the first one, so that a long
// queue is emptied in linear time.
func without[T any](s []T, i int) []T {
	if i > 0 || len(s) == 1 {
		return slices.Delete(s, i, i+1)
	}
	clear(s[:1])
	return s[1:]
}

// unreachable returns an error if no rank can send a message for the receive o any more, because all of its
// possible senders have shut down. The caller holds mu.
func (x *Exchange) unreachable(o *Op) error {
	var left []topo.Rank
	for _, p := range x.peers {
		switch {
		case p.self || o.Peer != AnySource && o.Peer != p.rank:
		case p.silent:
			left = append(left, p.rank)
		default:
			return nil
		}
	}
	return &LeftError{left}
}

// Left records that a rank has announced its shutdown. sends says whether Quitted at that rank returns this
// rank. Then the channel to it ends with a bye, and all messages before the bye are received, however late
// they arrive. Otherwise no message of the rank is on its way.
func (x *Exchange) Left(r topo.Rank, sends bool) {
	i := slices.Index(x.cfg.Ranks, r)
	if i < 0 {
		return
	}
	p := x.peers[i]
	x.mu.Lock()
	p.left = true
	p.wake.Broadcast() // flush does not wait for it any more
	broken := p.broken
	switch {
	case p.closed:
	case broken != nil: // the channel had failed before the rank announced its shutdown
		x.wg.Go(func() { p.fail(broken) })
	case sends && x.err == nil:
		p.open()
	}
	x.mu.Unlock()
	if !sends && broken == nil {
		p.silence()
	}
}

// Receives reports whether messages of a rank that has announced its shutdown may still arrive. After Quit
// it returns false.
func (x *Exchange) Receives(r topo.Rank) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	i := slices.Index(x.cfg.Ranks, r)
	return i >= 0 && x.peers[i].left && !x.peers[i].silent && x.err == nil
}

// Quitted returns the ranks to which this rank has sent frames and then, in Quit, a bye. It omits ranks
// whose channels were opened only to receive from AnySource.
func (x *Exchange) Quitted() (ranks []topo.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, p := range x.peers {
		if p.ended && p.wrote {
			ranks = append(ranks, p.rank)
		}
	}
	return ranks
}

// Quit says to all peers that this rank begins no more operations. Calls after it fail with err. Operations
// that have begun go on.
func (x *Exchange) Quit(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err != nil {
		return
	}
	x.err = err
	for _, p := range x.peers {
		if p.state != unopened {
			p.ended = true
			p.write(outgoing{frame: header{kind: bye}.append(nil), last: true})
		}
	}
}

// Close ends all operations with err and releases the channels. Messages that have not left this rank are
// lost, unless Quit and Flush were called before.
func (x *Exchange) Close(err error) {
	x.mu.Lock()
	x.err, x.closed = err, true
	if x.timer != nil {
		x.timer.Stop()
	}
	x.revoke()
	ops := x.pending()
	x.posted = nil
	for _, p := range x.peers {
		p.closed = true
		p.offers, p.accepted, p.expected, p.queue = nil, nil, nil, nil
		p.wake.Broadcast()
	}
	x.mu.Unlock()
	x.cancel()
	x.cfg.Mesh.Abort(x.cfg.Lane, err)
	x.wg.Wait() // no goroutine uses the memory of an operation any more
	for _, o := range ops {
		o.Done(err)
	}
}

// Flush waits until the last frames that Quit has queued are sent over the channels that are open, and until
// peers have copied the messages that they have accepted, or until ctx ends. It must be called after Quit. It
// does not wait for peers that have left.
func (x *Exchange) Flush(ctx context.Context) {
	x.mu.Lock()
	defer x.mu.Unlock()
	stop := context.AfterFunc(ctx, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		for _, p := range x.peers {
			p.wake.Broadcast()
		}
	})
	defer stop()
	for _, p := range x.peers {
		for p.unsent() && ctx.Err() == nil {
			p.wake.Wait()
		}
	}
}

// InFlight returns the number of operations in flight.
func (x *Exchange) InFlight() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	n := len(x.posted)
	for _, p := range x.peers {
		n += len(p.offers) + len(p.accepted) + len(p.expected)
	}
	return n
}

// Each calls f with each operation in flight. f must return soon, and must not call methods of x.
func (x *Exchange) Each(f func(o *Op)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, o := range x.pending() {
		f(o)
	}
}

// pending returns all operations in flight. The caller holds mu.
func (x *Exchange) pending() []*Op {
	ops := slices.Clone(x.posted)
	for _, p := range x.peers {
		for _, some := range []map[uint64]*Op{p.offers, p.accepted, p.expected} {
			for _, o := range some {
				ops = append(ops, o)
			}
		}
	}
	return ops
}

// repeatTimeout is the time between two reports of one expired operation.
const repeatTimeout = time.Second

// begin sets the times of o, which begins now.
func (o *Op) begin(stallWarning time.Duration) {
	o.Begun = time.Now()
	if stallWarning > 0 {
		o.stalls = o.Begun.Add(stallWarning)
	}
	if o.Timeout > 0 {
		o.expires = o.Begun.Add(o.Timeout)
	}
}

// schedule makes the timer fire when o stalls or expires. The caller holds mu.
func (x *Exchange) schedule(o *Op) {
	due := o.stalls
	if due.IsZero() || !o.expires.IsZero() && o.expires.Before(due) {
		due = o.expires
	}
	if due.IsZero() || !x.due.IsZero() && !due.Before(x.due) {
		return
	}
	x.due = due
	if x.timer == nil {
		x.timer = time.AfterFunc(time.Until(due), x.check)
	} else {
		x.timer.Reset(time.Until(due))
	}
}

// check reports the operations that have stalled or expired.
func (x *Exchange) check() {
	x.mu.Lock()
	if x.closed {
		x.mu.Unlock()
		return
	}
	x.wg.Add(1)
	defer x.wg.Done()
	x.due = time.Time{}
	now := time.Now()
	var stalled, expired []*Op
	for _, o := range x.pending() {
		if !o.stalls.IsZero() && !now.Before(o.stalls) {
			stalled = append(stalled, o)
			o.stalls = now.Add(x.cfg.StallWarning)
		}
		if !o.expires.IsZero() && !now.Before(o.expires) {
			expired = append(expired, o)
			o.expires = now.Add(repeatTimeout)
		}
		x.schedule(o)
	}
	x.mu.Unlock()
	for _, o := range stalled {
		x.cfg.OnStall(o, now.Sub(o.Begun))
	}
	for _, o := range expired {
		x.cfg.OnTimeout(o)
	}
}

// errProtocol is the error of a peer that has sent an invalid frame.
var errProtocol = errors.New("malformed message")
