package ps

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
)

// SimpleData is a request or response of a SimpleApp.
type SimpleData struct {
	// Head and Body are the content. The sender chooses their meaning.
	Head int32
	Body []byte
	// Sender is the id of the node that has sent the message, the first id of its process.
	Sender NodeID
	// Customer and Timestamp identify the request at its sender.
	Customer  int
	Timestamp int64

	from     van.Process
	answered *atomic.Bool // nil in a response
}

// SimpleApp sends and handles requests that consist of a number and some bytes. Its methods are safe for
// concurrent use.
type SimpleApp struct {
	c        *customer
	request  func(SimpleData, *SimpleApp)
	response func(SimpleData, *SimpleApp) // may be nil
}

// NewSimpleApp makes an app at node n that handles no push or pull.
func NewSimpleApp(n *Node, opts ...AppOption) (*SimpleApp, error) {
	o := appOptionsOf(opts)
	a, err := newApp(n, &o)
	if err == nil {
		err = a.register(func(from van.Process, m *van.Message) {
			n.refuse(from, m, fmt.Errorf("app %d handles no push or pull", o.app))
		})
	}
	if err != nil {
		return nil, fmt.Errorf("ps: new app %d: %w", o.app, err)
	}
	return a, nil
}

// newApp returns a SimpleApp. It receives nothing before register is called.
func newApp(n *Node, o *appOptions) (*SimpleApp, error) {
	c, err := newCustomer(n.postoffice, o.app, n.customer)
	if err != nil {
		return nil, err
	}
	if o.request == nil {
		o.request = func(req SimpleData, a *SimpleApp) {
			_ = a.Respond(req, nil) // an error means that the node that asks has gone
		}
	}
	return &SimpleApp{c, o.request, o.response}, nil
}

// register adds the app to the node. Requests that are not those of a SimpleApp are passed to the function
// other.
func (a *SimpleApp) register(other func(from van.Process, m *van.Message)) error {
	a.c.request = func(from van.Process, m *van.Message) {
		if !m.Header.SimpleApp {
			other(from, m)
			return
		}
		req := simpleData(from, m)
		m.Release()
		req.answered = new(atomic.Bool)
		a.request(req, a)
	}
	return a.c.po.addCustomer(a.c)
}

// simpleData returns the content of a message, which is valid after its release.
func simpleData(from van.Process, m *van.Message) SimpleData {
	h := m.Header
	return SimpleData{Head: h.Head, Body: h.Body, Sender: NodeID(from.ID), from: from,
		Customer: int(h.CustomerId), Timestamp: h.Timestamp}
}

// Request sends a request to a node, or to each process of a group. It copies body. If the queue to a node is
// full, Request waits until ctx ends. Wait of the result waits for all responses.
//
// The scheduler can send to all nodes, itself included. Other nodes are not connected with themselves, nor a
// worker with workers, nor a server with servers, except for the neighbours of a server in a job with
// replicas. If the group has such a node, the error is a *UsageError, and nothing is sent.
func (a *SimpleApp) Request(ctx context.Context, to NodeID, head int32, body []byte) (*Request, error) {
	body = bytes.Clone(body)
	s := &simpleRequest{app: a, head: head, to: to}
	r := &s.Request
	r.of = s
	v := a.c.po.van
	for _, id := range v.Processes(int(to)) {
		if !v.Connects(id) {
			return nil, &UsageError{fmt.Errorf("ps: %s: %s has no connection with %s: only the scheduler is connected "+
				"with all nodes", s, van.Name(v.ID()), van.Name(id))}
		}
		r.parts = append(r.parts, part{to: id, m: &van.Message{Header: &pspb.Header{Head: head,
			Body: body, SimpleApp: true}}})
	}
	if len(r.parts) == 0 {
		return nil, fmt.Errorf("ps: %s: there is no such node or group", s)
	}
	return r, a.c.start(ctx, r)
}

// simpleRequest is a request of a SimpleApp. It implements subject.
type simpleRequest struct {
	Request
	app  *SimpleApp
	head int32
	to   NodeID
}

func (s *simpleRequest) String() string {
	return fmt.Sprintf("request %d of app %d to %s", s.head, s.app.c.key.app, s.to)
}

func (s *simpleRequest) finish(parts []part) error {
	if handle := s.app.response; handle != nil {
		for i := range parts {
			handle(simpleData(parts[i].via, parts[i].response), s.app)
		}
	}
	return nil
}

func (s *simpleRequest) completed(error) {}

func (s *simpleRequest) keysOf(int) []uint64 { return nil }

// Respond answers a request. It copies body and does not wait. A second answer is an error.
func (a *SimpleApp) Respond(req SimpleData, body []byte) error {
	if req.answered == nil || req.answered.Swap(true) {
		return fmt.Errorf("ps: response of app %d to %s: the request was answered already, or is none",
			a.c.key.app, req.Sender)
	}
	err := a.c.po.respond(req.from, &van.Message{Header: &pspb.Header{Head: req.Head,
		Body:      bytes.Clone(body),
		SimpleApp: true, AppId: int32(a.c.key.app), CustomerId: int32(req.Customer),
		Timestamp: req.Timestamp}})
	if err != nil {
		return fmt.Errorf("ps: response of app %d: %w", a.c.key.app, public(err))
	}
	return nil
}
