package ps

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/tensor"
)

// KVMeta describes a push or pull at a server.
type KVMeta struct {
	// Cmd is the command word of the worker.
	Cmd int32
	// Push and Pull say what the worker wants. If both are set, the pull comes after the push.
	Push, Pull bool
	// Sender is the id of the worker, the first id of its process. Customer and Timestamp identify the
	// request there.
	Sender    NodeID
	Customer  int
	Timestamp int64
	// Clock is the number of iterations that the worker has ended (Node.Clock). It is -1 in asynchronous
	// mode.
	Clock int64

	req *kvRequest
}

// KVPairs has keys and their values. If Lens is nil, each key has the same number of values. Otherwise Lens
// has the number of values of each key.
type KVPairs[T Value] struct {
	Keys []uint64
	Vals []T
	Lens []int32

	list *serverList // the list that Keys is
}

// kvRequest is the state of a push or pull that a server handles.
type kvRequest struct {
	from    van.Process
	m       *van.Message
	replica *replica // nil in a job without replicas
	// forwarded says that m is released when the other server of the range has got its frames.
	forwarded bool
	// batch says that the handler answers before it returns, and soon.
	batch bool
	// home and priority are those of the header. m may have been released when the answer is made.
	home, priority int32
	keys           int // number of keys
	pushed         int // size of the pushed values
	event          event
	answered       atomic.Bool
}

// Handler handles the pushes and pulls at a server: a built-in handler, such as that of Sum, or a KVHandler.
type Handler[T Value] interface {
	handle(meta KVMeta, data KVPairs[T], s *KVServer[T])
}

// KVHandler is a handler that the program defines. It is called for each push and pull of a worker, one call
// at a time. It must answer each request once, with KVServer.Respond or KVServer.Fail, but may do so later
// and from any goroutine. It may read the slices of data until then, and must not change them: they may be
// shared memory that is mapped for reading only. It must not call Finalize or Close of its node, which wait
// until it returns.
type KVHandler[T Value] func(meta KVMeta, data KVPairs[T], s *KVServer[T])

func (h KVHandler[T]) handle(meta KVMeta, data KVPairs[T], s *KVServer[T]) { h(meta, data, s) }

// KVServer handles the pushes and pulls of the workers. Its methods are safe for concurrent use.
type KVServer[T Value] struct {
	*SimpleApp
	handler Handler[T]
	// replicas has the ranges that this server has, by rank. It is nil in a job without replicas.
	replicas map[int]*replica

	// The following fields are used only by the handler of requests, of which there is one call at a time.
	lists  map[senderKey]*serverLists
	parked map[parkedKey]*van.Message // requests whose keys the server has asked for
	// parkedBytes is the size of these requests.
	parkedBytes int

	spare *kvRequest // memory for the next request, or nil

	old atomic.Bool // a worker has gone whose lists were not forgotten yet
}

// senderKey identifies a customer of a worker, and what it has sent for a range of keys.
type senderKey struct {
	process  van.Process
	customer int32
	home     int32 // rank of the range plus one, as in Header.range
}

// parkedKey identifies a request.
type parkedKey struct {
	senderKey
	timestamp int64
}

// NewKVServer makes the server of an app at node n, whose role is Server. The built-in handlers are Sum,
// Assign, SGD, Momentum, Adagrad and Adam. Servers with the same built-in handler share its values. The
// server is a SimpleApp too, for commands of the workers (OnRequest).
//
// In a job with replicas (HVD_PS_REPLICAS), the handler must be a built-in one that no other server has.
func NewKVServer[T Value](n *Node, handler Handler[T], opts ...AppOption) (*KVServer[T], error) {
	if n.Role() != Server {
		return nil, &UsageError{fmt.Errorf("ps: new KVServer: this process is a %s", n.Role())}
	}
	o := appOptionsOf(opts)
	a, err := newApp(n, &o)
	s := &KVServer[T]{SimpleApp: a, handler: handler, lists: make(map[senderKey]*serverLists),
		parked: make(map[parkedKey]*van.Message)}
	if err == nil {
		err = s.replicate()
	}
	if err == nil {
		a.c.gone = func() { s.old.Store(true) }
		err = a.register(s.handle)
	}
	if err != nil {
		return nil, fmt.Errorf("ps: new KVServer of app %d: %w", o.app, err)
	}
	a.c.news()
	return s, nil
}

