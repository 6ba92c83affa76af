// Package tensorqueue is where training code and the background loop meet: a table of the named tensors
// that are in flight, and the requests that the loop has not seen yet.
//
// Submitting goroutines Add; the loop Pops, and Takes an entry when its response is granted; whoever executes
// the response Finishes the entry. All methods are safe for concurrent use. The queue never looks into the buffers:
// between Add and the call of Done they belong to the engine. From the call of Done on an entry may be used again.
package tensorqueue

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// DuplicateNameError refuses a tensor whose name is in use: a tensor of that name is in flight, or the program that
// submitted it has not yet seen that it is done.
type DuplicateNameError struct {
	Kind message.Kind
	Name string
}

func (e *DuplicateNameError) Error() string {
	return fmt.Sprintf("%v %q: a tensor of this name is in flight, or nobody has waited for its handle; "+
		"wait for it (Wait, or Poll until it says true) or choose another name", e.Kind, e.Name)
}

// Entry is a submitted tensor.
type Entry struct {
	Set     topo.ProcessSetID
	Request message.Request
	// Input is this rank's contribution, Output where the result goes. The kind says which is used: a barrier has
	// neither. They are one buffer, or do not overlap, unless the operation is InPlace: then Input is this rank's
	// part of Output (allgather), or Output of Input (reducescatter, whose Input is undefined afterwards).
	Input, Output []byte
	InPlace       bool
	// Parts are the tensors of a group that is one request, in place of Input and Output.
	Parts []Part
	// Allocate makes Output once its size is known, for operations whose result depends on other ranks, unless Output
	// is there already.
	Allocate func(numBytes int) []byte
	// Splits is for alltoall: how many rows of Input each member gets. Received becomes how many rows came from each
	// member.
	Splits, Received []int64
	// ErrorFeedback is for a compressed allreduce: what compression lost is added to the next tensor of the name.
	ErrorFeedback bool
	// Timeout is how long the operation may take; 0 is for ever.
	Timeout time.Duration
	// Hold keeps the name in use after Done, until Held is released. It is the same for all entries of an Add.
	Hold bool
	// Response is what was granted. It is there before Done is called with nil.
	Response *message.Response
	// Done is called exactly once, after the engine has let go of the buffers and, without Hold, freed the name.
	Done func(err error)
	// Times say how far it has got.
	Times Times
	// Deadline is when Timeout ends, 0 if never. Nobody but the loop looks at it.
	Deadline time.Duration

	queue *Queue
	name  *Name
}

// Held returns the name that e holds beyond Done, and nil without Hold. That of the first entry of an Add stands for the
// names of all entries that were added with it. It must not be called after Done has returned.
func (e *Entry) Held() *Name {
	if !e.Hold {
		return nil
	}
	return e.name
}

// Part is a tensor of a group: what this rank contributes and where the result goes.
type Part struct{ Input, Output []byte }

// Times say how far an entry has got, in time since the engine's start; 0 is what has not happened. Submitted does not change after
// Add; the others are nanoseconds that any goroutine may look at.
type Times struct {
	Submitted            time.Duration
	Sent, Granted, Begun atomic.Int64
	// Grant is the number of the grant, times 256, and the backend that runs it; 0 as long as there is none.
	Grant atomic.Uint64
}

// Name is what a queue remembers of a name. It outlives the entries, for most names come again.
type Name struct {
	entry *Entry // in flight, or nil
	next  *Name  // held by the next entry of the same Add
	bit   uint32 // Request.Bit of the last entry
	// holds counts the entries with Hold, and changes only while the name is free; released counts those that were released.
	holds    uint32
	released atomic.Uint32
}

// Release frees n, and the names that were added after it in the same Add. It must be called once, after Done of all these
// entries. It takes no lock.
func (n *Name) Release() {
	for n != nil {
		next := n.next // before another Add may take n
		n.released.Store(n.holds)
		n = next
	}
}

// free reports whether the name may be submitted.
func (n *Name) free() bool { return n.entry == nil && n.released.Load() == n.holds }

// Queue holds the entries of one process set. Use New.
type Queue struct {
	mu       sync.Mutex
	names    map[string]*Name
	inFlight int
	limit    int // of names that are remembered
	pending  []*Entry
	closed   error
	waiting  atomic.Bool // pending is not empty
}

