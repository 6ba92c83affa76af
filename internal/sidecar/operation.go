package sidecar

import (
	"context"
	"errors"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/ops"
)

// operation is one execution of a plan.
type operation struct {
	rank.Execution
	plan *plan
	conn *conn
	id   uint64
	uses []*clientArena
	// allocated[i] is the output that the sidecar has allocated for tensor i. If the client provides all
	// outputs, allocated is nil.
	allocated [][]byte
}

// newOperation returns an operation that executes p for the submission s, and marks its memory as in use
// until answer is called. If newOperation returns an error, it has marked nothing, and the caller must not
// call any method of the operation except answer.
func (c *conn) newOperation(p *plan, s submission) (*operation, error) {
	o := &operation{plan: p, conn: c, id: s.id}
	o.Operation, o.Number, o.Owner = &p.Operation, s.call, o
	if p.wrong != nil {
		return o, p.wrong
	}
	var err error
	if o.uses, err = c.memory.use(p.places, make([]*clientArena, 0, len(p.places))); err != nil {
		return o, usage(p.Kind.String(), p.Name, err)
	}
	if p.makes {
		o.allocated = make([][]byte, len(p.Tensors))
	}
	o.Buffers = make([]rank.Buffer, len(p.Tensors))
	for i := range o.Buffers {
		o.Buffers[i] = rank.Buffer{In: p.places[2*i].to, Out: p.places[2*i+1].to}
	}
	return o, nil
}

// runner runs operations on a rank. rankRunner implements it.
type runner interface {
	// Begin queues o for the engine, which processes it at the next call of Notify or Drive. If Begin returns
	// an error, o is not queued and o.done will not be called.
	Begin(o *operation) error
	Notify()
	Drive(ctx context.Context, done func() bool)
}

// rankRunner runs operations on a rank. It implements runner.
type rankRunner struct{ *rank.Rank }

// Drive implements runner.
func (r rankRunner) Drive(ctx context.Context, done func() bool) { r.Engine.Drive(ctx, done) }

// Notify implements runner.
func (r rankRunner) Notify() { r.Engine.Notify() }

// Begin implements runner. It submits o to the engine.
func (r rankRunner) Begin(o *operation) error {
	o.Rank = r.Rank
	return o.Begin()
}

// begin starts the operation o on the rank. It returns an error if there is no rank.
func (s *Server) begin(o *operation) error {
	r := s.running.Load()
	if r == nil {
		return o.plan.Misuse("%w", rank.ErrNotInitialized)
	}
	return (*r).Begin(o)
}

// Allocate implements rank.Owner. It allocates the output of tensor i in an arena of the sidecar.
func (o *operation) Allocate(i, numBytes int) ([]byte, error) {
	if numBytes == 0 {
		return []byte{}, nil
	}
	b, err := arena.Alloc(numBytes)
	if err == nil {
		o.allocated[i] = b
	}
	return b, err
}

// freeOutputs frees the outputs that the sidecar has allocated.
func (o *operation) freeOutputs() {
	for _, b := range o.allocated {
		if b != nil {
			o.conn.server.check(arena.Free(b))
		}
	}
	o.allocated = nil
}

// plain reports whether a client needs to know no more about o than that it has succeeded. It is false if the
// sidecar provides an output, even an empty output, because the client then needs the shape of the output.
func (o *operation) plain() bool {
	p := o.plan
	return !p.makes && !p.Kind.SendsRows() && p.Kind != message.Join &&
		(p.Kind != message.Recv || p.Peer != int(p2p.AnySource))
}

// completion returns the answer to an operation that has succeeded. For an empty output that the sidecar
// provides, the answer has arena 0.
func (o *operation) completion() *sidecarpb.Completion {
	a := &sidecarpb.Completion{ReceivedSplits: o.Received()}
	switch o.Kind {
	case message.Join:
		a.LastJoined = int32(o.LastJoined())
	case message.Recv:
		a.Source = int32(o.Source())
	}
	for i, b := range o.Buffers {
		at := &sidecarpb.Memory{Bytes: uint64(len(b.Out))}
		switch given := o.plan.places[2*i+1]; {
		case !given.none:
			at.Arena, at.Offset = given.arena, given.offset
		case len(b.Out) > 0:
			ref, _ := arena.Find(b.Out)
			at.Arena, at.Offset = wire.OwnArenas+ref.Chunk, uint64(ref.Offset)
		}
		a.Results = append(a.Results, &sidecarpb.Result{Shape: o.Shape(i), Memory: at})
	}
	return a
}

// Finished implements rank.Owner. It is called once for each operation that was started, when the operation
// has finished. err is the error of the operation, or nil.
func (o *operation) Finished(err error) {
	o.conn.server.operations.Add(1)
	o.answer(err)
}

// answer releases the memory that o uses, and then sends the client the result of o or, if err is not nil,
// err.
func (o *operation) answer(err error) {
	c := o.conn
	if _, is := errors.AsType[*ops.InUseError](err); !is { // else a device may still use the memory
		c.server.check(c.memory.unuse(o.uses))
	}
	if err != nil {
		o.freeOutputs()
	}
	var r *sidecarpb.Reply
	if err != nil || !o.plain() {
		r = &sidecarpb.Reply{Id: o.id}
		if err == nil {
			a := o.completion()
			err = c.handOver(o, a)
			r.What = &sidecarpb.Reply_Completion{Completion: a}
		}
		if err != nil {
			r.What, r.Error = nil, wire.Describe(err)
		}
	}
	if o.plan.Kind.IsMessage() {
		c.messages.Add(-1)
	}
	c.leave(o.id, o.plan.Weight())
	c.drop(o.plan)
	// The operation is completed before the answer is sent, because a client that has the answer may submit
	// the next operation.
	c.ring.complete(o.id, r == nil)
	if r != nil {
		c.reply(r)
	}
}

// handOver gives the client access to the results of o, which the completion a describes. If the client has
// left, or an arena cannot be sent to the client, handOver frees the results.
func (c *conn) handOver(o *operation, a *sidecarpb.Completion) error {
	if o.allocated == nil {
		return nil
	}
	given, err := c.announce(o, a)
	// The caller must not hold mu here, because freeing may call Server.chunkRemoved, which acquires mu.
	if !given {
		o.freeOutputs()
	}
	return err
}

// announce sends the client the arenas that contain results of o, except arenas that the client already
// knows. Then it records that the client holds the results. If the client has left, announce does nothing and
// given is false.
func (c *conn) announce(o *operation, a *sidecarpb.Completion) (given bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left {
		return false, nil
	}
	for _, r := range a.Results {
		number := r.Memory.Arena
		if number < wire.OwnArenas || c.announced[number] {
			continue
		}
		notice, fd, err := c.server.chunks.announcement(number - wire.OwnArenas)
		if err != nil {
			return false, err
		}
		c.announced[number] = true
		_ = c.out.Send(notice, fd) // it can be encoded, because it has no texts
	}
	for i, r := range a.Results {
		if b := o.allocated[i]; b != nil {
			c.places[origin{r.Memory.Arena, r.Memory.Offset}] = b
		}
	}
	return true, nil
}

// announceRemoval notifies the client that an arena of the sidecar was removed. If the client does not know
// the arena, announceRemoval does nothing.
func (c *conn) announceRemoval(number uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.announced[number] {
		delete(c.announced, number)
		_ = c.out.Send(&sidecarpb.Reply{What: &sidecarpb.Reply_DropArena{
			DropArena: &sidecarpb.DropArena{Arena: number}}}, -1) // as in announce
	}
}
