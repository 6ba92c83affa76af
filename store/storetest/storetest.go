// Package storetest checks that implementations of store.Store satisfy its contract.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/store"
)

// Lacks describes the parts of the contract that a kind of store does not satisfy.
type Lacks struct {
	// Queues is set if the calls on queues return ErrUnsupported.
	Queues bool
	// Empty is set if CompareAndSet does not distinguish an empty value from no value.
	Empty bool
	// Reasons is set if a refused call may return any error instead of ErrLimit or ErrNotNumber.
	Reasons bool
	// OwnKeys is the number of keys that the store itself creates. NumKeys counts them even in an empty
	// store.
	OwnKeys int64
}

// Run tests one implementation of store.Store. Each call of open must return a new, empty store, which Run
// closes. If open creates other resources, it must register their clean-up with t.Cleanup.
func Run(t *testing.T, lacks Lacks, open func(t *testing.T) store.Store) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, context.Context, store.Store)
		not  bool
	}{
		{"SetGet", setGet, false},
		{"ValuesAreCopied", valuesAreCopied, false},
		{"GetWaits", getWaits, false},
		{"TryGet", tryGet, false},
		{"GetEndsWithContext", getEndsWithContext, false},
		{"Add", add, false},
		{"AddRefuses", addRefuses, lacks.Reasons},
		{"AddConcurrently", addConcurrently, false},
		{"CompareAndSet", compareAndSet, false},
		{"CompareAndSetEmpty", compareAndSetEmpty, lacks.Empty},
		{"CompareAndSetHasOneWinner", compareAndSetHasOneWinner, false},
		{"Watch", watch, false},
		{"WatchSeesNewValues", watchSeesNewValues, false},
		{"Delete", remove, false},
		{"WaitsDelayNobody", waitsDelayNobody, false},
		{"Bounds", bounds, lacks.Reasons},
		{"Append", appending, false},
		{"WaitAndCheck", waitAndCheck, false},
		{"WaitForMany", waitForMany, false},
		{"Many", many, false},
		{"NumKeys", func(t *testing.T, ctx context.Context, s store.Store) {
			numKeys(t, ctx, s, lacks.OwnKeys)
		}, false},
		{"Queues", queues, lacks.Queues},
		{"QueuesWake", queuesWake, lacks.Queues},
		{"NoQueues", noQueues, !lacks.Queues},
		{"EndedContext", endedContext, false},
		{"Close", closing, false},
	} {
		if test.not {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s := open(t)
			defer s.Close()
			test.run(t, ctx, s)
		})
	}
}

// short is the time after which a test considers a call to be waiting. Calls that do not wait usually take
// less time.
const short = 30 * time.Millisecond

func noErr(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, err, target error, parts ...string) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want one that is %v", err, target)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got error %q, want %q in it", err, part)
		}
	}
}

func wantValue(t *testing.T, got []byte, want string) {
	t.Helper()
	if got == nil || string(got) != want {
		t.Fatalf("got value %q (nil: %v), want %q", got, got == nil, want)
	}
}

func mustGet(t *testing.T, ctx context.Context, s store.Store, key, want string) {
	t.Helper()
	v, err := s.Get(ctx, key)
	noErr(t, err)
	wantValue(t, v, want)
}

func setGet(t *testing.T, ctx context.Context, s store.Store) {
	for key, value := range map[string][]byte{
		"a":             []byte("1"),
		"empty":         {},
		"nil":           nil,
		"-dash":         []byte("x"),
		"bytes\x00\xff": {0, 255, 10, 13},
		strings.Repeat("k", store.MaxKeyBytes-100): bytes.Repeat([]byte{7}, store.MaxValueBytes),
	} {
		noErr(t, s.Set(ctx, key, []byte("old")))
		noErr(t, s.Set(ctx, key, value))
		mustGet(t, ctx, s, key, string(value))
	}
}

