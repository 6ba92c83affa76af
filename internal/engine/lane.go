package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
)

// work is a grant with this rank's tensors for it, in the same order.
type work struct {
	grant   *controller.Grant
	entries []*tensorqueue.Entry
}

// lane executes the grants of one process set, in order. It shares nothing with other lanes, so that a set that
// executes for seconds delays no other.
type lane struct {
	set            controller.Set
	me             int // position of this rank in the set
	queue          *tensorqueue.Queue
	manager        *ops.Manager
	maxResultBytes int64 // of an allgather
	buffer         fusion.Buffer
	counts         []int64 // scratch of allgather

	bell chan struct{}

	mu    sync.Mutex
	todo  []*work
	ended bool  // no more work will come
	err   error // answers everything that is left
}

// plan is the coordinator's choice for a response on this lane.
func (l *lane) plan(r *message.Response, numBytes int64) (message.Backend, message.Algorithm, error) {
	if err := l.checkResult(r.Kind, numBytes); err != nil {
		return message.NoBackend, message.NoAlgorithm, err
	}
	return l.manager.Plan(r, numBytes)
}

// checkResult refuses a result that would be allocated here because another rank says so, and cannot be.
func (l *lane) checkResult(k message.Kind, numBytes int64) error {
	if k == message.Allgather && numBytes > l.maxResultBytes {
		return fmt.Errorf("the result has %d bytes, want at most %d, the memory of the host", numBytes, l.maxResultBytes)
	}
	return nil
}

// push queues w.
func (l *lane) push(w *work) {
	l.mu.Lock()
	l.todo = append(l.todo, w)
	l.mu.Unlock()
	l.ring()
}

// end lets run return when nothing is left to do. An err answers whatever has not begun; what has begun is cut
// off by the end of run's context.
func (l *lane) end(err error) {
	l.mu.Lock()
	l.err, l.ended = err, true
	l.mu.Unlock()
	l.ring()
}

func (l *lane) ring() {
	select {
	case l.bell <- struct{}{}:
	default:
	}
}

// next takes the oldest work, waiting for it. It is nil at the end.
func (l *lane) next() (w *work, err error) {
	for {
		l.mu.Lock()
		switch {
		case len(l.todo) > 0:
			w, err = l.todo[0], l.err
			copy(l.todo, l.todo[1:])
			l.todo[len(l.todo)-1] = nil
			l.todo = l.todo[:len(l.todo)-1]
			l.mu.Unlock()
			return w, err
		case l.ended:
			l.mu.Unlock()
			return nil, nil
		}
		l.mu.Unlock()
		<-l.bell
	}
}

// run executes until end. finished hears of each piece of work, after its tensors were answered, and of its
// error. After an error the work is not answered before end says with what: the verdict may name another
// rank than the one whose channel broke.
func (l *lane) run(ctx context.Context, finished func(w *work, err error)) {
	for {
		w, err := l.next()
		if w == nil {
			return
		}
		if err == nil {
			if err = l.execute(ctx, w); err != nil {
				finished(w, err)
				err = l.verdict()
			}
		}
		if err != nil {
			for _, e := range w.entries {
				l.queue.Finish(e, opError(&e.Request, err))
			}
			continue
		}
		finished(w, nil)
	}
}

// verdict waits until the epoch is given up, and is why.
func (l *lane) verdict() error {
	for {
		l.mu.Lock()
		err := l.err
		l.mu.Unlock()
		if err != nil {
			return err
		}
		<-l.bell
	}
}

