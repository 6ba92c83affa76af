package tensorqueue_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

func entry(name string, done func(error)) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Allreduce, Name: name}, Done: done}
}

func TestLifeOfAnEntry(t *testing.T) {
	q := tensorqueue.New()
	var got []error
	e := entry("x", func(err error) {
		// The name must be free when Done is called, so that Done may submit a tensor with this name again.
		if q.Find("x") != nil {
			t.Error("the name is in use during Done")
		}
		got = append(got, err)
	})
	if err := q.Add(e); err != nil {
		t.Fatal(err)
	}
	var dup *tensorqueue.DuplicateNameError
	if err := q.Add(entry("x", nil)); !errors.As(err, &dup) || dup.Name != "x" {
		t.Errorf("second x: got %v, want a DuplicateNameError", err)
	}
	if p := q.Pop(nil); len(p) != 1 || p[0] != e {
		t.Errorf("popped %v", p)
	}
	if p := q.Pop(nil); len(p) != 0 {
		t.Errorf("popped %v again", p)
	}
	if err := q.Add(entry("x", nil)); err == nil {
		t.Error("Add accepted the name of a popped entry")
	}
	if q.Find("x") != e || q.Len() != 1 {
		t.Error("the popped entry is not in the table")
	}
	boom := errors.New("boom")
	e.Finish(boom)
	e.Finish(nil)
	if !slices.Equal(got, []error{boom}) {
		t.Errorf("Done was called with %v, want once with %v", got, boom)
	}
	if err := q.Add(entry("x", func(error) {})); err != nil {
		t.Errorf("a freed name: %v", err)
	}
}

func TestClose(t *testing.T) {
	q := tensorqueue.New()
	finished := map[string]error{}
	for _, n := range []string{"a", "b", "c"} {
		if err := q.Add(entry(n, func(err error) { finished[n] = err })); err != nil {
			t.Fatal(err)
		}
	}
	q.Find("b").Finish(nil)
	first, second := errors.New("first"), errors.New("second")
	q.Close(first)
	q.Close(second)
	if err := q.Add(entry("d", nil)); err != first {
		t.Errorf("add after close: got %v, want %v", err, first)
	}
	all := func(*tensorqueue.Entry) bool { return true }
	if q.Pop(nil); len(finished) != 1 {
		t.Errorf("finished %v, want only b", finished)
	}
	q.FinishAll(all, func(*tensorqueue.Entry) error { return second })
	if len(finished) != 3 || finished["a"] != second || finished["b"] != nil || finished["c"] != second ||
		q.Len() != 0 {
		t.Errorf("finished %v, want a and c with %v, and b with nil", finished, second)
	}
}

// FinishAll also removes entries that Pop has not returned. Pop must not return such an entry later, because
// it may have been submitted again by then.
func TestFinishAllTakesWhatIsPending(t *testing.T) {
	q := tensorqueue.New()
	ended := errors.New("ended")
	finished := map[string]error{}
	for _, n := range []string{"a", "b", "c"} {
		if err := q.Add(entry(n, func(err error) { finished[n] = err })); err != nil {
			t.Fatal(err)
		}
	}
	finish := func(names string) {
		q.FinishAll(func(e *tensorqueue.Entry) bool { return strings.Contains(names, e.Request.Name) },
			func(*tensorqueue.Entry) error { return ended })
	}
	finish("ac")
	if got := q.Pop(nil); len(got) != 1 || got[0].Request.Name != "b" || len(finished) != 2 {
		t.Errorf("%d entries are left to pop and %v finished, want only b left", len(got), finished)
	}
	if err := q.Add(entry("a", func(err error) { finished["a"] = err })); err != nil {
		t.Fatal(err)
	}
	finish("ab")
	if got := q.Pop(nil); len(got) != 0 || q.Waiting() || q.Pending() != 0 || q.Len() != 0 ||
		len(finished) != 3 {
		t.Errorf("%d entries are left to pop, %d in flight, and %v finished, want none", len(got), q.Len(),
			finished)
	}
}

// Newest returns the time of the newest entry that Pop has not returned and that is in flight.
func TestNewest(t *testing.T) {
	q := tensorqueue.New()
	want := func(at time.Duration) {
		t.Helper()
		if got := q.Newest(); got != at || q.Waiting() != (at > 0) {
			t.Errorf("got newest %v and waiting %v, want %v", got, q.Waiting(), at)
		}
	}
	want(0)
	for i, n := range []string{"a", "b", "c"} {
		e := entry(n, func(error) {})
		e.Times.Submitted = time.Duration(10 * i) // 0 for the first, which waits too
		if err := q.Add(e); err != nil {
			t.Fatal(err)
		}
		want(max(e.Times.Submitted, 1))
	}
	q.FinishAll(func(e *tensorqueue.Entry) bool { return e.Request.Name == "c" },
		func(*tensorqueue.Entry) error { return nil })
	want(10)
	q.Pop(nil)
	want(0)
}

