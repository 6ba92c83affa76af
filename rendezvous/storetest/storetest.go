// Package storetest holds implementations of rendezvous.Store to its contract.
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

	"github.com/gohvd/gohvd/rendezvous"
)

// Run runs the suite. open returns an empty store, and registers with t what there is to clean up beyond its Close.
func Run(t *testing.T, open func(t *testing.T) rendezvous.Store) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, context.Context, rendezvous.Store)
	}{
		{"SetGet", setGet},
		{"ValuesAreCopied", valuesAreCopied},
		{"GetWaits", getWaits},
		{"GetEndsWithContext", getEndsWithContext},
		{"Add", add},
		{"AddConcurrently", addConcurrently},
		{"CompareAndSet", compareAndSet},
		{"CompareAndSetHasOneWinner", compareAndSetHasOneWinner},
		{"Watch", watch},
		{"WatchSeesNewValues", watchSeesNewValues},
		{"Delete", remove},
		{"WaitsDelayNobody", waitsDelayNobody},
		{"Bounds", bounds},
		{"EndedContext", endedContext},
		{"Close", closing},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s := open(t)
			defer s.Close()
			test.run(t, ctx, s)
		})
	}
}

// short is long enough for a call that need not wait, as a rule, and is spent in full by a call that has to.
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

func mustGet(t *testing.T, ctx context.Context, s rendezvous.Store, key, want string) {
	t.Helper()
	v, err := s.Get(ctx, key)
	noErr(t, err)
	wantValue(t, v, want)
}

func setGet(t *testing.T, ctx context.Context, s rendezvous.Store) {
	for key, value := range map[string][]byte{
		"a":             []byte("1"),
		"empty":         {},
		"nil":           nil,
		"-dash":         []byte("x"),
		"bytes\x00\xff": {0, 255, 10, 13},
		strings.Repeat("k", rendezvous.MaxKeyBytes): bytes.Repeat([]byte{7}, rendezvous.MaxValueBytes),
	} {
		noErr(t, s.Set(ctx, key, []byte("old")))
		noErr(t, s.Set(ctx, key, value))
		mustGet(t, ctx, s, key, string(value))
	}
}