func valuesAreCopied(t *testing.T, ctx context.Context, s store.Store) {
	in := []byte("value")
	noErr(t, s.Set(ctx, "k", in))
	in[0] = 'X'
	out, err := s.Get(ctx, "k")
	noErr(t, err)
	wantValue(t, out, "value")
	out[0] = 'Y'
	out, err = s.Watch(ctx, "k", nil)
	noErr(t, err)
	wantValue(t, out, "value")
	out[0] = 'Z'
	out, _, err = s.CompareAndSet(ctx, "k", []byte("other"), in)
	noErr(t, err)
	out[0] = 'Z'
	mustGet(t, ctx, s, "k", "value")
}

func getWaits(t *testing.T, ctx context.Context, s store.Store) {
	for name, make := range map[string]func(key string) error{
		"set": func(key string) error { return s.Set(ctx, key, []byte("5")) },
		"add": func(key string) error { _, err := s.Add(ctx, key, 5); return err },
		"compare-and-set": func(key string) error {
			_, _, err := s.CompareAndSet(ctx, key, nil, []byte("5"))
			return err
		},
	} {
		waiting, cancel := context.WithTimeout(ctx, short)
		_, err := s.Get(waiting, name)
		cancel()
		wantErr(t, err, context.DeadlineExceeded)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if v, err := s.Get(ctx, name); err != nil || string(v) != "5" {
					t.Errorf("get before %s: got %q, %v", name, v, err)
				}
			})
		}
		noErr(t, make(name))
		wg.Wait()
	}
}

func tryGet(t *testing.T, ctx context.Context, s store.Store) {
	want := func(value string, there bool) {
		t.Helper()
		got, ok, err := s.TryGet(ctx, "k")
		noErr(t, err)
		if ok != there || there && (got == nil || string(got) != value) {
			t.Fatalf("got %q (nil: %v), %v, want %q, %v", got, got == nil, ok, value, there)
		}
		if !there {
			return
		}
		for i := range got {
			got[i] = 0 // must not change the value in the store
		}
	}
	want("", false)
	for _, value := range []string{"", "one", strings.Repeat("x", 5000)} {
		noErr(t, s.Set(ctx, "k", []byte(value)))
		want(value, true)
		want(value, true)
	}
	if _, err := s.Delete(ctx, "k"); err != nil {
		t.Fatal(err)
	}
	want("", false)
	if _, _, err := s.TryGet(ctx, ""); err == nil {
		t.Error("an empty key is accepted")
	}
}

func getEndsWithContext(t *testing.T, ctx context.Context, s store.Store) {
	waiting, cancel := context.WithCancel(ctx)
	got := make(chan error)
	go func() {
		_, err := s.Get(waiting, "missing")
		got <- err
	}()
	cancel()
	wantErr(t, <-got, context.Canceled, "store: get", "missing")
	// A cancelled call does not affect later calls of the store.
	noErr(t, s.Set(ctx, "missing", []byte("here")))
	mustGet(t, ctx, s, "missing", "here")
}

func add(t *testing.T, ctx context.Context, s store.Store) {
	for _, step := range []struct{ delta, want int64 }{{5, 5}, {0, 5}, {-7, -2}, {1, -1}, {1, 0}} {
		sum, err := s.Add(ctx, "n", step.delta)
		noErr(t, err)
		if sum != step.want {
			t.Fatalf("add %d: got %d, want %d", step.delta, sum, step.want)
		}
		mustGet(t, ctx, s, "n", fmt.Sprint(step.want))
	}
	noErr(t, s.Set(ctx, "n", []byte("40")))
	if sum, err := s.Add(ctx, "n", 2); err != nil || sum != 42 {
		t.Fatalf("add to a number that was set: got %d, %v", sum, err)
	}
}

