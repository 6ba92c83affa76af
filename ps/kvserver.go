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
	Sender    int
	Customer  int
	Timestamp int64
	// Clock is the number of iterations that the worker has ended (Postoffice.Clock). It is -1 in
	// asynchronous mode.
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
	from     van.Process
	m        *van.Message
	keys     int // number of keys
	pushed   int // size of the pushed values
	event    event
	answered atomic.Bool
}

// KVHandler handles a push or pull of a worker. It must answer each request once, with Response or Fail, but
// may do so later and from any goroutine. The slices of data may be read until then and must not be changed:
// they may be shared memory that is mapped for reading only. There is one call at a time.
type KVHandler[T Value] func(meta KVMeta, data KVPairs[T], s *KVServer[T])

// KVServer handles the pushes and pulls of the workers. Its methods are safe for concurrent use.
type KVServer[T Value] struct {
	*SimpleApp
	handler KVHandler[T]

	// The following fields are used only by the handler of requests, of which there is one call at a time.
	lists  map[senderKey]*serverLists
	parked map[parkedKey]*van.Message // requests whose keys the server has asked for
	// parkedBytes is the size of these requests.
	parkedBytes int

	old atomic.Bool // a worker has gone whose lists were not forgotten yet
}

// senderKey identifies a customer of a worker.
type senderKey struct {
	process  van.Process
	customer int32
}

// parkedKey identifies a request.
type parkedKey struct {
	senderKey
	timestamp int64
}

// NewKVServer makes the server of an app in this process. The built-in handlers are Sum, Assign, SGD,
// Momentum, Adagrad and Adam. Servers with the same built-in handler share its values. The server is a
// SimpleApp too, with the handlers h, for example for commands of the workers.
func NewKVServer[T Value](po *Postoffice, app int, handler KVHandler[T], h SimpleHandlers) (*KVServer[T],
	error) {
	if !po.IsServer() {
		return nil, &UsageError{fmt.Errorf("ps: new KVServer: this process is a %s", po.cfg.Role)}
	}
	a, err := newApp(po, app, 0, h)
	s := &KVServer[T]{SimpleApp: a, handler: handler, lists: make(map[senderKey]*serverLists),
		parked: make(map[parkedKey]*van.Message)}
	if err == nil {
		a.c.gone = func() { s.old.Store(true) }
		err = a.add(s.handle)
	}
	if err != nil {
		return nil, fmt.Errorf("ps: new KVServer of app %d: %w", app, err)
	}
	return s, nil
}

// forget drops what concerns workers that have gone, and reports whether from is one of them. A message of
// such a worker may have waited for handling.
func (s *KVServer[T]) forget(from van.Process) bool {
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
	if s.forget(from) {
		m.Release()
		return
	}
	s.dispatch(from, m)
}

