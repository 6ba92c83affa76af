package sidecar

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ps"
)

// node is the node of a parameter server that belongs to a connection. Its goroutine handles requests in
// order. It does not wait for pushes and pulls.
type node struct {
	conn     *conn
	ctx      context.Context // ends when the connection ends
	cancel   context.CancelFunc
	requests chan *sidecarpb.Request
	active   atomic.Bool // the node is in a job

	// Only the goroutine of the node uses the following fields.
	po      *ps.Postoffice
	workers map[workerKey]exchanger
}

// workerKey identifies a worker of a node.
type workerKey struct {
	app   int32
	dtype tensor.DType
}

// exchanger starts pushes and pulls of a worker. keys and values are not used after begin has returned, and
// results not after the request has completed.
type exchanger interface {
	begin(ctx context.Context, q *sidecarpb.Exchange, keys []uint64, values,
		results []byte) (*ps.Request, error)
}

// errNoNode is the error of requests to a node that has not started.
var errNoNode = errors.New("this client has started no node of a parameter server")

// newNode returns a node and starts its goroutine.
func newNode(c *conn) *node {
	n := &node{conn: c, requests: make(chan *sidecarpb.Request, c.server.cfg.MaxInFlight),
		workers: make(map[workerKey]exchanger)}
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
		case q := <-n.requests:
			n.handle(q)
			continue
		case <-n.ctx.Done():
		}
		break
	}
	<-n.conn.server.ctx.Done()
	if n.po != nil {
		n.conn.server.check(n.po.Finalize(n.ctx, false))
	}
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
	default:
		c.answer(q.Id, nil, n.control(q))
	}
}

// start joins the job.
func (n *node) start(settings map[string]string) (*sidecarpb.Reply, error) {
	if n.po != nil {
		return nil, usage("start", "", errors.New("this client has started a node already"))
	}
	po, err := ps.Start(n.ctx, ps.Options{Settings: settings, Log: n.conn.server.log})
	if err != nil {
		return nil, err
	}
	n.po = po
	n.active.Store(true)
	role := "worker"
	if po.IsScheduler() {
		role = "scheduler"
	} else if po.IsServer() {
		role = "server"
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Node{Node: &sidecarpb.Node{Role: role,
		Rank: int32(po.Rank()), NumWorkers: int32(po.NumWorkers()), NumServers: int32(po.NumServers())}}}, nil
}

// control handles a request that has an empty answer.
func (n *node) control(q *sidecarpb.Request) error {
	if n.po == nil {
		return usage("node", "", errNoNode)
	}
	switch what := q.What.(type) {
	case *sidecarpb.Request_Serve:
		return n.serve(what.Serve)
	case *sidecarpb.Request_Clock:
		return n.po.Clock(n.ctx, 0)
	case *sidecarpb.Request_NodeBarrier:
		return n.po.Barrier(n.ctx, 0, int(what.NodeBarrier.GetGroup()))
	case *sidecarpb.Request_Finalize:
		err := n.po.Finalize(n.ctx, what.Finalize.GetBarrier())
		n.active.Store(false)
		n.po = nil
		clear(n.workers)
		return err
	}
	return nil
}

// serve makes the server of an app.
func (n *node) serve(q *sidecarpb.Serve) error {
	t := nodeTypes[tensor.DType(q.GetDtype())]
	if t.serve == nil {
		return usage("serve", "", fmt.Errorf("got the element type %d, which a server cannot have", q.GetDtype()))
	}
	return t.serve(n.po, q)
}