func addRefuses(t *testing.T, ctx context.Context, s store.Store) {
	for _, bad := range []string{"", "x", "1.5", "99999999999999999999"} {
		noErr(t, s.Set(ctx, "bad", []byte(bad)))
		_, err := s.Add(ctx, "bad", 1)
		wantErr(t, err, store.ErrNotNumber, "add", "bad")
		mustGet(t, ctx, s, "bad", bad)
	}
	for _, edge := range []struct{ start, delta int64 }{{math.MaxInt64, 1}, {math.MinInt64, -1}} {
		noErr(t, s.Set(ctx, "edge", fmt.Append(nil, edge.start)))
		_, err := s.Add(ctx, "edge", edge.delta)
		wantErr(t, err, store.ErrNotNumber, "overflow")
		mustGet(t, ctx, s, "edge", fmt.Sprint(edge.start))
	}
}

func addConcurrently(t *testing.T, ctx context.Context, s store.Store) {
	const callers, calls = 8, 25
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		seen = make(map[int64]bool)
	)
	for range callers {
		wg.Go(func() {
			for range calls {
				n, err := s.Add(ctx, "n", 1)
				mu.Lock()
				if err != nil || seen[n] {
					t.Errorf("add: got %d (before: %v), %v", n, seen[n], err)
				}
				seen[n] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	mustGet(t, ctx, s, "n", fmt.Sprint(callers*calls))
}

// swap has the arguments of a call of CompareAndSet and the expected results.
type swap struct {
	expected, desired []byte
	swapped           bool
	actual            []byte
}

func swaps(t *testing.T, ctx context.Context, s store.Store, steps []swap) {
	for _, step := range steps {
		actual, swapped, err := s.CompareAndSet(ctx, "k", step.expected, step.desired)
		noErr(t, err)
		if swapped != step.swapped || !bytes.Equal(actual, step.actual) ||
			(actual == nil) != (step.actual == nil) {
			t.Fatalf("compare-and-set %q to %q: got %q (nil: %v) %v, want %q %v", step.expected, step.desired,
				actual, actual == nil, swapped, step.actual, step.swapped)
		}
	}
}

func compareAndSet(t *testing.T, ctx context.Context, s store.Store) {
	swaps(t, ctx, s, []swap{
		{[]byte("x"), []byte("y"), false, nil},
		{nil, []byte("a"), true, []byte("a")},
		{nil, []byte("b"), false, []byte("a")},
		{[]byte("b"), []byte("c"), false, []byte("a")},
		{[]byte("a"), []byte("b"), true, []byte("b")},
		{[]byte("b"), []byte("b"), true, []byte("b")},
	})
	mustGet(t, ctx, s, "k", "b")
}

func compareAndSetEmpty(t *testing.T, ctx context.Context, s store.Store) {
	swaps(t, ctx, s, []swap{
		{[]byte{}, []byte("y"), false, nil},
		{nil, nil, true, []byte{}},
		{nil, []byte("y"), false, []byte{}},
		{[]byte{}, []byte("a"), true, []byte("a")},
	})
	mustGet(t, ctx, s, "k", "a")
}

func compareAndSetHasOneWinner(t *testing.T, ctx context.Context, s store.Store) {
	const callers = 8
	var (
		wg      sync.WaitGroup
		actual  [callers][]byte
		swapped [callers]bool
	)
	for i := range callers {
		wg.Go(func() {
			var err error
			if actual[i], swapped[i], err = s.CompareAndSet(ctx, "k", nil, fmt.Append(nil, i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	winners := 0
	for i := range callers {
		if swapped[i] {
			winners++
		}
		if !bytes.Equal(actual[i], actual[0]) || swapped[i] != (string(actual[i]) == fmt.Sprint(i)) {
			t.Errorf("caller %d: got %q %v, another got %q", i, actual[i], swapped[i], actual[0])
		}
	}
	if winners != 1 {
		t.Errorf("%d callers won, want 1", winners)
	}
}

func watch(t *testing.T, ctx context.Context, s store.Store) {
	waits := func(prev []byte) {
		t.Helper()
		waiting, cancel := context.WithTimeout(ctx, short)
		defer cancel()
		v, err := s.Watch(waiting, "k", prev)
		if err == nil {
			t.Fatalf("watch from %q: got %q, want it to wait", prev, v)
		}
		wantErr(t, err, context.DeadlineExceeded, "store: watch", "k")
	}
	returns := func(prev []byte, want string) {
		t.Helper()
		v, err := s.Watch(ctx, "k", prev)
		noErr(t, err)
		wantValue(t, v, want)
	}
	waits(nil)
	waits([]byte{})
	noErr(t, s.Set(ctx, "k", nil))
	waits([]byte{})
	returns(nil, "")
	returns([]byte("x"), "")
	noErr(t, s.Set(ctx, "k", []byte("a")))
	waits([]byte("a"))
	returns(nil, "a")
	returns([]byte{}, "a")
	returns([]byte("b"), "a")
	_, err := s.Delete(ctx, "k")
	noErr(t, err)
	waits([]byte("b"))
}

func watchSeesNewValues(t *testing.T, ctx context.Context, s store.Store) {
	const last = 100
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			var prev []byte
			for n := 0; n < last; {
				v, err := s.Watch(ctx, "n", prev)
				if err != nil {
					t.Error(err)
					return
				}
				var now int
				if _, err := fmt.Sscan(string(v), &now); err != nil || now <= n {
					t.Errorf("watch from %q: got %q", prev, v)
					return
				}
				n, prev = now, v
			}
		})
	}
	for range last {
		_, err := s.Add(ctx, "n", 1)
		noErr(t, err)
	}
	wg.Wait()
	// A waiting Watch goes on waiting if the value is set to the same value again, or is deleted.
	got := make(chan []byte, 1)
	wg.Go(func() {
		v, err := s.Watch(ctx, "k", []byte("a"))
		if err != nil {
			t.Error(err)
		}
		got <- v
	})
	noErr(t, s.Set(ctx, "k", []byte("a")))
	_, err := s.Delete(ctx, "k")
	noErr(t, err)
	noErr(t, s.Set(ctx, "k", []byte("a")))
	noErr(t, s.Set(ctx, "k", []byte("b")))
	wantValue(t, <-got, "b")
	wg.Wait()
}

func remove(t *testing.T, ctx context.Context, s store.Store) {
	for _, want := range []bool{false, true, false} {
		if want {
			noErr(t, s.Set(ctx, "k", []byte("v")))
		}
		existed, err := s.Delete(ctx, "k")
		noErr(t, err)
		if existed != want {
			t.Fatalf("delete: got %v, want %v", existed, want)
		}
	}
	waiting, cancel := context.WithTimeout(ctx, short)
	defer cancel()
	_, err := s.Get(waiting, "k")
	wantErr(t, err, context.DeadlineExceeded)
	_, swapped, err := s.CompareAndSet(ctx, "k", nil, []byte("again"))
	noErr(t, err)
	if !swapped {
		t.Error("a deleted key still exists for compare-and-set")
	}
}

func waitsDelayNobody(t *testing.T, ctx context.Context, s store.Store) {
	const waiters = 64
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			key := fmt.Sprint("k", i)
			if v, err := s.Get(ctx, key); err != nil || string(v) != key {
				t.Errorf("get %s: got %q, %v", key, v, err)
			}
		})
	}
	for i := waiters - 1; i >= 0; i-- {
		noErr(t, s.Set(ctx, fmt.Sprint("k", i), fmt.Append(nil, "k", i)))
	}
	wg.Wait()
}

func bounds(t *testing.T, ctx context.Context, s store.Store) {
	large := make([]byte, store.MaxValueBytes+1)
	for _, key := range []string{"", strings.Repeat("k", store.MaxKeyBytes+1)} {
		wantErr(t, s.Set(ctx, key, nil), store.ErrLimit, "set", "key has")
		_, err := s.Get(ctx, key)
		wantErr(t, err, store.ErrLimit, "get", "key has")
		_, err = s.Add(ctx, key, 1)
		wantErr(t, err, store.ErrLimit, "add", "key has")
		_, _, err = s.CompareAndSet(ctx, key, nil, nil)
		wantErr(t, err, store.ErrLimit, "compare-and-set", "key has")
		_, err = s.Watch(ctx, key, nil)
		wantErr(t, err, store.ErrLimit, "watch", "key has")
		_, err = s.Delete(ctx, key)
		wantErr(t, err, store.ErrLimit, "delete", "key has")
	}
	wantErr(t, s.Set(ctx, "k", large), store.ErrLimit, "set", "k", "value has")
	_, _, err := s.CompareAndSet(ctx, "k", nil, large)
	wantErr(t, err, store.ErrLimit, "value has")
	if existed, err := s.Delete(ctx, "k"); err != nil || existed {
		t.Errorf("delete after refused values: got %v, %v", existed, err)
	}
}

func endedContext(t *testing.T, ctx context.Context, s store.Store) {
	noErr(t, s.Set(ctx, "k", []byte("v")))
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err := s.Get(ended, "k")
	wantErr(t, err, context.Canceled)
	wantErr(t, s.Set(ended, "k", nil), context.Canceled)
	mustGet(t, ctx, s, "k", "v")
}

func closing(t *testing.T, ctx context.Context, s store.Store) {
	got := make(chan error)
	for _, key := range []string{"a", "b"} {
		go func() {
			_, err := s.Get(ctx, key)
			got <- err
		}()
		go func() {
			_, err := s.Watch(ctx, key, []byte("x"))
			got <- err
		}()
	}
	noErr(t, s.Close())
	noErr(t, s.Close())
	for range 4 {
		wantErr(t, <-got, store.ErrClosed)
	}
	wantErr(t, s.Set(ctx, "k", nil), store.ErrClosed, "set", "k")
	_, err := s.Add(ctx, "k", 1)
	wantErr(t, err, store.ErrClosed)
	_, _, err = s.CompareAndSet(ctx, "k", nil, nil)
	wantErr(t, err, store.ErrClosed)
	_, err = s.Delete(ctx, "k")
	wantErr(t, err, store.ErrClosed)
}

func appending(t *testing.T, ctx context.Context, s store.Store) {
	noErr(t, s.Append(ctx, "k", []byte("a")))
	got, err := s.Get(ctx, "k")
	noErr(t, err)
	noErr(t, s.Append(ctx, "k", nil))
	noErr(t, s.Append(ctx, "k", []byte("bc")))
	wantValue(t, got, "a")
	mustGet(t, ctx, s, "k", "abc")
	noErr(t, s.Append(ctx, "empty", nil))
	mustGet(t, ctx, s, "empty", "")
	done := make(chan error, 1)
	go func() { done <- s.Wait(ctx, "late") }()
	noErr(t, s.Append(ctx, "late", []byte("x")))
	noErr(t, <-done)
}

func waitAndCheck(t *testing.T, ctx context.Context, s store.Store) {
	check := func(want bool, keys ...string) {
		t.Helper()
		ok, err := s.Check(ctx, keys...)
		noErr(t, err)
		if ok != want {
			t.Errorf("check %q: got %v, want %v", keys, ok, want)
		}
	}
	times := func(keys ...string) {
		t.Helper()
		waiting, cancel := context.WithTimeout(ctx, short)
		defer cancel()
		wantErr(t, s.Wait(waiting, keys...), context.DeadlineExceeded, "store: wait")
	}
	noErr(t, s.Wait(ctx))
	check(true)
	check(false, "a")
	times("a")
	noErr(t, s.Set(ctx, "a", nil))
	check(true, "a")
	check(true, "a", "a")
	check(false, "a", "b")
	noErr(t, s.Wait(ctx, "a", "a"))
	times("a", "b")
	times("b", "a")
	noErr(t, s.Set(ctx, "b", []byte("1")))
	check(true, "b", "a")
	noErr(t, s.Wait(ctx, "a", "b", "a"))
	_, err := s.Delete(ctx, "a")
	noErr(t, err)
	check(false, "b", "a")
	times("a", "b")
	check(true, "b") // a cancelled wait does not affect the keys
}

// waitForMany checks that a wait for several keys ends when the last of them gets its value, in whichever
// order the keys get their values. It also checks this for keys that are deleted meanwhile.
func waitForMany(t *testing.T, ctx context.Context, s store.Store) {
	const n = 8
	var keys []string
	for i := range n {
		keys = append(keys, fmt.Sprint("k", i))
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			turned := append(append([]string{}, keys[i:]...), keys[:i]...)
			if err := s.Wait(ctx, turned...); err != nil {
				t.Errorf("wait %q: %v", turned, err)
			}
			if _, err := s.MultiGet(ctx, turned...); err != nil {
				t.Errorf("multi-get %q: %v", turned, err)
			}
		})
	}
	for _, k := range keys[1:] {
		noErr(t, s.Set(ctx, k, []byte(k)))
	}
	_, err := s.Delete(ctx, keys[n-1])
	noErr(t, err)
	noErr(t, s.Set(ctx, keys[0], []byte(keys[0])))
	_, err = s.Add(ctx, keys[n-1], 7)
	noErr(t, err)
	wg.Wait()
}

