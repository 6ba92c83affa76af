package client

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/tensor"
)

// Node is the place of a node of a parameter server.
type Node struct {
	Role                         string // scheduler, server or worker
	Rank, NumWorkers, NumServers int
}

// StartNode joins a job of a parameter server as a node. environ and given are as in Init. A connection has
// at most one node.
func (c *Client) StartNode(ctx context.Context, environ []string, given map[string]string) (Node, error) {
	r, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_StartNode{
		StartNode: &sidecarpb.StartNode{Settings: c.changed(environ, given)}}}, -1)
	n := r.GetNode()
	return Node{n.GetRole(), int(n.GetRank()), int(n.GetNumWorkers()), int(n.GetNumServers())}, err
}

// Serve makes the server of an app, with a built-in handler and its parameters.
func (c *Client) Serve(ctx context.Context, app int, dt tensor.DType, handler string,
	parameters []float64) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Serve{Serve: &sidecarpb.Serve{
		App: int32(app), Dtype: uint32(dt), Handler: handler, Parameters: parameters}}}, -1)
	return err
}

// Clock ends an iteration of the worker.
func (c *Client) Clock(ctx context.Context) error {
	_, err := c.request(ctx,
		&sidecarpb.Request{What: &sidecarpb.Request_Clock{Clock: new(sidecarpb.Clock)}}, -1)
	return err
}

// NodeBarrier waits for the other nodes of a group.
func (c *Client) NodeBarrier(ctx context.Context, group int) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_NodeBarrier{
		NodeBarrier: &sidecarpb.NodeBarrier{Group: int32(group)}}}, -1)
	return err
}

// Finalize leaves the job of the parameter server, after a barrier of all nodes if barrier is set.
func (c *Client) Finalize(ctx context.Context, barrier bool) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Finalize{
		Finalize: &sidecarpb.Finalize{Barrier: barrier}}}, -1)
	return err
}

// FailNode leaves the job of the parameter server because the program has failed. It also ends a Finalize in
// progress. It is the last request of this process (see last).
func (c *Client) FailNode(ctx context.Context, reason string) error {
	return c.last(ctx, "fail", func(ctx context.Context) error {
		_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Finalize{
			Finalize: &sidecarpb.Finalize{Failure: reason}}}, -1)
		return err
	})
}

// Exchange is a push, a pull, or a push and then a pull of the same keys.
type Exchange struct {
	App               int
	DType             tensor.DType
	Push, Pull        bool
	Keys              []uint64
	Values            []byte // to push
	Results           []byte // where the pulled values go
	Command, Priority int32
}

// Exchange begins x. The memory of x belongs to the client until done is called, which happens once if
// Exchange returns nil.
func (c *Client) Exchange(x *Exchange, done func(error)) error {
	c.using.RLock()
	defer c.using.RUnlock()
	if err := c.Over(); err != nil {
		return err
	}
	keys := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x.Keys))), 8*len(x.Keys))
	var blocks [][]byte
	free := func() {
		for _, b := range blocks {
			if err := c.memory.heap.Free(b); err != nil {
				c.fail(fmt.Sprintf("cannot free memory: %v", err))
			}
		}
	}
	// stage returns where the sidecar finds b, and the block if it is a copy.
	stage := func(b []byte) (*sidecarpb.Memory, []byte, error) {
		if len(b) == 0 {
			return new(sidecarpb.Memory), nil, nil
		}
		at, ok, err := c.memory.find(b)
		var block []byte
		if err == nil && (!ok || at.offset%8 != 0) {
			if block, at, err = c.memory.stage(len(b)); err == nil {
				blocks = append(blocks, block)
			}
		}
		return &sidecarpb.Memory{Arena: at.arena, Offset: uint64(at.offset), Bytes: uint64(len(b))}, block,
			err
	}
	var (
		at     [3]*sidecarpb.Memory
		copies [3][]byte
		errs   [3]error
	)
	memory := [3][]byte{keys, x.Values, x.Results}
	for i, b := range memory {
		at[i], copies[i], errs[i] = stage(b)
	}
	if err := errors.Join(errs[:]...); err != nil {
		free()
		return err
	}
	for i := range 2 {
		copy(copies[i], memory[i])
	}
	err := c.send(&sidecarpb.Request{What: &sidecarpb.Request_Exchange{Exchange: &sidecarpb.Exchange{
		App: int32(x.App), Dtype: uint32(x.DType), Keys: at[0], Push: x.Push, Pull: x.Pull, Values: at[1],
		Results: at[2],
		Command: x.Command, Priority: x.Priority}}}, -1, func(_ *sidecarpb.Reply, err error) {
		if err == nil {
			copy(x.Results, copies[2])
		}
		free()
		done(err)
	})
	if err != nil {
		free()
	}
	return err
}
