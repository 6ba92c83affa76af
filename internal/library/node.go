package library

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

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
	// With fewer requests in flight, each server has room for another one. It is 0 with a sidecar, where that
	// is not known, so that goroutines begin all requests with inSlices.
	room int
	used atomic.Bool // a call has used it
	// taking has an element while a request that has room is begun, so that no other one takes the room.
	taking chan struct{}

	mu              sync.Mutex
	requests, bytes int64 // number and size of the requests in flight
	// beginning has the requests that goroutines begin, by the thread that has called Exchange. Each channel
	// is closed when its request has begun.
	beginning map[int]chan struct{}
}

// nodeOf returns a Node for m. room is Node.room.
func nodeOf(m member, room int) *Node {
	return &Node{member: m, room: room, taking: make(chan struct{}, 1),
		beginning: make(map[int]chan struct{})}
}

// waiting returns the requests that goroutines begin for a thread, or for all threads if thread is 0.
func (n *Node) waiting(thread int) []chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []chan struct{}
	for of, begun := range n.beginning {
		if thread == 0 || of == thread {
			all = append(all, begun)
		}
	}
	return all
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
// same settings has done that and no call has used the node, it does nothing, because the program has
// probably stopped waiting for the earlier one.
func (l *Library) StartNode(settings map[string]string) Handle {
	return l.start(func(*Result) error {
		l.nodeChanging.Lock()
		defer l.nodeChanging.Unlock()
		if n := l.node.Load(); n != nil {
			if maps.Equal(settings, l.nodeSettings) && !n.used.Load() {
				return nil
			}
			return &engine.UsageError{Op: "start", Err: errors.New("this process is a node already")}
		}
		n, room, err := l.newNode(settings)
		if err == nil {
			l.nodeSettings = settings
			l.node.Store(nodeOf(n, room))
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
	// With replicas, two parts of a request may go to one server, because the other one is dead.
	return localNode{n}, cfg.PS.WaterMark / (1 + cfg.PS.Replicas), err
}

// Node returns the node of this process, or a usage error of the function op if there is none.
func (l *Library) Node(op string) (*Node, error) {
	n := l.node.Load()
	if n == nil {
		return nil, &engine.UsageError{Op: op, Err: errors.New("this process has started no node of a parameter server")}
	}
	if !n.used.Load() {
		n.used.Store(true)
	}
	return n, nil
}

// Exchange begins a push or a pull. It may have to wait until there is room for its messages. If inSlices is
// set, it waits only for a while. Then the request may go on waiting for room in its own goroutine, and for
// further ones of the same thread Exchange returns ErrPending, without an effect.
func (l *Library) Exchange(x *node.Exchange, inSlices bool) (Handle, error) {
	n, err := l.Node("exchange")
	if err != nil {
		return 0, err
	}
	size := int64(8*len(x.Keys) + len(x.Values))
	end := func(wait func() error, err error) error {
		if err == nil {
			err = wait()
		}
		n.mu.Lock()
		n.requests--
		n.bytes -= size
		n.mu.Unlock()
		return err
	}
	over := time.NewTimer(slice)
	defer over.Stop()
	thread := unix.Gettid()
	expired := over.C
	if !inSlices {
		expired = nil
	}
	n.mu.Lock()
	begun := n.beginning[thread]
	n.mu.Unlock()
	if inSlices && begun != nil {
		select {
		case <-begun:
		case <-expired:
			return 0, ErrPending
		}
	}
	select {
	case n.taking <- struct{}{}:
	case <-expired:
		return 0, ErrPending
	}
	n.mu.Lock()
	n.requests++
	n.bytes += size
	hasRoom := n.requests <= int64(n.room) && n.bytes <= roomBytes
	if hasRoom || !inSlices {
		n.mu.Unlock()
		if !hasRoom {
			<-n.taking
		}
		wait, err := n.exchange(x)
		if hasRoom {
			<-n.taking
		}
		if err != nil {
			return 0, end(nil, err)
		}
		return l.start(func(*Result) error { return end(wait, nil) }), nil
	}
	begun = make(chan struct{})
	n.beginning[thread] = begun
	n.mu.Unlock()
	<-n.taking
	var failure error // valid if begun is closed
	h := l.start(func(*Result) error {
		wait, err := n.exchange(x)
		failure = err
		n.mu.Lock()
		delete(n.beginning, thread)
		n.mu.Unlock()
		close(begun)
		return end(wait, err)
	})
	select {
	case <-begun:
		err = failure
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
	// It counts the requests of all threads.
	return l.startAfter(0, "clock", func(n *Node) error { return n.clock() })
}

// Barrier waits for all nodes of a group.
func (l *Library) Barrier(group int) Handle {
	return l.startAfter(unix.Gettid(), "barrier", func(n *Node) error { return n.barrier(group) })
}

// Finalize leaves the job of the parameter server. With barrier, it waits for the other nodes before that.
func (l *Library) Finalize(barrier bool) Handle {
	finalize := func(n *Node) error {
		l.nodeChanging.Lock()
		defer l.nodeChanging.Unlock()
		err := n.finalize(barrier)
		l.node.CompareAndSwap(n, nil)
		return err
	}
	if !barrier { // the requests that wait for room fail
		return l.startNode("finalize", finalize)
	}
	return l.startAfter(unix.Gettid(), "finalize", finalize)
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

// startAfter starts f when the requests have begun for which Exchange has returned in a thread, or in all
// threads if thread is 0.
func (l *Library) startAfter(thread int, op string, f func(*Node) error) Handle {
	var before []chan struct{}
	if n := l.node.Load(); n != nil {
		before = n.waiting(thread)
	}
	return l.startNode(op, func(n *Node) error {
		for _, begun := range before {
			<-begun
		}
		return f(n)
	})
}