// dispatch handles a request of a worker that has not gone.
func (s *KVServer[T]) dispatch(from van.Process, m *van.Message) {
	h := m.Header
	sender := senderKey{from, h.CustomerId}
	key := parkedKey{sender, h.Timestamp}
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
	if err := checkFrames[T](m); err != nil {
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

// checkFrames returns an error unless m is a push or pull of values of type T.
func checkFrames[T Value](m *van.Message) error {
	h := m.Header
	if len(m.Data) != 3 || !h.Push && !h.Pull || len(m.Data[0])%keyBytes != 0 || len(m.Data[2])%4 != 0 {
		return errors.New("malformed push or pull")
	}
	dt := tensor.Of[T]()
	if got := h.Frames[1].Type; got != wireTypes[dt] || len(m.Data[1])%dt.Size() != 0 {
		return fmt.Errorf("the worker has values of type %s, the server of type %s", got, wireTypes[dt])
	}
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
	s.c.po.answer(from, &van.Message{Header: &pspb.Header{AppId: h.AppId, CustomerId: h.CustomerId,
		Timestamp: h.Timestamp, KeyList: h.KeyList, WantKeys: true}})
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
		lists = &serverLists{lists: make(map[uint64]*serverList)}
		s.lists[sender] = lists
	}
	if known := lists.lists[number]; known != nil {
		return known, nil
	}
	list := &serverList{keys: slices.Clone(keysOfBytes(b))}
	if err := checkKeys(list.keys); err != nil {
		return nil, err
	}
	lists.add(number, list)
	return list, nil
}

// serve passes a request to the handler. err is an error in its keys.
func (s *KVServer[T]) serve(from van.Process, m *van.Message, list *serverList, err error) {
	h := m.Header
	var data KVPairs[T]
	if err == nil {
		data = KVPairs[T]{Keys: list.keys, Vals: tensor.View[T](m.Data[1]), list: list}
		if len(m.Data[2]) > 0 {
			data.Lens = tensor.View[int32](m.Data[2])
		}
		err = data.check(h.Push)
	}
	if err != nil {
		s.c.po.refuse(from, m, err)
		return
	}
	s.handler(KVMeta{Cmd: h.Head, Push: h.Push, Pull: h.Pull, Sender: from.ID, Customer: int(h.CustomerId),
		Timestamp: h.Timestamp, Clock: h.Clock - 1, req: &kvRequest{from: from, m: m, keys: len(list.keys),
			pushed: len(m.Data[1]), event: s.c.po.observer.begin(kindOf(h.Push, h.Pull))}}, data, s)
}

// check returns an error if the values do not fit the keys.
func (d *KVPairs[T]) check(push bool) error {
	if !push && len(d.Vals)+len(d.Lens) > 0 || len(d.Keys) == 0 {
		return errors.New("malformed push or pull")
	}
	if d.Lens == nil {
		if len(d.Vals)%len(d.Keys) != 0 {
			return fmt.Errorf("%d values do not fit %d keys", len(d.Vals), len(d.Keys))
		}
		return nil
	}
	sum := 0
	for _, n := range d.Lens {
		if n < 0 {
			return fmt.Errorf("a key has %d values", n)
		}
		sum += int(n)
	}
	if len(d.Lens) != len(d.Keys) || sum != len(d.Vals) {
		return fmt.Errorf("%d values and %d lengths do not fit %d keys", len(d.Vals), len(d.Lens),
			len(d.Keys))
	}
	return nil
}

// Response answers a request: a pull with the values of its keys, a push with nothing. data.Keys may be nil,
// or must be the keys of the request. Response copies data and does not wait. A second answer is an error.
func (s *KVServer[T]) Response(meta KVMeta, data KVPairs[T]) error {
	if data.Keys == nil {
		data.Keys = make([]uint64, 0)
	}
	err := s.checkResponse(meta, data)
	if err != nil {
		return fmt.Errorf("ps: response of app %d to %s: %w", s.c.key.app, van.Name(meta.Sender), err)
	}
	sizes := []int{0, 0}
	if meta.Pull {
		sizes = []int{len(tensor.Bytes(data.Vals)), 4 * len(data.Lens)}
	}
	return s.respond(meta, sizes, func(vals, lens []byte) {
		copy(vals, tensor.Bytes(data.Vals))
		copy(lens, tensor.Bytes(data.Lens))
	})
}

func (s *KVServer[T]) checkResponse(meta KVMeta, data KVPairs[T]) error {
	if !meta.Pull {
		return nil
	}
	n := meta.req.keys
	if len(data.Keys) != 0 && len(data.Keys) != n {
		return fmt.Errorf("got %d keys, want %d", len(data.Keys), n)
	}
	sized := KVPairs[T]{Keys: make([]uint64, n), Vals: data.Vals, Lens: data.Lens}
	return sized.check(true)
}

// respond answers a request with frames of the given sizes, which the function fill writes.
func (s *KVServer[T]) respond(meta KVMeta, sizes []int, fill func(vals, lens []byte)) error {
	if meta.req.answered.Swap(true) {
		return fmt.Errorf("ps: response of app %d to %s: the request was answered already", s.c.key.app,
			van.Name(meta.Sender))
	}
	h := meta.header(s.c.key.app)
	m := &van.Message{Header: h}
	if meta.Pull {
		m = s.c.po.van.NewMessage(meta.Sender, h, sizes...)
		van.SetTypes(h, wireTypes[tensor.Of[T]()], pspb.DataType_INT32)
		fill(m.Data[0], m.Data[1])
	}
	meta.req.m.Release()
	s.observe(&meta, m.Bytes(), nil)
	if err := s.c.po.respond(meta.req.from, m); err != nil {
		return fmt.Errorf("ps: response of app %d: %w", s.c.key.app, err)
	}
	return nil
}

// observe records a request that has been answered with the given number of bytes, or with an error.
func (s *KVServer[T]) observe(meta *KVMeta, bytes int, err error) {
	s.c.po.observer.end(meta.req.event, outcome{dtype: tensor.Of[T](), keys: meta.req.keys,
		bytes: meta.req.pushed + bytes, peer: s.c.po.process(meta.Sender), err: err})
}

// header returns the header of the response.
func (meta *KVMeta) header(app int) *pspb.Header {
	return &pspb.Header{AppId: int32(app), CustomerId: int32(meta.Customer), Timestamp: meta.Timestamp,
		Push: meta.Push, Pull: meta.Pull, Priority: meta.req.m.Header.Priority}
}

// Fail answers a request with an error, which Wait returns at the worker as a *RemoteError.
func (s *KVServer[T]) Fail(meta KVMeta, err error) error {
	if meta.req.answered.Swap(true) {
		return fmt.Errorf("ps: response of app %d to %s: the request was answered already", s.c.key.app,
			van.Name(meta.Sender))
	}
	h := meta.header(s.c.key.app)
	h.Error = err.Error()
	meta.req.m.Release()
	s.observe(&meta, 0, err)
	if err := s.c.po.respond(meta.req.from, &van.Message{Header: h}); err != nil {
		return fmt.Errorf("ps: response of app %d: %w", s.c.key.app, err)
	}
	return nil
}