func many(t *testing.T, ctx context.Context, s store.Store) {
	noErr(t, s.MultiSet(ctx, nil, nil))
	values, err := s.MultiGet(ctx)
	noErr(t, err)
	if len(values) != 0 {
		t.Errorf("got %q for no keys", values)
	}
	got := make(chan [][]byte, 1)
	go func() {
		values, err := s.MultiGet(ctx, "c", "a", "a", "b")
		if err != nil {
			t.Error(err)
		}
		got <- values
	}()
	noErr(t, s.MultiSet(ctx, []string{"a", "b", "a"}, [][]byte{[]byte("x"), nil, []byte("1")}))
	noErr(t, s.Set(ctx, "c", []byte("3")))
	values = <-got
	if len(values) != 4 || string(bytes.Join(values, []byte("|"))) != "3|1|1|" || values[3] == nil {
		t.Errorf("got %q, want 3, 1, 1 and an empty value", values)
	}
	if err := s.MultiSet(ctx, []string{"a"}, nil); err == nil {
		t.Error("a key without a value is accepted")
	}
	// These values are larger than a TCP segment and than the buffers of client and server.
	large := bytes.Repeat([]byte("0123456789abcdef"), 10_000)
	noErr(t, s.MultiSet(ctx, []string{"l1", "l2"}, [][]byte{large, large[1:]}))
	values, err = s.MultiGet(ctx, "l2", "l1")
	noErr(t, err)
	if len(values) != 2 || !bytes.Equal(values[0], large[1:]) || !bytes.Equal(values[1], large) {
		t.Error("large values do not come back")
	}
}

