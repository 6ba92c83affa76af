// Package transport moves bytes between ranks.
//
// A Mesh gives a rank one Conn to each peer on each lane. Lanes are independent: bytes on one lane never wait
// for bytes on another lane. The implementations are in package tcp (sockets), package shm (shared memory
// between the ranks of a host) and package mem (within a process, for tests). The tests in package
// transporttest check that every implementation obeys this contract.
package transport

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/topo"
)

// Lane identifies one of several sets of channels between the ranks of an epoch. The sets are independent of
// each other.
type Lane uint32

// Control is the lane that carries the negotiation. Process set s executes its operations on the lanes 1+s,
// 2^31+s and 2^31+2^30+s, and its members send each other messages on lane 2^30+s.
const Control Lane = 0

// DataLane returns the lane on which process set s executes its operations.
func DataLane(s topo.ProcessSetID) Lane { return Lane(s) + 1 }

// OuterLane returns the lane on which process set s exchanges data between hosts when an operation runs on
// two levels. The inner level uses DataLane.
func OuterLane(s topo.ProcessSetID) Lane { return Lane(s) + 1<<31 }

// DeviceLane returns the lane on which process set s exchanges what a backend for CUDA devices needs to begin
// an operation.
func DeviceLane(s topo.ProcessSetID) Lane { return Lane(s) + 1<<31 + 1<<30 }

// MessageLane returns the lane of the messages between single members of process set s.
func MessageLane(s topo.ProcessSetID) Lane { return Lane(s) + 1<<30 }

// ErrClosed is returned by calls on a Mesh or Conn that this process has closed.
var ErrClosed = errors.New("transport: the mesh or connection is closed")

// ErrReleased is returned by calls for a lane that this rank has released, and by calls on the Conns of such
// a lane.
var ErrReleased = errors.New("transport: the lane was released")

// ErrControl reports that Release was called for the Control lane. The Control lane then fails with this
// error.
var ErrControl = errors.New("transport: the control lane cannot be released, because it lasts as long as the mesh")

// PeerError reports that the channel to a peer has failed. It does not mean that the peer itself has failed.
// Only the coordinator decides which rank failed.
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
// If a call may fail for several reasons, it reports the first of these that applies: ErrReleased, ErrClosed,
// the error that was passed to Abort, the failure of a peer.
type Mesh interface {
	// Conn returns the channel to the given peer on the lane. The lower of the two ranks makes the channel
	// when it calls Conn, and the higher rank waits until then. This works because both ranks of an operation
	// call Conn for the channel between them. Conn also waits until the peer is connected. It fails if ctx
	// ends (the error wraps ctx.Err()), if the transport gives up the peer (*PeerError), if the lane is
	// aborted, or if the mesh is closed. Later calls return the same Conn. There is no channel from a rank to
	// itself.
	Conn(ctx context.Context, lane Lane, peer topo.Rank) (Conn, error)

	// Abort makes every pending and future call on every Conn of the lane, and every call of Mesh.Conn for
	// the lane, fail with err. It does not close the connections, so the peers only stop receiving data. If a
	// rank closed its connections when it gives up, its neighbours would conclude that this rank has died.
	// Only the first Abort of a lane has an effect. err must not be nil.
	Abort(lane Lane, err error)

	// Release gives up a lane that this rank will not use again. Pending and future calls on the lane's
	// Conns, and calls of Mesh.Conn for the lane, fail with ErrReleased. Release does not wait.
	//
	// Bytes that were flushed still reach the peers. After these bytes, the peers' Reads fail as after a
	// Close. So a peer that reads no more than was sent does not notice the release. Data from peers is
	// dropped if this rank has not read it before the release. If a peer opens a channel afterwards, the
	// channel ends at once. This rank opens no more channels on the lane, so a peer that waits for one in
	// Conn eventually gets an error. A connection and its goroutine may live on for a limited time until the
	// peer has released the lane too.
	//
	// Release should be called when all operations of the lane have flushed and returned. If it is called
	// earlier, data that was sent but not flushed may be lost. Nothing else goes wrong.
	//
	// Release has no effect on a lane that was released before or on a closed mesh. A lane that was never
	// used or that was aborted may be released. The Control lane must not be released, because it lasts as
	// long as the mesh: Release aborts it with ErrControl.
	//
	// The mesh remembers released lanes as long as it lives, so that it can refuse late connections. It keeps
	// them in a LaneSet. To keep the LaneSet small, a rank must also release the lanes of process sets to
	// which it does not belong.
	Release(lane Lane)

	// Close closes every Conn and waits for the goroutines of the mesh. Pending and future calls fail with
	// ErrClosed. Bytes that were sent but not flushed may be lost. If Close is called again, it waits for the
	// first call and returns nil.
	Close() error

	Poller
}

