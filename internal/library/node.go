package library

import (
	"context"
	"errors"
	"maps"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/ps/node"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/client"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ps"
)

// Node is a node of a parameter server.
type Node struct {
	member
	// With fewer requests in flight, each server has room for another one. It is 0 if that is not known.
	room int
	// beginning is full while an Exchange with inSlices calls exchange. Only the call that has filled it
	// increases the number and the size of such requests in flight.
	beginning       chan struct{}
	requests, bytes atomic.Int64
}

// Role returns the number of the node's role in the C API, which is that of the group with the same role.
func (n *Node) Role() int {
	groups := map[ps.Role]ps.NodeID{ps.Scheduler: ps.SchedulerGroup, ps.Server: ps.ServerGroup,
		ps.Worker: ps.WorkerGroup}
	return int(groups[n.role()])
}

// member is a node in this process or in a sidecar.
type member interface {
	role() ps.Role
	Rank() int
	NumWorkers() int
	NumServers() int
	// Serve makes the server of an app, with a built-in handler and its parameters.
	Serve(app int, dt tensor.DType, handler string, parameters []float64) error
	// exchange begins x. Unless it fails, wait waits until x is done.
	exchange(x *node.Exchange) (wait func() error, err error)
	clock() error
	barrier(group int) error
	finalize(barrier bool) error
	// fail leaves the job as a node that has failed. It also ends a finalize in progress.
	fail(reason string) error
}

// localNode is a node in this process.
type localNode struct{ *node.Node }

func (n localNode) role() ps.Role { return n.Role() }

func (n localNode) exchange(x *node.Exchange) (wait func() error, err error) {
	r, err := n.Begin(context.Background(), x)
	if err != nil {
		return nil, err
	}
	return func() error { return r.Wait(context.Background()) }, nil
}

func (n localNode) clock() error { return n.Clock(context.Background()) }

func (n localNode) barrier(group int) error {
	return n.Barrier(context.Background(), ps.NodeID(group))
}

func (n localNode) finalize(barrier bool) error {
	if !barrier {
		return n.Close()
	}
	return n.Finalize(context.Background())
}

func (n localNode) fail(reason string) error {
	n.Fail(reason)
	return nil
}

// remoteNode is the node of a sidecar.
type remoteNode struct {
	sidecar *client.Client
	at      client.Node
}

func (n *remoteNode) role() ps.Role { return ps.Role(n.at.Role) }

func (n *remoteNode) Rank() int { return n.at.Rank }

func (n *remoteNode) NumWorkers() int { return n.at.NumWorkers }

func (n *remoteNode) NumServers() int { return n.at.NumServers }

func (n *remoteNode) Serve(app int, dt tensor.DType, handler string, parameters []float64) error {
	return n.sidecar.Serve(context.Background(), app, dt, handler, parameters)
}

func (n *remoteNode) exchange(x *node.Exchange) (wait func() error, err error) {
	done := make(chan error, 1)
	if err := n.sidecar.Exchange((*client.Exchange)(x), func(err error) { done <- err }); err != nil {
		return nil, err
	}
	return func() error { return <-done }, nil
}

func (n *remoteNode) clock() error { return n.sidecar.Clock(context.Background()) }

func (n *remoteNode) barrier(group int) error {
	return n.sidecar.NodeBarrier(context.Background(), group)
}

func (n *remoteNode) finalize(barrier bool) error {
	return n.sidecar.Finalize(context.Background(), barrier)
}

func (n *remoteNode) fail(reason string) error {
	return n.sidecar.FailNode(context.Background(), reason)
}

// StartNode joins this process to a job of a parameter server as a node. If an earlier StartNode with the
// same settings has done that, for which a program may have stopped waiting, it does nothing.
func (l *Library) StartNode(settings map[string]string) Handle {
	return l.start(func(*Result) error {
		l.nodeChanging.Lock()
		defer l.nodeChanging.Unlock()
		if l.node.Load() != nil {
			if maps.Equal(settings, l.nodeSettings) {
				return nil
			}
			return &engine.UsageError{Op: "start", Err: errors.New("this process is a node already, with other settings")}
		}
		n, room, err := l.newNode(settings)
		if err == nil {
			l.nodeSettings = settings
			l.node.Store(&Node{member: n, room: room, beginning: make(chan struct{}, 1)})
		}
		return err
	})
}

