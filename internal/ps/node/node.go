// Package node runs a node of a parameter server for programs in other languages: the types of its values and
// the handlers of its servers are known only when the program runs.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/half"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ps"
)

// Node is a node of a parameter server. Its methods are safe for concurrent use.
type Node struct {
	*ps.Node

	mu      sync.Mutex
	workers map[workerKey]exchanger
}

// workerKey identifies a worker of a node.
type workerKey struct {
	app   int
	dtype tensor.DType
}

// Join joins the job that the environment and settings describe. If log is nil, the log goes to stderr.
func Join(ctx context.Context, settings map[string]string, log *slog.Logger) (*Node, error) {
	n, err := ps.Join(ctx, ps.Config{Settings: settings, Logger: log})
	if err != nil {
		return nil, err
	}
	return &Node{Node: n, workers: make(map[workerKey]exchanger)}, nil
}

// Serve makes the server of an app, for values of type dt, with a built-in handler and its parameters.
func (n *Node) Serve(app int, dt tensor.DType, handler string, parameters []float64) error {
	t := types[dt]
	if t.serve == nil {
		return misuse("serve", "got the element type %d, which a server cannot have", dt)
	}
	return t.serve(n.Node, app, handler, parameters)
}

// Exchange is a push, a pull, or a push and then a pull of the same keys. The memory belongs to the node
// until the exchange is done.
type Exchange struct {
	App               int
	DType             tensor.DType
	Push, Pull        bool
	Keys              []uint64
	Values            []byte // to push
	Results           []byte // where the pulled values go
	Command, Priority int32
}

// Begin begins x.
func (n *Node) Begin(ctx context.Context, x *Exchange) (*ps.Request, error) {
	w, err := n.worker(workerKey{x.App, x.DType})
	if err != nil {
		return nil, err
	}
	return w.begin(ctx, x)
}

// worker returns the worker for a key. It makes the worker if there is none yet.
func (n *Node) worker(key workerKey) (exchanger, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w := n.workers[key]; w != nil {
		return w, nil
	}
	t := types[key.dtype]
	if t.work == nil {
		return nil, misuse("exchange", "got the element type %d, which values cannot have", key.dtype)
	}
	w, err := t.work(n.Node, key.app)
	if err == nil {
		n.workers[key] = w
	}
	return w, err
}

// misuse returns the error of a wrong call.
func misuse(op, format string, args ...any) error {
	return &engine.UsageError{Op: op, Err: fmt.Errorf(format, args...)}
}

// exchanger is a worker for one type of values.
type exchanger interface {
	begin(ctx context.Context, x *Exchange) (*ps.Request, error)
}

// valueType makes workers and servers for a type of values.
type valueType struct {
	work  func(n *ps.Node, app int) (exchanger, error)
	serve func(n *ps.Node, app int, handler string, parameters []float64) error
}

// types has the element types of values.
var types = map[tensor.DType]valueType{
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

func integers[T ps.Value]() valueType { return valueType{work[T], serveWith(sums[T]())} }

func floats[T ps.Float]() valueType {
	all := sums[T]()
	maps.Copy(all, handlers[T]{
		"sgd":      {1, func(p []float64) ps.Handler[T] { return ps.SGD[T](p[0]) }},
		"momentum": {2, func(p []float64) ps.Handler[T] { return ps.Momentum[T](p[0], p[1]) }},
		"adagrad":  {2, func(p []float64) ps.Handler[T] { return ps.Adagrad[T](p[0], p[1]) }},
		"adam":     {4, func(p []float64) ps.Handler[T] { return ps.Adam[T](p[0], p[1], p[2], p[3]) }},
	})
	return valueType{work[T], serveWith(all)}
}

// serveWith returns a function that makes a server with one of the handlers.
func serveWith[T ps.Value](all handlers[T]) func(*ps.Node, int, string, []float64) error {
	return func(n *ps.Node, app int, handler string, parameters []float64) error {
		h, ok := all[handler]
		if !ok || len(parameters) != h.parameters {
			return misuse("serve", "got the handler %q with %d parameters for values of type %s, want %v",
				handler, len(parameters), tensor.Of[T](), slices.Sorted(maps.Keys(all)))
		}
		_, err := ps.NewKVServer(n, h.new(parameters), ps.App(app))
		return err
	}
}

// worker is an exchanger.
type worker[T ps.Value] struct{ *ps.KVWorker[T] }

func work[T ps.Value](n *ps.Node, app int) (exchanger, error) {
	w, err := ps.NewKVWorker[T](n, ps.App(app))
	return worker[T]{w}, err
}

func (w worker[T]) begin(ctx context.Context, x *Exchange) (*ps.Request, error) {
	if size := x.DType.Size(); len(x.Values)%size != 0 || len(x.Results)%size != 0 {
		return nil, misuse("exchange", "got %d bytes of values and %d bytes for results, want multiples of %d",
			len(x.Values), len(x.Results), size)
	}
	vals, out := tensor.View[T](x.Values), tensor.View[T](x.Results)
	cmd, priority := ps.Cmd(x.Command), ps.Priority(x.Priority)
	switch {
	case x.Pull && len(out) == 0 && len(x.Keys) > 0:
		return nil, misuse("exchange", "there is no memory for the pulled values")
	case x.Push && x.Pull:
		return w.PushPullAsync(ctx, x.Keys, vals, &out, cmd, priority)
	case x.Push:
		return w.PushAsync(ctx, x.Keys, vals, cmd, priority)
	case x.Pull:
		return w.PullAsync(ctx, x.Keys, &out, cmd, priority)
	}
	return nil, misuse("exchange", "it is neither a push nor a pull")
}
