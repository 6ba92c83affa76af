package testcluster

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// Rank is one rank of a job. Most of its methods may be called from several goroutines. But Wait, Try, Do,
// Must and Fatalf may end the rank's function, so only the goroutine that runs this function may call them.
type Rank struct {
	topo.Rank
	Size   int
	Engine *engine.Engine
	c      *cluster

	mu   sync.Mutex
	sets []controller.Set // all process sets of the job, including sets without this rank
}

func newRank(c *cluster, rank topo.Rank, e *engine.Engine, sets []controller.Set) *Rank {
	return &Rank{Rank: rank, Size: c.o.Ranks, Engine: e, c: c, sets: slices.Clone(sets)}
}

// Members returns the ranks of a process set in ascending order. If this rank does not know the set, it
// returns nil.
func (r *Rank) Members(set topo.ProcessSetID) []topo.Rank {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sets {
		if s.ID == set {
			return s.Ranks
		}
	}
	return nil
}

// changeSets updates the list of process sets if done is the response to an operation that adds or removes a
// process set.
func (r *Rank) changeSets(done *message.Response) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch done.Kind {
	case message.AddProcessSet:
		r.sets = append(r.sets, controller.Set{ID: done.Set, Ranks: done.Ranks})
	case message.RemoveProcessSet:
		r.sets = slices.DeleteFunc(r.sets, func(s controller.Set) bool { return s.ID == done.Set })
	}
}

// Submit passes operations of one process set to the engine. If it returns an error, it has passed no
// operation. Submit does not wait for the operations. It allocates missing outputs and sets missing Splits.
func (r *Rank) Submit(ops ...*Op) error {
	entries := make([]*tensorqueue.Entry, len(ops))
	for i, op := range ops {
		if err := op.prepare(r); err != nil {
			return err
		}
		if err := op.Request.Check(); err != nil {
			return &engine.OpError{Op: op.Request.Kind.String(), Tensor: op.Request.Name, Err: err}
		}
		entries[i] = &op.Entry
	}
	if err := r.Engine.Queue(entries...); err != nil {
		return err
	}
	r.Engine.NotifyLater()
	r.Engine.Flush()
	return nil
}

// Wait waits for operations that were submitted, and returns their joined errors. If the job fails in the
// meantime, Wait ends the rank's function, as Fatalf does.
func (r *Rank) Wait(ops ...*Op) error {
	var errs []error
	for _, op := range ops {
		select {
		case <-op.done:
			errs = append(errs, op.Err)
		case <-r.c.ctx.Done():
			r.Fatalf("%v %q: the job ended before the operation: %v", op.Request.Kind, op.Request.Name,
				context.Cause(r.c.ctx))
		}
	}
	return errors.Join(errs...)
}

// Try submits operations, waits for them and returns their joined errors.
func (r *Rank) Try(ops ...*Op) error {
	if err := r.Submit(ops...); err != nil {
		return err
	}
	return r.Wait(ops...)
}

// Do submits operations and waits for them. If an operation fails, Do calls Fatalf.
func (r *Rank) Do(ops ...*Op) { r.Must(r.Try(ops...)) }

// Must calls Fatalf if err is not nil.
func (r *Rank) Must(err error) {
	if err != nil {
		r.Fatalf("%v", err)
	}
}

// Errorf makes the test fail with a message that names the rank.
func (r *Rank) Errorf(format string, args ...any) {
	r.c.t.Errorf("rank %d: %s", r.Rank, fmt.Sprintf(format, args...))
}

// Fatalf makes the test fail, ends the job and does not return. Waits of the other ranks then end with an
// error. If another rank has already ended the job, Fatalf only logs the message, because this failure is a
// consequence of the earlier one.
func (r *Rank) Fatalf(format string, args ...any) {
	if r.c.ctx.Err() != nil {
		r.c.t.Logf("rank %d: %s", r.Rank, fmt.Sprintf(format, args...))
	} else {
		r.Errorf(format, args...)
	}
	r.c.fail(fmt.Errorf("rank %d failed", r.Rank))
	runtime.Goexit()
}
