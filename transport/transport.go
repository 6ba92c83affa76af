// Package transport moves bytes between ranks.
//
// A Mesh gives a rank one Conn to each peer on each lane. Lanes share nothing: bytes on one lane never wait
// for bytes on another. The implementations are in transport/tcp (between hosts) and transport/mem (within a
// process, for tests); package transporttest holds both to this contract.
package transport

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/topo"
)

// Lane numbers an independent set of channels between the ranks of one epoch.
type Lane uint32

// Control is the lane of the negotiation. Process set s executes on lane 1+s.
const Control Lane = 0

// DataLane is the lane on which process set s executes.
func DataLane(s topo.ProcessSetID) Lane { return Lane(s) + 1 }

// ErrClosed is the error of a Mesh or Conn that this process closed.
var ErrClosed = errors.New("transport: closed")

// ErrReleased is the error of a lane that this rank released, and of its Conns.
var ErrReleased = errors.New("transport: lane was released")

// ErrControl is the error of a Control lane that was to be released.
var ErrControl = errors.New("transport: the control lane cannot be released: it lasts as long as the mesh")

// PeerError says that the channel to a peer failed. It is an accusation, not a verdict: the coordinator
// decides who died.
type PeerError struct {
	Peer topo.Rank
	Lane Lane
	Err  error
}

func (e *PeerError) Error() string {
	return fmt.Sprintf("transport: lane %d to rank %d: %v", e.Lane, e.Peer, e.Err)
}

func (e *PeerError) Unwrap() error { return e.Err }

// Mesh is one rank's end of the channels of an epoch. Its methods are safe for concurrent use.
//
// A call that fails for several reasons reports the strongest: ErrReleased before ErrClosed, that before the
// error of Abort, and that before the failure of a peer.
type Mesh interface {
	// Conn returns the channel to peer on lane. The lower of the two ranks makes it when it asks, the higher
	// waits until then; both ends of a collective ask for the same channel, so they meet. Conn waits until the
	// peer is connected, ctx ends (the error wraps ctx.Err()), the transport gives the peer up (*PeerError), or
	// the lane is aborted or the mesh closed. Later calls return the same Conn. There is no channel to oneself.
	Conn(ctx context.Context, lane Lane, peer topo.Rank) (Conn, error)

	// Abort fails every pending and future call on every Conn of the given lane with err, and Conn itself,
	// without closing anything: peers see silence, not a reset. (Were a rank to close its connections when it
	// gives up, its neighbours would blame it for the death of another.) The first Abort of a lane counts, later
	// ones do nothing. err must not be nil.
	Abort(lane Lane, err error)

	// Release lets go of a lane that this rank will not use again: pending and future calls on its Conns, and
	// Conn itself, fail with ErrReleased. It does not wait. What was flushed still reaches the peers, then their
	// Reads fail as after a Close, so a peer that reads no more than was sent does not notice. What peers send on
	// the lane from then on, or had sent unread, is dropped. A channel that a peer opens afterwards ends at once;
	// one that this rank would have had to open does not come, so the peer's Conn fails in the end. A connection
	// and its goroutine may live on until the peer has released the lane too, for a bounded time.
	//
	// Release comes when all operations of the lane have flushed and returned. If not, what was sent but not
	// flushed may be lost, and nothing worse happens.
	//
	// Releasing a lane again, one that was never used, or any after Close does nothing. An aborted lane may be
	// released. The Control lane may not: it lasts as long as the mesh, and Release aborts it with ErrControl.
	//
	// A released lane is remembered for as long as the mesh lives, to turn away what comes late. This takes the
	// room of a LaneSet, which is small if a rank releases also the lanes of process sets it was not a member of.
	Release(lane Lane)

	// Close closes every Conn and waits for the goroutines of the mesh. Pending and future calls fail with
	// ErrClosed. What was sent but not flushed may be lost. Later calls wait for the first and return nil.
	Close() error
}

// Conn is a reliable, ordered, bidirectional stream of bytes to one peer. One goroutine may send while
// another receives; neither half is safe for concurrent use with itself, Sent excepted.
//
// After an error the half that failed stays failed: the position in the stream is lost.
type Conn interface {
	// Read receives at least one byte into p and at most len(p), as io.Reader. When the peer closed or died
	// the error is a *PeerError, never io.EOF, and comes after the bytes that had arrived.
	Read(p []byte) (int, error)

	// Send queues p behind what was sent before and returns without waiting for the peer. p must not change
	// until Sent has passed its last byte or Flush has returned. Sending never blocks on the receiver, so ranks
	// that all send before they receive make progress. A dead peer may be noticed only by a later Send.
	Send(p []byte) error

	// Sent is the number of bytes since the connection was made that have left the senders' buffers, which
	// may be reused. The peer need not have received them. It is safe for concurrent use.
	Sent() uint64

	// Flush waits until everything sent has left the senders' buffers. When it returns, with an error too,
	// the Conn holds no buffer any more. How long it takes may depend on the peer: some transports take bytes
	// only as the peer reads them.
	Flush() error
}

// Poller is a Mesh whose Control lane can be looked at without a goroutine that waits for each peer: all Conns of that
// lane are Polled. It is for a loop that answers in less time than it takes to wake somebody.
//
// One goroutine looks. While it does, peers send and move on. Before it sleeps it calls Rest, and from then on a peer
// that sends rings: the mesh calls what OnBell was given.
type Poller interface {
	Mesh

	// OnBell sets what is called, by a goroutine of the mesh, when something has arrived on the Control lane, or one of
	// its Conns has failed, while the looking goroutine rests. It is called once, before the first Rest. ring must not
	// block. It may be called more often than necessary. From then on a Send of this rank on the Control lane does not ring
	// the peer's bell: Ring does.
	OnBell(ring func())

	// Ring rings the bells of those peers that rest and have not read what they were sent since the last Ring. Who goes on looking may
	// leave a peer some time to look by itself, which costs less than a bell on both sides. The caller is the goroutine that
	// looks.
	Ring()

	// Rest says that the caller no longer looks. If it returns false something is there already, and the caller must
	// not sleep. Looking again needs no call of Wake but is faster after it.
	Rest() bool

	// Wake says that the caller looks again, so that peers need not ring.
	Wake()
}

// Polled is a Conn that its reader can ask for bytes instead of waiting for them.
type Polled interface {
	Conn

	// TryRead is Read, but gives 0 and no error where that would wait. It allocates nothing and makes no system call
	// where nothing has arrived.
	TryRead(p []byte) (int, error)
}
