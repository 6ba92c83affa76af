package tensorqueue_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensorqueue"
)

func entry(name string, done func(error)) *tensorqueue.Entry {
	return &tensorqueue.Entry{Request: message.Request{Kind: message.Allreduce, Name: name}, Done: done}
}

func TestLifeOfAnEntry(t *testing.T) {
	q := tensorqueue.New()
	var got []error
	e := entry("x", func(err error) {
		// The name is free before the handle completes, so that Done may submit it again.
		if q.Find("x") != nil {
			t.Error("the name is still taken in Done")
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
		t.Error("a popped name was taken for free")
	}
	if q.Find("x") != e || q.Len() != 1 {
		t.Error("the popped entry is not in the table")
	}
	boom := errors.New("boom")
	q.Finish(e, boom)
	q.Finish(e, nil)
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
	q.Finish(q.Find("b"), nil)
	first, second := errors.New("first"), errors.New("second")
	q.Close(first)
	q.Close(second)
	if err := q.Add(entry("d", nil)); err != first {
		t.Errorf("add after close: got %v, want %v", err, first)
	}
	for _, e := range q.InFlight() {
		q.Finish(e, second)
	}
	if len(finished) != 3 || finished["a"] != second || finished["b"] != nil || finished["c"] != second || q.Len() != 0 {
		t.Errorf("finished %v, want a and c with %v and b before", finished, second)
	}
}

// Every accepted entry is popped once, in the order of its goroutine, and finished once.
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
			wg.Go(func() { q.Finish(e, nil) })
		}
	}
	wg.Wait()
	if n := done.Load(); n != submitters*each || q.Len() != 0 {
		t.Errorf("%d calls of Done and %d entries left, want %d and 0", n, q.Len(), submitters*each)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	q := tensorqueue.New()
	e := entry("x", func(error) {})
	var buf []*tensorqueue.Entry
	step := func() {
		_ = q.Add(e)
		buf = q.Pop(buf[:0])
		q.Finish(e, nil)
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations for a submission, want 0", n)
	}
}
