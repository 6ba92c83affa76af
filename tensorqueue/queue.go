// Package tensorqueue passes tensors from the training code to the background loop. A Queue is a table of the
// named tensors that are in flight, and a list of the entries that the loop has not taken yet.
//
// Goroutines that submit tensors call Add. The loop calls Pop. The goroutine that executes the response calls
// Finish. All methods are safe for concurrent use. The queue does not access the buffers of an entry. The
// buffers belong to the engine from the call of Add until Done is called. When Done is called, the entry may
// be used again.
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

// DuplicateNameError reports that Add was called with the name of a tensor that is in use: either a tensor
// with that name is in flight, or the program has not yet observed the completion of such a tensor.
type DuplicateNameError struct {
	// Op is the operation that was added, such as "allreduce". Name is the name of its tensor.
	Op, Name string
}

func (e *DuplicateNameError) Error() string {
	return fmt.Sprintf("%s %q: a tensor of this name is in flight, or the program has not yet observed its completion: "+
		"call Wait, or Poll until it returns true, or choose another name", e.Op, e.Name)
}

// Entry is a submitted operation on a tensor, or on a group that is one request.
type Entry struct {
	Set     topo.ProcessSetID
	Request message.Request
	// Input is this rank's contribution, and Output receives the result. The kind of the operation determines
	// which of them are used. A barrier uses neither. If InPlace is not set, Input and Output are the same
	// buffer or do not overlap. If InPlace is set in an allgather, Input is this rank's part of Output. If it
	// is set in a reducescatter, Output is this rank's part of Input, and the operation leaves the contents
	// of Input undefined.
	Input, Output []byte
	InPlace       bool
	// Parts are the tensors of a group that is one request. If Parts is set, Input and Output are not used.
	Parts []Part
	// Allocate is called to allocate Output when its size is known. It is for operations whose output size
	// depends on other ranks. If Output is already set, Allocate is not called.
	Allocate func(numBytes int) []byte
	// Splits is used by alltoall. It holds the number of rows of Input to send to each member. The engine
	// stores in Received the number of rows that come from each member.
	Splits, Received []int64
	// Device has what the engine must know of a tensor on a CUDA device. It is nil if the tensor is in host
	// memory.
	Device DevicePart
	// ErrorFeedback is used by an allreduce with compression. If it is set, the compression loss is added to
	// the next tensor with the same name.
	ErrorFeedback bool
	// Timeout is the maximum time that the operation may take. 0 means no limit.
	Timeout time.Duration
	// If Hold is set, the name stays in use after Done, until the Name that Held returns is released. Hold
	// has the same value in all entries of one call of Add.
	Hold bool
	// Guess may be the Name of an earlier entry with the same name, which saves Add a lookup. Any other Name
	// has no effect.
	Guess *Name
	// Response is the granted response. It is set before Done is called with a nil error.
	Response *message.Response
	// Done is called exactly once, when the engine no longer uses the buffers (but see cuda.DevicePart).
	// Unless Hold is set, the name is free by then.
	Done func(err error)
	// Times are the times at which the entry was submitted, sent, granted and begun.
	Times Times
	// Deadline is the time at which Timeout ends, counted from the start of the engine, or 0 if the operation
	// has no time limit. After Add, only the loop accesses it.
	Deadline time.Duration

	queue *Queue
	name  *Name
}

// Held returns the name that e keeps in use after Done, or nil if Hold is not set. If several entries were
// added by one call of Add, the name of the first entry stands for the names of all of them. Held must not be
// called after Done has returned.
func (e *Entry) Held() *Name {
	if !e.Hold {
		return nil
	}
	return e.name
}

// Name returns the state of the name of e, which Add has set.
func (e *Entry) Name() *Name { return e.name }

// DevicePart is a *cuda.DevicePart. The queue passes it on without a look into it.
type DevicePart interface{ OnDevice() }

// Part is a tensor of a group. Input is this rank's contribution, and Output receives the result.
type Part struct{ Input, Output []byte }

// Times are the times at which an entry was submitted, sent, granted and begun, counted from the start of the
// engine. A time of 0 means that the entry has not reached that state yet. Submitted does not change after
// Add. The other times are in nanoseconds, and any goroutine may load them.
type Times struct {
	Submitted            time.Duration
	Sent, Granted, Begun atomic.Int64
	// Grant is 256 times the number of the grant, plus the number of the backend that runs it. It is 0 before
	// the grant.
	Grant atomic.Uint64
}

// Name is the state of a name in a queue. The queue keeps it when the entry has ended, because most names are
// submitted again.
type Name struct {
	queue     *Queue
	text      string
	forgotten bool // whether the queue has dropped it

	entry *Entry // the entry in flight, or nil
	next  *Name  // the name of the next entry of the same call of Add, if Hold is set in the entries
	bit   uint32 // Request.Bit of the last entry with this name
	// holds counts the entries with Hold that have used the name so far. It changes only while the name is
	// free. released counts those whose names were released: the name is free when both are equal.
	holds    uint32
	released atomic.Uint32
}