// execute runs w and answers its tensors. On error none is answered and all belong to the caller still.
func (l *lane) execute(ctx context.Context, w *work) error {
	r := w.grant.Responses[0]
	switch r.Kind {
	case message.Error:
		for i, e := range w.entries {
			l.queue.Finish(e, opError(&e.Request, &MismatchError{Tensor: e.Request.Name, Text: w.grant.Responses[i].Text}))
		}
		return nil
	case message.Barrier:
		for _, e := range w.entries {
			l.queue.Finish(e, nil)
		}
		return nil
	}
	backend, err := l.manager.Get(w.grant.Backend)
	if err != nil {
		return err
	}
	switch r.Kind {
	case message.Allreduce:
		err = l.allreduce(ctx, backend, w)
	case message.Allgather:
		err = l.allgather(ctx, backend, w)
	case message.Broadcast:
		err = l.broadcast(ctx, backend, w)
	default:
		err = fmt.Errorf("engine: granted operation %v is unknown", r.Kind)
	}
	if err != nil {
		return err
	}
	for _, e := range w.entries {
		l.queue.Finish(e, nil)
	}
	return nil
}

// allreduce reduces one tensor in its output, several in the fusion buffer.
func (l *lane) allreduce(ctx context.Context, backend ops.Backend, w *work) error {
	r := w.grant.Responses[0]
	var buf []byte
	if len(w.entries) == 1 {
		e := w.entries[0]
		buf = e.Output
		copyUnlessSame(buf, e.Input)
	} else {
		var total int64
		for _, e := range w.entries {
			total += int64(len(e.Input))
		}
		buf = l.buffer.Bytes(int(total))
		at := 0
		for _, e := range w.entries {
			at += copy(buf[at:], e.Input)
		}
	}
	op, post := r.Op, r.Postscale
	divide := kernel.DivideFunc(nil)
	if op == tensor.Average {
		op = tensor.Sum
		if divide = kernel.Divide(r.DType); divide == nil || post != 1 {
			divide, post = nil, post/float64(len(l.set.Ranks))
		}
	}
	if err := scale(r.DType, buf, r.Prescale); err != nil {
		return err
	}
	if err := backend.Allreduce(ctx, w.grant.Algorithm, r.DType, op, buf); err != nil {
		return err
	}
	if divide != nil {
		divide(buf, int64(len(l.set.Ranks)))
	}
	if err := scale(r.DType, buf, post); err != nil {
		return err
	}
	if len(w.entries) > 1 {
		at := 0
		for _, e := range w.entries {
			at += copy(e.Output, buf[at:])
		}
	}
	return nil
}

func scale(dt tensor.DType, buf []byte, factor float64) error {
	if factor == 1 || len(buf) == 0 {
		return nil
	}
	f, err := kernel.Scale(dt)
	if err != nil {
		return err
	}
	f(buf, factor)
	return nil
}

func copyUnlessSame(dst, src []byte) {
	if len(dst) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}

func (l *lane) allgather(ctx context.Context, backend ops.Backend, w *work) error {
	r, e := w.grant.Responses[0], w.entries[0]
	row, err := r.RowElems()
	if err != nil {
		return err
	}
	l.counts = l.counts[:0]
	var total, mine int64
	for i, rows := range r.FirstDims {
		if i == l.me {
			mine = total
		}
		n := rows * row * int64(r.DType.Size())
		l.counts = append(l.counts, n)
		total += n
	}
	if err := l.checkResult(r.Kind, total); err != nil {
		return err
	}
	e.Output = e.Allocate(int(total))
	copy(e.Output[mine:], e.Input)
	return backend.Allgather(ctx, w.grant.Algorithm, e.Output, l.counts)
}

func (l *lane) broadcast(ctx context.Context, backend ops.Backend, w *work) error {
	r, e := w.grant.Responses[0], w.entries[0]
	root := -1
	for i, m := range l.set.Ranks {
		if m == r.Root {
			root = i
		}
	}
	if root == l.me {
		copyUnlessSame(e.Output, e.Input)
	}
	return backend.Broadcast(ctx, w.grant.Algorithm, root, e.Output)
}

// blame is the rank to suspect for an error of execution: the peer whose channel failed, else this rank.
func blame(err error, self topo.Rank) (topo.Rank, string) {
	var p *transport.PeerError
	if errors.As(err, &p) {
		return p.Peer, cause(err).Error()
	}
	return self, err.Error()
}
