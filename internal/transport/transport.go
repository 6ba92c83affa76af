// Package transport moves bytes between ranks.
//
// A Mesh gives a rank one Conn to each peer on each lane. Lanes share nothing: bytes on one lane never wait
// for bytes on another. The implementations are in package tcp (sockets), package shm (shared memory between
// the ranks of a host) and package mem (within a process, for tests). Package transporttest holds all of them
// to this contract.
package transport

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/topo"
)

// Lane numbers an independent set of channels between the ranks of one epoch.
type Lane uint32

// Control is the lane of the negotiation. Process set s executes on lane 1+s.
const Control Lane = 0

// DataLane returns the lane on which process set s executes.
func DataLane(s topo.ProcessSetID) Lane { return Lane(s) + 1 }

// ErrClosed is the error of a Mesh or Conn that this process closed.
var ErrClosed = errors.New("transport: closed")

// ErrReleased is the error of a lane that this rank released, and of its Conns.
var ErrReleased = errors.New("transport: lane was released")

// ErrControl is the error of releasing the Control lane, which lasts as long as the mesh.
var ErrControl = errors.New("transport: the control lane cannot be released: it lasts as long as the mesh")

// PeerError says that the channel to a peer failed. It is a suspicion and not a verdict: the coordinator
// decides which rank died.
type PeerError struct {
	Peer topo.Rank
	Lane Lane
	Err  error
}

func (e *PeerError) Error() string {
	return fmt.Sprintf("transport: connection to rank %d on lane %d failed: %v", e.Peer, e.Lane, e.Err)
}

func (e *PeerError) Unwrap() error { return e.Err }

// Mesh is one rank's end of the channels of an epoch. Its methods are safe for concurrent use.
//
// A call that fails for several reasons reports the strongest: ErrReleased before ErrClosed, that before the
// error of Abort, and that before the failure of a peer.
type Mesh interface {
	// Conn returns the channel to peer on lane. The lower of the two ranks makes it when it asks; the higher
	// waits until then. Both ends of a collective ask for the same channel, so they meet. Conn waits until
	// the peer is connected, ctx ends (the error wraps ctx.Err()), the transport gives the peer up
	// (*PeerError), the lane is aborted, or the mesh is closed. Later calls return the same Conn. A rank has
	// no channel to itself.
	Conn(ctx context.Context, lane Lane, peer topo.Rank) (Conn, error)

	// Abort makes every pending and future call on every Conn of the given lane, and Conn itself, fail with
	// err, without closing anything: peers see silence, not a reset. (If a rank closed its connections when
	// it gives up, its neighbours would blame it for the death of another.) Only the first Abort of a lane
	// counts. err must not be nil.
	Abort(lane Lane, err error)

	// Release gives up a lane that this rank will not use again: pending and future calls on its Conns, and
	// Conn itself, fail with ErrReleased. It does not wait. What was flushed still reaches the peers, then
	// their Reads fail as after a Close, so a peer that reads no more than was sent does not notice. What
	// peers send on the lane from then on, or had sent unread, is dropped. A channel that a peer opens
	// afterwards ends at once; one that this rank would have had to open does not come, so the peer's Conn
	// fails in the end. A connection and its goroutine may live on for a bounded time until the peer has
	// released the lane too.
	//
	// Release comes when all operations of the lane have flushed and returned. Otherwise what was sent but
	// not flushed may be lost, and nothing worse happens.
	//
	// Releasing a lane again, a lane that was never used, or any lane after Close does nothing. An aborted
	// lane may be released. The Control lane may not: it lasts as long as the mesh, and Release aborts it
	// with ErrControl.
	//
	// The mesh remembers released lanes as long as it lives, to refuse what comes late. This takes the memory
	// of a LaneSet, which is small if a rank also releases the lanes of process sets of which it was no
	// member.
	Release(lane Lane)

	// Close closes every Conn and waits for the goroutines of the mesh. Pending and future calls fail with
	// ErrClosed. What was sent but not flushed may be lost. Later calls wait for the first one and return
	// nil.
	Close() error

	Poller
}

// Poller lets one goroutine poll the Control lane: it calls TryRead of that lane's Conns in turn, instead of
// keeping a goroutine in Read for each peer. It is for a loop that answers in less time than it takes to wake
// a goroutine. While nothing comes the goroutine may park; the mesh then notifies it.
type Poller interface {
	// OnNotify sets the function that the mesh calls, from a goroutine of its own, when something has arrived
	// on the Control lane, or one of its Conns has failed, while the polling goroutine is parked. OnNotify is
	// called once, before the first Park. notify must not block. It may be called more often than necessary.
	// After OnNotify, a Send of this rank on the Control lane need not notify a parked peer: NotifyPeers
	// does.
	OnNotify(notify func())

	// NotifyPeers notifies those peers that are parked and have not read what they were sent since the last
	// NotifyPeers. A caller that goes on polling may give a peer some time to poll by itself, which costs
	// less than a notification on both sides. The caller is the polling goroutine.
	NotifyPeers()

	// Park says that the caller stops polling. If it returns false, something may be there already, and the
	// caller must poll again instead of sleeping. Before Park the caller has called TryRead of every Conn
	// until that gave 0 bytes, or Park may return false though nothing arrived. Polling again needs no call
	// of Unpark but is faster after it.
	Park() bool

	// Unpark says that the caller polls again, so that it need not be notified.
	Unpark()

	// EntersKernel reports whether polling costs system calls. If it does, a loop can yield its processor
	// after each round of polling, and is hardly slower for it.
	EntersKernel() bool
}

// Conn is a reliable, ordered, bidirectional stream of bytes to one peer. One goroutine may send while
// another receives; neither half is safe for concurrent use with itself, Sent excepted.
//
// After an error the half that failed stays failed: the position in the stream is lost.
type Conn interface {
	// Read receives at least one byte into p and at most len(p), as io.Reader. When the peer closed or died
	// the error is a *PeerError, never io.EOF, and comes after the bytes that had arrived.
	Read(p []byte) (int, error)

	// TryRead is Read, but returns 0 and no error if Read would wait. In that case it allocates nothing.
	TryRead(p []byte) (int, error)

	// Send queues p behind what was sent before and returns without waiting for the peer. p must not change
	// until Sent has passed its last byte or Flush has returned. Sending never blocks on the receiver, so
	// ranks that all send before they receive make progress. A dead peer may be noticed only by a later Send.
	Send(p []byte) error

	// Sent returns the number of bytes since the connection was made that have left the senders' buffers,
	// which may be reused. The peer need not have received them. Sent is safe for concurrent use.
	Sent() uint64

	// Flush waits until everything sent has left the senders' buffers. When it returns, with an error too,
	// the Conn holds no buffer any more. How long it takes may depend on the peer: some transports take bytes
	// only as the peer reads them.
	Flush() error
}