// Add adds either all given entries or none of them. If a name is in use, or if two of the entries have the
// same name, Add returns an error, and the other names stay free.
func TestAddIsAllOrNothing(t *testing.T) {
	for _, c := range []struct {
		names []string
		dup   string
	}{
		{[]string{"taken", "a", "b"}, "taken"},
		{[]string{"a", "taken", "b"}, "taken"},
		{[]string{"a", "b", "taken"}, "taken"},
		{[]string{"a", "b", "a"}, "a"},
	} {
		t.Run(fmt.Sprint(c.names), func(t *testing.T) {
			q := tensorqueue.New()
			if err := q.Add(entry("taken", nil)); err != nil {
				t.Fatal(err)
			}
			q.Pop(nil)
			var entries []*tensorqueue.Entry
			for _, n := range c.names {
				entries = append(entries, entry(n, func(error) { t.Errorf("Done of %q was called", n) }))
			}
			var dup *tensorqueue.DuplicateNameError
			if err := q.Add(entries...); !errors.As(err, &dup) || dup.Name != c.dup {
				t.Errorf("got error %v, want a DuplicateNameError for %q", err, c.dup)
			}
			if p := q.Pop(nil); len(p) != 0 || q.Len() != 1 {
				t.Errorf("%d entries are pending and %d in flight, want 0 and 1", len(p), q.Len())
			}
			if err := q.Add(entry("a", nil), entry("b", nil)); err != nil {
				t.Errorf("the names are not free: %v", err)
			}
			if p := q.Pop(nil); len(p) != 2 || p[0].Request.Name != "a" || p[1].Request.Name != "b" {
				t.Errorf("popped %v, want a and b", p)
			}
		})
	}
}

// If the queue is closed, Add returns the error that was passed to Close, and adds no entries.
func TestAddManyAfterClose(t *testing.T) {
	q := tensorqueue.New()
	over := errors.New("over")
	q.Close(over)
	if err := q.Add(entry("a", nil), entry("b", nil)); err != over || q.Len() != 0 || len(q.Pop(nil)) != 0 {
		t.Errorf("got error %v and %d entries in flight, want %v and 0", err, q.Len(), over)
	}
}

// Finish is called twice for an entry. Another entry was added with the same name between the calls. The
// second call does not finish that entry.
func TestFinishTwice(t *testing.T) {
	q := tensorqueue.New()
	calls := 0
	first := entry("x", func(error) { calls++ })
	if err := q.Add(first); err != nil {
		t.Fatal(err)
	}
	first.Finish(nil)
	second := entry("x", func(error) { t.Error("the second x is done") })
	if err := q.Add(second); err != nil {
		t.Fatal(err)
	}
	first.Finish(nil)
	if calls != 1 || q.Find("x") != second {
		t.Errorf("%d calls of Done, and x is %v, want 1 and the second entry", calls, q.Find("x"))
	}
}

// Several goroutines add entries while another goroutine pops and finishes them. Every entry is popped once
// and finished once. The entries of each goroutine are popped in the order in which the goroutine added them.
func TestConcurrentUse(t *testing.T) {
	q := tensorqueue.New()
	const submitters, each = 4, 500
	var done atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	for s := range submitters {
		wg.Go(func() {
			for i := range each {
				if err := q.Add(entry(fmt.Sprintf("%d/%d", s, i), func(error) { done.Add(1) })); err != nil {
					t.Error(err)
				}
			}
		})
	}
	last := map[int]int{}
	for popped := 0; popped < submitters*each; {
		for _, e := range q.Pop(nil) {
			var s, i int
			if _, err := fmt.Sscanf(e.Request.Name, "%d/%d", &s, &i); err != nil {
				t.Fatal(err)
			}
			if i != last[s] {
				t.Fatalf("submitter %d: got %d, want %d", s, i, last[s])
			}
			last[s]++
			popped++
			wg.Go(func() { e.Finish(nil) })
		}
	}
	wg.Wait()
	if n := done.Load(); n != submitters*each || q.Len() != 0 {
		t.Errorf("%d calls of Done and %d entries left, want %d and 0", n, q.Len(), submitters*each)
	}
}

