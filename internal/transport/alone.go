package transport

import (
	"context"
	"fmt"

	"github.com/gohvd/gohvd/internal/topo"
)

// Alone is the Mesh of a job with one rank. It has no peers.
type Alone struct{}

// Conn implements Mesh. It always fails, because there is no peer.
func (Alone) Conn(_ context.Context, lane Lane, peer topo.Rank) (Conn, error) {
	return nil, fmt.Errorf("transport: connect lane %d to rank %d: this job has only one rank", lane, peer)
}

// Abort implements Mesh.
func (Alone) Abort(Lane, error) {}

// Release implements Mesh.
func (Alone) Release(Lane) {}

// Close implements Mesh.
func (Alone) Close() error { return nil }

// OnNotify implements Poller.
func (Alone) OnNotify(func()) {}

// NotifyPeers implements Poller.
func (Alone) NotifyPeers() {}

// Park implements Poller. It always returns true, because nothing ever arrives.
func (Alone) Park() bool { return true }

// Unpark implements Poller.
func (Alone) Unpark() {}

// EntersKernel implements Poller.
func (Alone) EntersKernel() bool { return false }