// exchange begins a push or pull. If it returns nil, it calls done at the end.
func (n *node) exchange(q *sidecarpb.Exchange, done func(error)) error {
	if n.po == nil {
		return usage("exchange", "", errNoNode)
	}
	key := workerKey{q.GetApp(), tensor.DType(q.GetDtype())}
	w := n.workers[key]
	if w == nil {
		t := nodeTypes[key.dtype]
		if t.work == nil {
			return usage("exchange", "", fmt.Errorf("got the element type %d, which values cannot have", key.dtype))
		}
		var err error
		if w, err = t.work(n.po, int(key.app)); err != nil {
			return err
		}
		n.workers[key] = w
	}
	var places []location
	for _, m := range []*sidecarpb.Memory{q.GetKeys(), q.GetValues(), q.GetResults()} {
		if m.GetOffset()%8 != 0 {
			return usage("exchange", "", fmt.Errorf("got the offset %d, want a multiple of 8", m.GetOffset()))
		}
		places = append(places, location{arena: m.GetArena(), offset: m.GetOffset(), numBytes: m.GetBytes()})
	}
	memory := &n.conn.server.memory
	_, uses, err := memory.use(n.conn, 0, places, nil)
	if err != nil {
		return usage("exchange", "", err)
	}
	release := func(err error) {
		n.conn.server.check(memory.unuse(uses))
		done(err)
	}
	r, err := w.begin(n.ctx, q, keysOf(places[0].to), places[1].to, places[2].to)
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
func (n *node) inJob() bool { return n != nil && n.active.Load() }

// nodeType makes workers and servers for an element type.
type nodeType struct {
	work  func(po *ps.Postoffice, app int) (exchanger, error)
	serve func(po *ps.Postoffice, q *sidecarpb.Serve) error
}

// nodeTypes has the element types of values.
var nodeTypes = map[tensor.DType]nodeType{
	tensor.Uint8: integers[uint8](), tensor.Int8: integers[int8](), tensor.Uint16: integers[uint16](),
	tensor.Int16: integers[int16](), tensor.Int32: integers[int32](), tensor.Int64: integers[int64](),
	tensor.Float16: floats[half.Float16](), tensor.BFloat16: floats[half.BFloat16](),
	tensor.Float32: floats[float32](), tensor.Float64: floats[float64](),
}

// handlers maps names to functions that make handlers, and the number of their parameters.
type handlers[T ps.Value] map[string]struct {
	parameters int
	new        func(p []float64) ps.Handler[T]
}

func sums[T ps.Value]() handlers[T] {
	return handlers[T]{
		"sum":    {0, func([]float64) ps.Handler[T] { return ps.Sum[T]() }},
		"assign": {0, func([]float64) ps.Handler[T] { return ps.Assign[T]() }},
	}
}

func integers[T ps.Value]() nodeType { return nodeType{work[T], serveWith(sums[T]())} }

func floats[T ps.Float]() nodeType {
	all := sums[T]()
	maps.Copy(all, handlers[T]{
		"sgd":      {1, func(p []float64) ps.Handler[T] { return ps.SGD[T](p[0]) }},
		"momentum": {2, func(p []float64) ps.Handler[T] { return ps.Momentum[T](p[0], p[1]) }},
		"adagrad":  {2, func(p []float64) ps.Handler[T] { return ps.Adagrad[T](p[0], p[1]) }},
		"adam":     {4, func(p []float64) ps.Handler[T] { return ps.Adam[T](p[0], p[1], p[2], p[3]) }},
	})
	return nodeType{work[T], serveWith(all)}
}

// serveWith returns a function that makes a server with one of the handlers.
func serveWith[T ps.Value](all handlers[T]) func(po *ps.Postoffice, q *sidecarpb.Serve) error {
	return func(po *ps.Postoffice, q *sidecarpb.Serve) error {
		h, ok := all[q.GetHandler()]
		if p := q.GetParameters(); !ok || len(p) != h.parameters {
			return usage("serve", "", fmt.Errorf("got the handler %q with %d parameters for values of type %s, want %v",
				q.GetHandler(), len(p), tensor.Of[T](), slices.Sorted(maps.Keys(all))))
		}
		_, err := ps.NewKVServer(po, int(q.GetApp()), h.new(q.GetParameters()), ps.SimpleHandlers{})
		return err
	}
}

// worker is an exchanger.
type worker[T ps.Value] struct{ *ps.KVWorker[T] }

func work[T ps.Value](po *ps.Postoffice, app int) (exchanger, error) {
	w, err := ps.NewKVWorker[T](po, app, 0, ps.SimpleHandlers{})
	return worker[T]{w}, err
}

func (w worker[T]) begin(ctx context.Context, q *sidecarpb.Exchange, keys []uint64, values,
	results []byte) (*ps.Request, error) {
	vals, out := tensor.View[T](values), tensor.View[T](results)
	opts := []ps.Option{ps.Cmd(q.GetCommand()), ps.Priority(q.GetPriority())}
	switch {
	case q.GetPull() && len(out) == 0 && len(keys) > 0:
		return nil, usage("exchange", "", errors.New("there is no memory for the pulled values"))
	case q.GetPush() && q.GetPull():
		return w.PushPull(ctx, keys, vals, &out, opts...)
	case q.GetPush():
		return w.Push(ctx, keys, vals, opts...)
	case q.GetPull():
		return w.Pull(ctx, keys, &out, opts...)
	}
	return nil, usage("exchange", "", errors.New("it is neither a push nor a pull"))
}

// keysOf returns memory of a client as keys.
func keysOf(b []byte) []uint64 {
	if len(b) < 8 {
		return nil
	}
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
