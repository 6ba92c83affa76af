package sidecar

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/internal/logs"
	psnode "github.com/gohvd/gohvd/internal/ps/node"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ps"
)

// node is the node of a parameter server that belongs to a connection. Its goroutine handles requests in
// order. It does not wait for pushes, pulls, clocks and barriers, nor until the node has left its job.
type node struct {
	conn     *conn
	ctx      context.Context // ends when the connection ends
	cancel   context.CancelFunc
	requests chan func()                 // each handles a request
	started  atomic.Pointer[psnode.Node] // nil before Start and after Finalize
}

// errNoNode is the error of requests to a node that has not started.
var errNoNode = errors.New("this client has started no node of a parameter server")

// newNode returns a node and starts its goroutine.
func newNode(c *conn) *node {
	n := &node{conn: c, requests: make(chan func(), c.server.cfg.MaxInFlight)}
	n.ctx, n.cancel = context.WithCancel(c.server.ctx)
	c.server.wg.Go(n.run)
	return n
}

// isNodeRequest reports whether a node handles the request.
func isNodeRequest(q *sidecarpb.Request) bool {
	switch q.What.(type) {
	case *sidecarpb.Request_StartNode, *sidecarpb.Request_Serve, *sidecarpb.Request_Exchange,
		*sidecarpb.Request_Clock, *sidecarpb.Request_NodeBarrier, *sidecarpb.Request_Finalize:
		return true
	}
	return false
}

// run handles requests until the connection ends. If the node is still in its job then, the program that runs
// the Server ends the process, which the other nodes notice.
func (n *node) run() {
	for {
		select {
		case handle := <-n.requests:
			handle()
			continue
		case <-n.ctx.Done():
		}
		break
	}
	if n.started.Load() == nil {
		return // it has left its job, or had none, and the sidecar may serve many clients after this one
	}
	<-n.conn.server.ctx.Done()
	if started := n.started.Load(); started != nil {
		n.conn.server.check(started.Close())
	}
}

// take passes a request to the goroutine of n. A failure does not wait for earlier requests, because it also
// ends a Finalize in progress, but is answered after them. So they get the errors of the node that has
// failed. The reader calls take.
func (n *node) take(q *sidecarpb.Request) {
	handle := func() { n.handle(q) }
	reason, started := q.GetFinalize().GetFailure(), n.started.Load()
	if reason != "" && started != nil {
		left := make(chan struct{})
		n.conn.server.wg.Go(func() {
			defer close(left)
			started.Fail(reason)
		})
		handle = func() {
			<-left
			n.started.CompareAndSwap(started, nil)
			n.conn.answer(q.Id, nil, nil)
		}
	}
	n.requests <- handle // there is room for as many as may be unanswered
}

// handle handles a request and answers it.
func (n *node) handle(q *sidecarpb.Request) {
	c := n.conn
	switch what := q.What.(type) {
	case *sidecarpb.Request_StartNode:
		r, err := n.start(what.StartNode.GetSettings())
		c.answer(q.Id, r, err)
	case *sidecarpb.Request_Exchange:
		done := func(err error) { c.answer(q.Id, nil, err) }
		if err := n.exchange(what.Exchange, done); err != nil {
			done(err)
		}
	case *sidecarpb.Request_Serve:
		c.answer(q.Id, nil, n.serve(what.Serve))
	default:
		n.control(q)
	}
}

// start joins the job.
func (n *node) start(settings map[string]string) (*sidecarpb.Reply, error) {
	if n.started.Load() != nil {
		return nil, usage("start", "", errors.New("this client has started a node already"))
	}
	started, err := psnode.Join(n.ctx, settings, logs.ToSlog(n.conn.server.log))
	if err != nil {
		return nil, err
	}
	n.started.Store(started)
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Node{Node: &sidecarpb.Node{Role: string(started.Role()),
		Rank: int32(started.Rank()), NumWorkers: int32(started.NumWorkers()),
		NumServers: int32(started.NumServers())}}}, nil
}

// serve makes the server of an app.
func (n *node) serve(v *sidecarpb.Serve) error {
	started := n.started.Load()
	if started == nil {
		return usage("node", "", errNoNode)
	}
	dt := tensor.DType(min(v.GetDtype(), math.MaxUint8))
	return started.Serve(int(v.GetApp()), dt, v.GetHandler(), v.GetParameters())
}

// control begins a request that may wait for other nodes and has an empty answer.
func (n *node) control(q *sidecarpb.Request) {
	c := n.conn
	started := n.started.Load()
	if started == nil {
		c.answer(q.Id, nil, usage("node", "", errNoNode))
		return
	}
	c.server.wg.Go(func() { c.answer(q.Id, nil, n.wait(started, q)) })
}

// wait executes a request that may wait for other nodes.
func (n *node) wait(started *psnode.Node, q *sidecarpb.Request) (err error) {
	switch what := q.What.(type) {
	case *sidecarpb.Request_Clock:
		return started.Clock(n.ctx)
	case *sidecarpb.Request_NodeBarrier:
		return started.Barrier(n.ctx, ps.NodeID(what.NodeBarrier.GetGroup()))
	case *sidecarpb.Request_Finalize:
		switch failure := what.Finalize.GetFailure(); {
		case failure != "":
			started.Fail(failure)
		case what.Finalize.GetBarrier():
			err = started.Finalize(n.ctx)
		default:
			err = started.Close()
		}
		n.started.CompareAndSwap(started, nil)
	}
	return err
}

// exchange begins a push or pull. If it returns nil, it calls done at the end.
func (n *node) exchange(q *sidecarpb.Exchange, done func(error)) error {
	started := n.started.Load()
	if started == nil {
		return usage("exchange", "", errNoNode)
	}
	var places []location
	for _, m := range []*sidecarpb.Memory{q.GetKeys(), q.GetValues(), q.GetResults()} {
		if m.GetOffset()%8 != 0 {
			return usage("exchange", "", fmt.Errorf("got the offset %d, want a multiple of 8",
				m.GetOffset()))
		}
		places = append(places, location{arena: m.GetArena(), offset: m.GetOffset(),
			numBytes: m.GetBytes()})
	}
	memory := &n.conn.memory
	uses, err := memory.use(places, nil)
	if err != nil {
		return usage("exchange", "", err)
	}
	release := func(err error) {
		n.conn.server.check(memory.unuse(uses))
		done(err)
	}
	r, err := started.Begin(n.ctx, &psnode.Exchange{
		App: int(q.GetApp()), DType: tensor.DType(min(q.GetDtype(), math.MaxUint8)), Push: q.GetPush(),
		Pull: q.GetPull(), Keys: keysOf(places[0].to), Values: places[1].to, Results: places[2].to,
		Command: q.GetCommand(), Priority: q.GetPriority(),
	})
	if err != nil {
		release(err)
		return nil
	}
	n.conn.server.wg.Go(func() { release(r.Wait(context.Background())) })
	return nil
}

// end tells the node that the connection has ended.
func (n *node) end() {
	if n != nil {
		n.cancel()
	}
}

// inJob reports whether the node is in a job.
func (n *node) inJob() bool { return n != nil && n.started.Load() != nil }

// keysOf returns memory of a client as keys.
func keysOf(b []byte) []uint64 {
	if len(b) < 8 {
		return nil
	}
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