// If a name is submitted again, Add sets Request.Bit to the value in the previous entry with that name. After
// 300,000 names, the queue has dropped the names that are not in use, but still has the entry that is in
// flight.
func TestNames(t *testing.T) {
	q := tensorqueue.New()
	held := entry("held", func(error) {})
	if err := q.Add(held); err != nil {
		t.Fatal(err)
	}
	once := func(name string, bit uint32) (guess uint32) {
		e := entry(name, func(error) {})
		if err := q.Add(e); err != nil {
			t.Fatal(err)
		}
		q.Pop(nil)
		guess, e.Request.Bit = e.Request.Bit, bit
		e.Finish(nil)
		return guess
	}
	once("x", 7)
	if got := once("x", 8); got != 7 {
		t.Errorf("Add has set the bit to %d, want 7", got)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const many = 300_000
	for i := range many {
		once(fmt.Sprint("allreduce.noname.", i), 1)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if kept := int64(after.HeapAlloc) - int64(before.HeapAlloc); kept > 10*many {
		t.Errorf("%d bytes are kept after %d names", kept, many)
	}
	if q.Find("held") != held || q.Len() != 1 {
		t.Error("the queue has dropped the entry in flight")
	}
}

// A guess of the name saves a lookup. A guess that is wrong, or that was right once, has no effect.
func TestGuess(t *testing.T) {
	q, other := tensorqueue.New(), tensorqueue.New()
	add := func(q *tensorqueue.Queue, name string, guess *tensorqueue.Name) *tensorqueue.Entry {
		t.Helper()
		e := entry(name, func(error) {})
		e.Guess = guess
		if err := q.Add(e); err != nil {
			t.Fatal(err)
		}
		if q.Find(name) != e {
			t.Errorf("%s is not found", name)
		}
		return e
	}
	e := add(q, "x", nil)
	x := e.Name()
	e.Finish(nil)
	if e = add(q, "x", x); e.Name() != x {
		t.Error("the right guess is not the name")
	}
	for _, wrong := range []*tensorqueue.Entry{add(q, "y", x), add(other, "x", x)} {
		if wrong.Name() == x {
			t.Errorf("%s has a wrong name", wrong.Request.Name)
		}
	}
	duplicate := entry("x", nil)
	duplicate.Guess = x
	if err := q.Add(duplicate); err == nil {
		t.Error("the guess hides a duplicate")
	}
	e.Finish(nil)
	for i := range 5000 { // the queue forgets x
		add(q, fmt.Sprint(i), nil).Finish(nil)
	}
	e = add(q, "x", x)
	if err := q.Add(entry("x", nil)); err == nil {
		t.Error("a forgotten name hides a duplicate")
	}
	e.Finish(nil)
}

// The queue does not keep an entry that has ended in memory.
func TestEndedEntryIsFreed(t *testing.T) {
	q, freed := tensorqueue.New(), make(chan struct{})
	func() {
		e := entry("x", func(error) {})
		runtime.AddCleanup(e, func(freed chan struct{}) { close(freed) }, freed)
		if err := q.Add(e); err != nil {
			t.Fatal(err)
		}
		q.Pop(nil)
		e.Finish(nil)
	}()
	runtime.GC()
	select {
	case <-freed:
	case <-time.After(time.Minute):
		t.Error("the entry is still in memory")
	}
	runtime.KeepAlive(q)
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	q := tensorqueue.New()
	e := entry("x", func(error) {})
	var buf []*tensorqueue.Entry
	step := func() {
		_ = q.Add(e)
		buf = q.Pop(buf[:0])
		e.Finish(nil)
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations for a submission, want 0", n)
	}
}

// If Hold is set in an entry, its name stays in use after the entry has finished, until Release is called.
// Release also frees the names of the later entries of the same call of Add, but no other names. This holds
// even if the queue has thousands of other names.
func TestHold(t *testing.T) {
	q := tensorqueue.New()
	add := func(names ...string) ([]*tensorqueue.Entry, error) {
		var entries []*tensorqueue.Entry
		for _, name := range names {
			e := entry(name, func(error) {})
			e.Hold = true
			entries = append(entries, e)
		}
		return entries, q.Add(entries...)
	}
	group, err := add("a", "b", "c")
	if err != nil {
		t.Fatal(err)
	}
	held := group[0].Held()
	for _, e := range group {
		e.Finish(nil)
	}
	if q.Len() != 0 || q.Find("a") != nil {
		t.Errorf("%d entries are in flight, want none", q.Len())
	}
	for i := range 10_000 {
		e := entry(fmt.Sprint(i), func(error) {})
		if err := q.Add(e); err != nil {
			t.Fatal(err)
		}
		e.Finish(nil)
	}
	for _, name := range []string{"a", "b", "c"} {
		var dup *tensorqueue.DuplicateNameError
		if _, err := add("new", name); !errors.As(err, &dup) || dup.Name != name {
			t.Errorf("again %q: got error %v, want a DuplicateNameError", name, err)
		}
	}
	held.Release()
	one, err := add("new") // "new" is free, because the earlier Adds have failed
	if err != nil {
		t.Error(err)
	}
	if _, err := add("c", "b", "a"); err != nil {
		t.Errorf("after the release: %v", err)
	}
	one[0].Finish(nil)
	one[0].Held().Release()
	if _, err := add("a"); err == nil {
		t.Error("the release of new has freed a")
	}
}