// replicate makes the replicas of the ranges that this server has.
func (s *KVServer[T]) replicate() error {
	po := s.c.po
	if po.set.PS.Replicas == 0 {
		return nil
	}
	if err := po.checkNew(s.c.key); err != nil {
		return err // before the replicas change anything
	}
	b, ok := s.handler.(*builtIn[T])
	if !ok {
		return &UsageError{errors.New("HVD_PS_REPLICAS is for built-in handlers: the values of a KVHandler are " +
			"not replicated")}
	}
	if b.used.Swap(true) {
		return &UsageError{errors.New("another server has the same handler: with HVD_PS_REPLICAS, make one for " +
			"each server")}
	}
	s.replicas, s.c.replicas = make(map[int]*replica), make(map[int32]*replica)
	n, rank := po.cfg.NumServers, van.Rank(po.van.ID())
	for _, home := range []int{rank, (rank + n - 1) % n} {
		r := newReplica(po, s.c.key.app, home, b.empty)
		s.replicas[home], s.c.replicas[int32(home+1)] = r, r
	}
	return nil
}

// forgetWorkers drops what concerns workers that have gone, and reports whether from is one of them. A
// message of such a worker may have waited for handling.
func (s *KVServer[T]) forgetWorkers(from van.Process) bool {
	connected := s.c.po.van.Connected
	if s.old.Swap(false) {
		maps.DeleteFunc(s.lists, func(key senderKey, _ *serverLists) bool { return !connected(key.process) })
		for key := range s.parked {
			if !connected(key.process) {
				s.unpark(key).Release()
			}
		}
	}
	return !connected(from)
}

// handle handles a request of a worker.
func (s *KVServer[T]) handle(from van.Process, m *van.Message) {
	if s.forgetWorkers(from) {
		m.Release()
		return
	}
	s.dispatch(from, m)
}

// dispatch handles a request of a worker that has not gone.
func (s *KVServer[T]) dispatch(from van.Process, m *van.Message) {
	h := m.Header
	sender := senderKey{from, h.CustomerId, h.Range}
	key := parkedKey{sender, h.Timestamp}
	r := s.c.replicas[h.Range]
	if r == nil && s.c.replicas != nil {
		s.c.po.refuse(from, m, fmt.Errorf("this server does not have the range %d", h.Range-1))
		return
	}
	if r != nil && !h.WantKeys && !r.serves() {
		s.moved(from, m)
		return
	}
	if h.WantKeys { // the answer to want below
		waiting := s.unpark(key)
		if waiting == nil || len(m.Data) == 0 {
			if waiting != nil {
				waiting.Release() // the request has failed at the worker
			}
			m.Release()
			return
		}
		list, err := s.learn(sender, h.KeyList, m.Data[0])
		m.Release()
		s.serve(from, waiting, list, err)
		return
	}
	if err := checkFrames(m, tensor.Of[T]()); err != nil {
		s.c.po.refuse(from, m, err)
		return
	}
	if len(m.Data[0]) > 0 {
		list, err := s.learn(sender, h.KeyList, m.Data[0])
		s.serve(from, m, list, err)
		return
	}
	if lists := s.lists[sender]; lists != nil && lists.lists[h.KeyList] != nil {
		s.serve(from, m, lists.lists[h.KeyList], nil)
		return
	}
	s.want(from, key, m)
}

// moved tells a worker that the other server of a range is its primary.
func (s *KVServer[T]) moved(from van.Process, m *van.Message) {
	h := m.Header
	moved := &van.Message{Header: &pspb.Header{AppId: h.AppId, CustomerId: h.CustomerId,
		Timestamp: h.Timestamp, Range: h.Range, Moved: true}}
	m.Release()
	s.c.po.sendAnswer(from, moved)
}

// checkFrames returns an error unless m is a push or pull of values of type dt. It makes a copy of lengths
// that the sender could still change. The caller must copy the keys before it checks them.
func checkFrames(m *van.Message, dt tensor.DType) error {
	h := m.Header
	if len(m.Data) != 3 || !h.Push && !h.Pull || len(m.Data[0])%keyBytes != 0 || len(m.Data[2])%4 != 0 {
		return errors.New("malformed push or pull")
	}
	if got := h.Frames[1].Type; got != wireTypes[dt] || len(m.Data[1])%dt.Size() != 0 {
		return fmt.Errorf("the worker has values of type %s, the server of type %s", got, wireTypes[dt])
	}
	m.Keep(2)
	return nil
}