func numKeys(t *testing.T, ctx context.Context, s store.Store, own int64) {
	want := func(want int64) {
		t.Helper()
		n, err := s.NumKeys(ctx)
		noErr(t, err)
		if n != want+own {
			t.Errorf("%d keys, want %d", n, want+own)
		}
	}
	want(0)
	noErr(t, s.MultiSet(ctx, []string{"a", "b"}, make([][]byte, 2)))
	_, err := s.Add(ctx, "c", 1)
	noErr(t, err)
	want(3)
	noErr(t, s.Set(ctx, "a", []byte("again")))
	want(3)
	_, err = s.Delete(ctx, "b")
	noErr(t, err)
	want(2)
}

func queues(t *testing.T, ctx context.Context, s store.Store) {
	length := func(key string, want int64) {
		t.Helper()
		n, err := s.QueueLen(ctx, key)
		noErr(t, err)
		if ok, err := s.Check(ctx, key); n != want || err != nil || ok != (want > 0) {
			t.Errorf("queue %q has %d values and is there: %v (%v), want %d", key, n, ok, err, want)
		}
	}
	length("q", 0)
	if v, ok, err := s.TryPop(ctx, "q"); ok || err != nil {
		t.Errorf("try-pop of nothing: got %q, %v", v, err)
	}
	waiting, cancel := context.WithTimeout(ctx, short)
	defer cancel()
	_, err := s.Pop(waiting, "q")
	wantErr(t, err, context.DeadlineExceeded, "store: ")
	late := make(chan error, 1)
	time.AfterFunc(short, func() { late <- s.Push(ctx, "q", []byte("late")) })
	v, err := s.Pop(ctx, "q")
	noErr(t, err)
	noErr(t, <-late)
	wantValue(t, v, "late")
	for i := range 100 {
		noErr(t, s.Push(ctx, "q", fmt.Append(nil, i)))
	}
	noErr(t, s.Push(ctx, "other", nil))
	length("q", 100)
	length("other", 1)
	for i := range 100 {
		var v []byte
		if i%2 == 0 {
			v, err = s.Pop(ctx, "q")
		} else {
			var ok bool
			if v, ok, err = s.TryPop(ctx, "q"); !ok {
				t.Errorf("value %d is not there", i)
			}
		}
		noErr(t, err)
		wantValue(t, v, fmt.Sprint(i))
	}
	length("q", 0)
	v, err = s.Pop(ctx, "other")
	noErr(t, err)
	wantValue(t, v, "")
	// A key may have both a value and a queue.
	noErr(t, s.Set(ctx, "both", []byte("value")))
	noErr(t, s.Push(ctx, "both", []byte("queued")))
	mustGet(t, ctx, s, "both", "value")
	v, err = s.Pop(ctx, "both")
	noErr(t, err)
	wantValue(t, v, "queued")
	mustGet(t, ctx, s, "both", "value")
}