func valuesAreCopied(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func getWaits(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func getEndsWithContext(t *testing.T, ctx context.Context, s rendezvous.Store) {
	waiting, cancel := context.WithCancel(ctx)
	got := make(chan error)
	go func() {
		_, err := s.Get(waiting, "missing")
		got <- err
	}()
	cancel()
	wantErr(t, <-got, context.Canceled, "rendezvous: get", "missing")
	// The store goes on.
	noErr(t, s.Set(ctx, "missing", []byte("here")))
	mustGet(t, ctx, s, "missing", "here")
}

func add(t *testing.T, ctx context.Context, s rendezvous.Store) {
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
	for _, bad := range []string{"", "x", "1.5", "99999999999999999999"} {
		noErr(t, s.Set(ctx, "bad", []byte(bad)))
		_, err := s.Add(ctx, "bad", 1)
		wantErr(t, err, rendezvous.ErrNotNumber, "add", "bad")
		mustGet(t, ctx, s, "bad", bad)
	}
	for _, edge := range []struct{ start, delta int64 }{{math.MaxInt64, 1}, {math.MinInt64, -1}} {
		noErr(t, s.Set(ctx, "edge", fmt.Append(nil, edge.start)))
		_, err := s.Add(ctx, "edge", edge.delta)
		wantErr(t, err, rendezvous.ErrNotNumber, "overflow")
		mustGet(t, ctx, s, "edge", fmt.Sprint(edge.start))
	}
}

func addConcurrently(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func compareAndSet(t *testing.T, ctx context.Context, s rendezvous.Store) {
	missing := []byte(nil)
	for _, step := range []struct {
		expected, desired []byte
		swapped           bool
		actual            []byte
	}{
		{[]byte("x"), []byte("y"), false, missing},
		{[]byte{}, []byte("y"), false, missing},
		{nil, nil, true, []byte{}},
		{nil, []byte("y"), false, []byte{}},
		{[]byte{}, []byte("a"), true, []byte("a")},
		{nil, []byte("b"), false, []byte("a")},
		{[]byte("b"), []byte("c"), false, []byte("a")},
		{[]byte("a"), []byte("b"), true, []byte("b")},
		{[]byte("b"), []byte("b"), true, []byte("b")},
	} {
		actual, swapped, err := s.CompareAndSet(ctx, "k", step.expected, step.desired)
		noErr(t, err)
		if swapped != step.swapped || !bytes.Equal(actual, step.actual) || (actual == nil) != (step.actual == nil) {
			t.Fatalf("compare-and-set %q to %q: got %q (nil: %v) %v, want %q %v", step.expected, step.desired,
				actual, actual == nil, swapped, step.actual, step.swapped)
		}
	}
	mustGet(t, ctx, s, "k", "b")
}

func compareAndSetHasOneWinner(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func watch(t *testing.T, ctx context.Context, s rendezvous.Store) {
	waits := func(prev []byte) {
		t.Helper()
		waiting, cancel := context.WithTimeout(ctx, short)
		defer cancel()
		v, err := s.Watch(waiting, "k", prev)
		if err == nil {
			t.Fatalf("watch from %q: got %q, want it to wait", prev, v)
		}
		wantErr(t, err, context.DeadlineExceeded, "rendezvous: watch", "k")
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

func watchSeesNewValues(t *testing.T, ctx context.Context, s rendezvous.Store) {
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
	// A waiting Watch sleeps through what does not change the value.
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

func remove(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func waitsDelayNobody(t *testing.T, ctx context.Context, s rendezvous.Store) {
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

func bounds(t *testing.T, ctx context.Context, s rendezvous.Store) {
	large := make([]byte, rendezvous.MaxValueBytes+1)
	for _, key := range []string{"", strings.Repeat("k", rendezvous.MaxKeyBytes+1)} {
		wantErr(t, s.Set(ctx, key, nil), rendezvous.ErrLimit, "set", "key has")
		_, err := s.Get(ctx, key)
		wantErr(t, err, rendezvous.ErrLimit, "get", "key has")
		_, err = s.Add(ctx, key, 1)
		wantErr(t, err, rendezvous.ErrLimit, "add", "key has")
		_, _, err = s.CompareAndSet(ctx, key, nil, nil)
		wantErr(t, err, rendezvous.ErrLimit, "compare-and-set", "key has")
		_, err = s.Watch(ctx, key, nil)
		wantErr(t, err, rendezvous.ErrLimit, "watch", "key has")
		_, err = s.Delete(ctx, key)
		wantErr(t, err, rendezvous.ErrLimit, "delete", "key has")
	}
	wantErr(t, s.Set(ctx, "k", large), rendezvous.ErrLimit, "set", "k", "value has")
	_, _, err := s.CompareAndSet(ctx, "k", nil, large)
	wantErr(t, err, rendezvous.ErrLimit, "value has")
	if existed, err := s.Delete(ctx, "k"); err != nil || existed {
		t.Errorf("delete after refused values: got %v, %v", existed, err)
	}
}

func endedContext(t *testing.T, ctx context.Context, s rendezvous.Store) {
	noErr(t, s.Set(ctx, "k", []byte("v")))
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err := s.Get(ended, "k")
	wantErr(t, err, context.Canceled)
	wantErr(t, s.Set(ended, "k", nil), context.Canceled)
	mustGet(t, ctx, s, "k", "v")
}

func closing(t *testing.T, ctx context.Context, s rendezvous.Store) {
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
		wantErr(t, <-got, rendezvous.ErrClosed)
	}
	wantErr(t, s.Set(ctx, "k", nil), rendezvous.ErrClosed, "set", "k")
	_, err := s.Add(ctx, "k", 1)
	wantErr(t, err, rendezvous.ErrClosed)
	_, _, err = s.CompareAndSet(ctx, "k", nil, nil)
	wantErr(t, err, rendezvous.ErrClosed)
	_, err = s.Delete(ctx, "k")
	wantErr(t, err, rendezvous.ErrClosed)
}