// Poller is implemented by a mesh if one goroutine can poll all of its Control lane. The goroutine calls
// TryRead of each Conn of that lane in turn. So there need not be a goroutine for each peer that blocks in
// Read. This suits a loop that answers in less time than it takes to wake a goroutine. While nothing arrives,
// the polling goroutine may park, and the mesh then notifies it.
type Poller interface {
	// OnNotify sets the function notify. While the polling goroutine is parked, the mesh calls notify from a
	// goroutine of its own when something has arrived on the Control lane or one of its Conns has failed.
	// OnNotify is called once, before the first Park. notify must not block. The mesh may call it more often
	// than necessary. After OnNotify, a Send of this rank on the Control lane need not notify a parked peer,
	// because the caller must then call NotifyPeers.
	OnNotify(notify func())

	// NotifyPeers notifies each peer that is parked and has not read everything that was sent to it since the
	// last NotifyPeers. A caller that goes on polling may delay the call. Peers may then find the bytes by
	// polling, which costs both sides less than a notification. Only the polling goroutine may call
	// NotifyPeers.
	NotifyPeers()

	// Park declares that the caller stops polling. If Park returns false, something may have arrived already,
	// and the caller must poll again instead of sleeping. Before Park, the caller must have called TryRead of
	// every Conn until it returned 0 bytes. Otherwise Park may return false although nothing new has arrived.
	// The caller may poll again without calling Unpark, but polling is faster after Unpark.
	Park() bool

	// Unpark declares that the caller polls again. The mesh then need not notify it.
	Unpark()

	// EntersKernel reports whether polling needs system calls. If it does, the polling loop may yield its
	// processor after each round, because this makes it hardly slower.
	EntersKernel() bool
}

// Conn is a reliable, ordered, bidirectional stream of bytes to one peer. One goroutine may send while
// another receives. But two goroutines must not send at the same time, and two must not receive at the same
// time. Sent may be called at any time.
//
// If sending or receiving has failed, it fails forever, because the position in the stream is lost.
type Conn interface {
	// Read receives at least one byte and at most len(p) bytes into p. If the peer has closed its end or
	// died, Read first returns the bytes that have arrived. After that it returns a *PeerError. Unlike an
	// io.Reader, it never returns io.EOF.
	Read(p []byte) (int, error)

	// TryRead is like Read, but does not wait. If it returns fewer than len(p) bytes, it has returned all
	// that had arrived. If nothing has arrived, it returns 0 and no error, and allocates nothing.
	TryRead(p []byte) (int, error)

	// Send queues p behind the bytes that were sent before, and returns without waiting for the peer. p must
	// not change until the count of Sent includes its last byte or Flush has returned. Send never waits for
	// the receiver, so ranks that all send before they receive make progress. If the peer has died, Send may
	// still return nil. A later Send then fails.
	Send(p []byte) error

	// TrySend is like Send, but may queue only the first bytes of p, and returns their number. The transport
	// queues only bytes that it can pass on at once, without another goroutine. It may return 0. In that case
	// it allocates nothing. A transport that cannot know queues all of p.
	TrySend(p []byte) (int, error)

	// Sent returns the number of bytes, counted since the connection was made, that have left the buffers
	// passed to Send. The caller may reuse the memory of these bytes. The peer may not have received them
	// yet. Sent is safe for concurrent use.
	Sent() uint64

	// Flush waits until all bytes that were sent have left the buffers passed to Send. When Flush has
	// returned, even with an error, the Conn does not refer to these buffers any more. How long Flush takes
	// may depend on the peer, because with some transports bytes leave the buffers only when the peer reads
	// them.
	Flush() error
}