// newNode starts a node in this process or in its sidecar. room is Node.room.
func (l *Library) newNode(settings map[string]string) (_ member, room int, err error) {
	c, err := l.sidecars.open("start", settings)
	if err != nil {
		return nil, 0, err
	}
	if c != nil {
		at, err := c.StartNode(context.Background(), config.Environ(), settings)
		return &remoteNode{c, at}, 0, err
	}
	options := rank.Options{Settings: settings}
	cfg, err := options.Read()
	if err != nil {
		return nil, 0, err
	}
	n, err := node.Join(context.Background(), settings, nil)
	return localNode{n}, cfg.PS.WaterMark, err
}

// Node returns the node of this process, or a usage error of the function op if there is none.
func (l *Library) Node(op string) (*Node, error) {
	n := l.node.Load()
	if n == nil {
		return nil, &engine.UsageError{Op: op, Err: errors.New("this process has started no node of a parameter server")}
	}
	return n, nil
}

// Exchange begins a push or a pull. It may have to wait until there is room for its messages. If inSlices is
// set, it waits only for a while. Then one request may go on waiting for room in its own goroutine, and for
// further ones Exchange returns ErrPending, without an effect.
func (l *Library) Exchange(x *node.Exchange, inSlices bool) (Handle, error) {
	n, err := l.Node("exchange")
	if err != nil {
		return 0, err
	}
	if !inSlices {
		wait, err := n.exchange(x)
		if err != nil {
			return 0, err
		}
		return l.start(func(*Result) error { return wait() }), nil
	}
	over := time.NewTimer(slice)
	defer over.Stop()
	select {
	case n.beginning <- struct{}{}:
	case <-over.C:
		return 0, ErrPending
	}
	size := int64(8*len(x.Keys) + len(x.Values))
	requests, bytes := n.requests.Add(1), n.bytes.Add(size)
	begin := func() (wait func() error, err error) {
		wait, err = n.exchange(x)
		<-n.beginning
		return wait, err
	}
	end := func(wait func() error, err error) error {
		if err == nil {
			err = wait()
		}
		n.requests.Add(-1)
		n.bytes.Add(-size)
		return err
	}
	// A goroutine for begin would take longer than the rest.
	if requests <= int64(n.room) && bytes <= roomBytes {
		wait, err := begin()
		if err != nil {
			return 0, end(wait, err)
		}
		return l.start(func(*Result) error { return end(wait, nil) }), nil
	}
	begun := make(chan error, 1)
	h := l.start(func(*Result) error {
		wait, err := begin()
		begun <- err
		return end(wait, err)
	})
	select {
	case err = <-begun:
	case <-over.C:
	}
	if err != nil {
		return 0, errors.Join(err, l.Release(h))
	}
	return h, nil
}

// roomBytes is the size of the requests in flight for which each server has room. The queue to one takes
// twice as much, headers included.
const roomBytes = 128 << 20

// slice is the time for which Exchange waits for room.
const slice = 50 * time.Millisecond

// Clock ends an iteration of this worker.
func (l *Library) Clock() Handle {
	return l.startNode("clock", func(n *Node) error { return n.clock() })
}

// Barrier waits for all nodes of a group.
func (l *Library) Barrier(group int) Handle {
	return l.startNode("barrier", func(n *Node) error { return n.barrier(group) })
}

// Finalize leaves the job of the parameter server. With barrier, it waits for the other nodes before that.
func (l *Library) Finalize(barrier bool) Handle {
	return l.startNode("finalize", func(n *Node) error {
		l.nodeChanging.Lock()
		defer l.nodeChanging.Unlock()
		err := n.finalize(barrier)
		l.node.CompareAndSwap(n, nil)
		return err
	})
}

// FailNode leaves the job of the parameter server because the program has failed.
func (l *Library) FailNode(reason string) Handle {
	return l.startNode("fail", func(n *Node) error {
		err := n.fail(reason)
		l.node.CompareAndSwap(n, nil)
		return err
	})
}

// startNode starts f with the node of this process.
func (l *Library) startNode(op string, f func(*Node) error) Handle {
	return l.start(func(*Result) error {
		n, err := l.Node(op)
		if err != nil {
			return err
		}
		return f(n)
	})
}