// want asks the worker for the keys of m, which m only names. This happens if the server has forgotten the
// list, or if m has overtaken the message with the keys.
func (s *KVServer[T]) want(from van.Process, key parkedKey, m *van.Message) {
	h := m.Header
	n := m.Size()
	if len(s.parked) >= maxOutstanding || s.parkedBytes > 0 && s.parkedBytes+n > maxHeldBytes {
		s.c.po.refuse(from, m, fmt.Errorf("%d requests with %d bytes wait for keys, and this one has %d, want "+
			"at most %d and %d", len(s.parked), s.parkedBytes, n, maxOutstanding, maxHeldBytes))
		return
	}
	if s.parked[key] != nil {
		s.unpark(key).Release() // a peer that obeys the protocol sends a request once
	}
	s.parked[key] = m
	s.parkedBytes += n
	s.c.po.sendAnswer(from, &van.Message{Header: &pspb.Header{AppId: h.AppId, CustomerId: h.CustomerId,
		Timestamp: h.Timestamp, Range: h.Range, KeyList: h.KeyList, WantKeys: true}})
}

// unpark removes a request that waits for its keys, and returns it. If there is none, it returns nil.
func (s *KVServer[T]) unpark(key parkedKey) *van.Message {
	m := s.parked[key]
	if m != nil {
		delete(s.parked, key)
		s.parkedBytes -= m.Size()
	}
	return m
}

// learn remembers a list of keys.
func (s *KVServer[T]) learn(sender senderKey, number uint64, b []byte) (*serverList, error) {
	lists := s.lists[sender]
	if lists == nil {
		lists = newServerLists()
		s.lists[sender] = lists
	}
	if known := lists.lists[number]; known != nil {
		return known, nil
	}
	list := &serverList{keys: slices.Clone(keysOfBytes(b))}
	if err := checkKeys(list.keys); err != nil {
		return nil, err
	}
	lists.addList(number, list)
	return list, nil
}

// serve passes a request to the handler. err is an error in its keys. serve drops a request whose values may
// have changed, because the worker has left or died.
func (s *KVServer[T]) serve(from van.Process, m *van.Message, list *serverList, err error) {
	if m.Reclaimed() {
		m.Release()
		return
	}
	h := m.Header
	var data KVPairs[T]
	if err == nil {
		data = KVPairs[T]{Keys: list.keys, Vals: tensor.View[T](m.Data[1]), list: list}
		if len(m.Data[2]) > 0 {
			data.Lens = tensor.View[int32](m.Data[2])
		}
		err = data.checkLengths(h.Push)
	}
	if err != nil {
		s.c.po.refuse(from, m, err)
		return
	}
	req := s.spare
	s.spare = nil
	if req == nil {
		req = new(kvRequest)
	}
	*req = kvRequest{from: from, m: m, replica: s.c.replicas[h.Range], home: h.Range, priority: h.Priority,
		keys: len(list.keys), pushed: len(m.Data[1]),
		event: s.c.po.observer.beginEvent(kindOf(h.Push, h.Pull))}
	s.handler.handle(KVMeta{Cmd: h.Head, Push: h.Push, Pull: h.Pull, Sender: NodeID(from.ID),
		Customer: int(h.CustomerId), Timestamp: h.Timestamp, Clock: h.Clock - 1, req: req}, data, s)
	if req.batch { // it was answered
		*req = kvRequest{}
		s.spare = req
	}
}

// checkLengths returns an error if the values do not fit the keys.
func (d *KVPairs[T]) checkLengths(push bool) error {
	if !push && len(d.Vals)+len(d.Lens) > 0 || len(d.Keys) == 0 {
		return errors.New("malformed push or pull")
	}
	return checkSizes(len(d.Keys), len(d.Vals), d.Lens)
}

// checkSizes returns an error if the number of values does not fit the number of keys, or their lengths if
// these are not nil.
func checkSizes(keys, vals int, lens []int32) error {
	if keys == 0 {
		return errors.New("malformed push: it has no keys")
	}
	if lens == nil {
		if vals%keys != 0 {
			return fmt.Errorf("%d values do not fit %d keys", vals, keys)
		}
		return nil
	}
	sum := 0
	for _, n := range lens {
		if n < 0 {
			return fmt.Errorf("a key has %d values", n)
		}
		sum += int(n)
	}
	if len(lens) != keys || sum != vals {
		return fmt.Errorf("%d values and %d lengths do not fit %d keys", vals, len(lens), keys)
	}
	return nil
}