// queuesWake checks that each pushed value is popped by exactly one client if several clients wait for
// values.
func queuesWake(t *testing.T, ctx context.Context, s store.Store) {
	const poppers, each = 4, 10
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := make(map[string]int)
	for range poppers {
		wg.Go(func() {
			for range each {
				v, err := s.Pop(ctx, "q")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				seen[string(v)]++
				mu.Unlock()
			}
		})
	}
	for i := range poppers * each {
		noErr(t, s.Push(ctx, "q", fmt.Append(nil, i)))
	}
	wg.Wait()
	if len(seen) != poppers*each {
		t.Errorf("%d values were popped, want %d: %v", len(seen), poppers*each, seen)
	}
}

func noQueues(t *testing.T, ctx context.Context, s store.Store) {
	wantErr(t, s.Push(ctx, "q", nil), store.ErrUnsupported, "push", "q")
	_, err := s.Pop(ctx, "q")
	wantErr(t, err, store.ErrUnsupported, "pop", "q")
	_, _, err = s.TryPop(ctx, "q")
	wantErr(t, err, store.ErrUnsupported, "pop", "q")
	_, err = s.QueueLen(ctx, "q")
	wantErr(t, err, store.ErrUnsupported, "queue length", "q")
}

// SetGet measures the time that a client needs to set a key and get it. The function open returns the stores
// of so many clients, which SetGet closes.
func SetGet(b *testing.B, open func(b *testing.B, clients int) []store.Store) {
	for _, clients := range []int{1, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			each := (b.N + clients - 1) / clients
			stores := open(b, clients)
			b.ResetTimer()
			var wg sync.WaitGroup
			for i, s := range stores {
				wg.Go(func() {
					key, value := fmt.Sprint("key", i), []byte("some value")
					for range each {
						err := s.Set(b.Context(), key, value)
						if err == nil {
							_, err = s.Get(b.Context(), key)
						}
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(each*clients)/b.Elapsed().Seconds(), "pairs/s")
			for _, s := range stores {
				s.Close()
			}
		})
	}
}