// minNames is the least limit of names that are remembered.
const minNames = 2048

// New makes an empty queue.
func New() *Queue {
	return &Queue{names: make(map[string]*Name), limit: minNames}
}

// Add submits entries: all of them, in this order, or none. It fails with *DuplicateNameError if a name is in use, or with
// the error given to Close, and then Done is not called.
func (q *Queue) Add(entries ...*Entry) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed != nil {
		return q.closed
	}
	for i, e := range entries {
		n := q.nameOf(e.Request.Name)
		if !n.free() {
			for _, added := range entries[:i] {
				added.name.entry, added.name.holds = nil, added.name.released.Load()
			}
			return &DuplicateNameError{e.Request.Kind, e.Request.Name}
		}
		n.entry, n.next = e, nil
		e.queue, e.name = q, n
		e.Request.Bit = n.bit
		if e.Hold {
			n.holds++
			if i > 0 {
				entries[i-1].name.next = n
			}
		}
	}
	q.inFlight += len(entries)
	q.pending = append(q.pending, entries...)
	if !q.waiting.Load() {
		q.waiting.Store(true)
	}
	return nil
}

// nameOf returns what is known of a name.
func (q *Queue) nameOf(text string) *Name {
	if n := q.names[text]; n != nil {
		return n
	}
	if len(q.names) >= q.limit {
		q.forget()
	}
	n := new(Name)
	q.names[text] = n
	return n
}

// forget drops the names that are not in use. The next time is after as many new ones as are kept.
func (q *Queue) forget() {
	maps.DeleteFunc(q.names, func(_ string, n *Name) bool { return n.free() })
	q.limit = max(minNames, 2*len(q.names))
}

// Pop appends to dst the entries added since the last Pop, in order of submission. They stay in the table.
func (q *Queue) Pop(dst []*Entry) []*Entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting.Store(false)
	dst = append(dst, q.pending...)
	clear(q.pending)
	q.pending = q.pending[:0]
	return dst
}

// Pending returns the number of entries to Pop.
func (q *Queue) Pending() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.pending)
}

// Waiting reports whether there is something to Pop. It takes no lock, so looking at many idle queues is cheap.
func (q *Queue) Waiting() bool { return q.waiting.Load() }

// Find returns the entry of a name, or nil.
func (q *Queue) Find(name string) *Entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n := q.names[name]; n != nil {
		return n.entry
	}
	return nil
}

// Finish takes e from the table and calls its Done. It does nothing if e is not in its queue any more, but it must not be called after
// Done was: e may be another by then.
func (e *Entry) Finish(err error) {
	q := e.queue
	q.mu.Lock()
	here := q.remove(e)
	q.mu.Unlock()
	if here {
		e.Done(err)
	}
}

// remove takes e from the table, if it is there.
func (q *Queue) remove(e *Entry) bool {
	if e.name.entry != e {
		return false
	}
	e.name.entry, e.name.bit = nil, e.Request.Bit
	q.inFlight--
	return true
}

// Close makes every later Add fail with err. The first err stays. Entries in the table are not touched.
func (q *Queue) Close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil {
		q.closed = err
	}
}

// Each calls visit for every entry that was added and not finished, in no particular order. Until it returns none of them
// finishes: visit must not call methods of the queue or of an entry, nor keep the entry.
func (q *Queue) Each(visit func(e *Entry)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, n := range q.names {
		if n.entry != nil {
			visit(n.entry)
		}
	}
}

// FinishAll finishes all entries for which which is true, popped or not, each with what reason says.
func (q *Queue) FinishAll(which func(e *Entry) bool, reason func(e *Entry) error) {
	q.mu.Lock()
	var found []*Entry
	for _, n := range q.names {
		if e := n.entry; e != nil && which(e) {
			found = append(found, e)
			q.remove(e)
		}
	}
	q.pending = slices.DeleteFunc(q.pending, func(e *Entry) bool { return e.name.entry != e })
	q.waiting.Store(len(q.pending) > 0)
	q.mu.Unlock()
	for _, e := range found {
		e.Done(reason(e))
	}
}

// Len returns the number of tensors in flight.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.inFlight
}