// Respond answers a request: a pull with the values of its keys, a push with an empty KVPairs. data.Keys may
// be nil, or must be the keys of the request. Respond copies data and does not wait. A second answer is an
// error.
func (s *KVServer[T]) Respond(meta KVMeta, data KVPairs[T]) error {
	if err := checkResponse(meta, data); err != nil {
		return fmt.Errorf("ps: response of app %d to %s: %w", s.c.key.app, meta.Sender, err)
	}
	return s.respond(meta, func(m *van.Message) {
		vals, lens := tensor.Bytes(data.Vals), tensor.Bytes(data.Lens)
		s.c.po.van.Allocate(int(meta.Sender), m, len(vals), len(lens))
		copy(m.Data[0], vals)
		copy(m.Data[1], lens)
	})
}

// checkResponse returns an error if data does not fit a request.
func checkResponse[T Value](meta KVMeta, data KVPairs[T]) error {
	if !meta.Pull {
		return nil
	}
	n := meta.req.keys
	if len(data.Keys) != 0 && len(data.Keys) != n {
		return fmt.Errorf("got %d keys, want %d", len(data.Keys), n)
	}
	return checkSizes(n, len(data.Vals), data.Lens)
}

// respond answers a request. The function fill gives the answer to a pull its frames.
func (s *KVServer[T]) respond(meta KVMeta, fill func(*van.Message)) error {
	if meta.req.answered.Swap(true) {
		return fmt.Errorf("ps: response of app %d to %s: the request was answered already", s.c.key.app,
			meta.Sender)
	}
	return s.deliver(&meta, s.response(&meta, fill))
}

// response returns the answer to a request, and frees the request. The function fill gives the answer to a
// pull its frames.
func (s *KVServer[T]) response(meta *KVMeta, fill func(*van.Message)) *van.Message {
	m := meta.newResponse(s.c.key.app)
	if meta.Pull {
		fill(m)
		m.SetTypes(wireTypes[tensor.Of[T]()], pspb.DataType_INT32)
	}
	if !meta.req.forwarded {
		meta.req.m.Release()
	}
	return m
}

// deliver sends the answer to a request.
func (s *KVServer[T]) deliver(meta *KVMeta, m *van.Message) error {
	s.observe(meta, m.Bytes(), nil)
	if err := s.c.po.respond(meta.req.from, m); err != nil {
		return fmt.Errorf("ps: response of app %d: %w", s.c.key.app, public(err))
	}
	return nil
}

// observe records a request that has been answered with the given number of bytes, or with an error.
func (s *KVServer[T]) observe(meta *KVMeta, bytes int, err error) {
	s.c.po.observer.endEvent(meta.req.event, outcome{dtype: tensor.Of[T](), keys: meta.req.keys,
		bytes: meta.req.pushed + bytes, peer: s.c.po.process(int(meta.Sender)), err: err})
}

// newResponse returns the response, without frames.
func (meta *KVMeta) newResponse(app int) *van.Message {
	m := van.Make()
	h := m.Header
	h.AppId, h.CustomerId, h.Timestamp = int32(app), int32(meta.Customer), meta.Timestamp
	h.Range, h.Push, h.Pull, h.Priority = meta.req.home, meta.Push, meta.Pull, meta.req.priority
	m.Batch = meta.req.batch
	return m
}

// Fail answers a request with an error, which Wait returns at the worker as a *RemoteError.
func (s *KVServer[T]) Fail(meta KVMeta, err error) error {
	if meta.req.answered.Swap(true) {
		return fmt.Errorf("ps: response of app %d to %s: the request was answered already", s.c.key.app,
			meta.Sender)
	}
	m := meta.newResponse(s.c.key.app)
	m.Header.Error = err.Error()
	meta.req.m.Release()
	s.observe(&meta, 0, err)
	if err := s.c.po.respond(meta.req.from, m); err != nil {
		return fmt.Errorf("ps: response of app %d: %w", s.c.key.app, public(err))
	}
	return nil
}