// Release frees n and the names of the later entries of the same call of Add. It must be called once, after
// Done was called for all these entries. It takes no lock.
func (n *Name) Release() {
	for n != nil {
		next := n.next // read n.next before the Store, because after it another Add may use n
		n.released.Store(n.holds)
		n = next
	}
}

// free reports whether a tensor may be submitted under the name.
func (n *Name) free() bool { return n.entry == nil && n.released.Load() == n.holds }

// Queue holds the entries of one process set. Create it with New.
type Queue struct {
	mu       sync.Mutex
	names    map[string]*Name
	inFlight int
	limit    int // the number of names at which the queue calls forget
	pending  []*Entry
	closed   error
	// newest is the time at which the last entry of pending was submitted, or 0 if pending is empty.
	newest atomic.Int64
}

// minNames is the minimum of Queue.limit.
const minNames = 2048

// New returns an empty queue.
func New() *Queue {
	return &Queue{names: make(map[string]*Name), limit: minNames}
}

// Add submits all entries in the given order. If a name is in use, it submits none of them and returns a
// *DuplicateNameError. After Close, it returns the error that was passed to Close. If Add returns an error,
// Done is not called.
func (q *Queue) Add(entries ...*Entry) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed != nil {
		return q.closed
	}
	for i, e := range entries {
		n := q.nameOf(e)
		if !n.free() {
			for _, added := range entries[:i] {
				added.name.entry, added.name.holds = nil, added.name.released.Load()
			}
			return &DuplicateNameError{e.Request.Kind.String(), e.Request.Name}
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
	q.setNewest()
	return nil
}

// setNewest sets newest. The caller holds mu.
func (q *Queue) setNewest() {
	var newest time.Duration
	if n := len(q.pending); n > 0 {
		newest = max(q.pending[n-1].Times.Submitted, 1)
	}
	q.newest.Store(int64(newest))
}

// nameOf returns the state of the name of e. If the name has no state yet, nameOf creates one. The caller
// holds mu.
func (q *Queue) nameOf(e *Entry) *Name {
	text := e.Request.Name
	if n := e.Guess; n != nil && n.queue == q && !n.forgotten && n.text == text {
		return n
	}
	if n := q.names[text]; n != nil {
		return n
	}
	if len(q.names) >= q.limit {
		q.forget()
	}
	n := &Name{queue: q, text: text}
	q.names[text] = n
	return n
}

// forget drops the names that are not in use. It sets the limit to twice the number of remaining names, so
// that it is called again only after that number has doubled. The caller holds mu.
func (q *Queue) forget() {
	maps.DeleteFunc(q.names, func(_ string, n *Name) bool {
		n.forgotten = n.free()
		return n.forgotten
	})
	q.limit = max(minNames, 2*len(q.names))
}

// Pop appends the entries that were added since the last Pop to dst, in the order of submission. The entries
// stay in the table.
func (q *Queue) Pop(dst []*Entry) []*Entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	dst = append(dst, q.pending...)
	clear(q.pending)
	q.pending = q.pending[:0]
	q.setNewest()
	return dst
}

// Pending returns the number of entries that Pop would return now.
func (q *Queue) Pending() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.pending)
}

// Waiting reports whether Pop would return entries. It takes no lock, so that polling many idle queues is
// cheap.
func (q *Queue) Waiting() bool { return q.newest.Load() > 0 }

// Newest returns the time at which the newest of the entries was submitted that Pop would return. If there
// are none, it returns 0. It takes no lock.
func (q *Queue) Newest() time.Duration { return time.Duration(q.newest.Load()) }

// Find returns the entry in flight with the given name, or nil if there is none.
func (q *Queue) Find(name string) *Entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n := q.names[name]; n != nil {
		return n.entry
	}
	return nil
}

// Finish removes e from the table and calls e.Done with err. If e is not in the table anymore, Finish does
// nothing. Finish must not be called after Done was called, because then the caller may already have
// submitted e again.
func (e *Entry) Finish(err error) {
	q := e.queue
	q.mu.Lock()
	removed := q.remove(e)
	q.mu.Unlock()
	if removed {
		e.Done(err)
	}
}

// remove removes e from the table. It returns false if e was not there. The caller holds mu.
func (q *Queue) remove(e *Entry) bool {
	if e.name.entry != e {
		return false
	}
	e.name.entry, e.name.bit = nil, e.Request.Bit
	q.inFlight--
	return true
}

// Close makes every later Add fail with err. If Close is called again, the first error remains in effect.
// Entries that are in the table stay there.
func (q *Queue) Close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil {
		q.closed = err
	}
}

// Each calls visit for every entry in flight, in no particular order. No entry finishes until Each returns.
// visit must neither call methods of the queue or of an entry nor keep the entry.
func (q *Queue) Each(visit func(e *Entry)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, n := range q.names {
		if n.entry != nil {
			visit(n.entry)
		}
	}
}

// FinishAll finishes all entries for which the function which returns true, including entries that Pop has
// not returned yet. Each entry ends with the error that the function reason returns for it.
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
	q.setNewest()
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
