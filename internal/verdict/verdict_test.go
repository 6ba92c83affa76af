package verdict_test

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/verdict"
	"github.com/gohvd/gohvd/topo"
)

// store is one key.
type store struct {
	mu    sync.Mutex
	value []byte
	err   error
}

func (s *store) CompareAndSet(_ context.Context, key string, expected, desired []byte) ([]byte, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return nil, false, s.err
	case key != verdict.Key:
		return nil, false, errors.New("wrong key")
	case (s.value == nil) != (expected == nil) || string(s.value) != string(expected):
		return s.value, false, nil
	}
	s.value = desired
	return desired, true, nil
}

func (s *store) Get(ctx context.Context, key string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.value != nil && key == verdict.Key {
		return s.value, nil
	}
	return nil, context.DeadlineExceeded
}

func read(t *testing.T, s *store) verdict.Verdict {
	t.Helper()
	v, err := verdict.Read(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestFirstOfAnEpochWins(t *testing.T) {
	s := new(store)
	first := verdict.Verdict{Epoch: 2, Ranks: []topo.Rank{2}, Reason: "connection reset"}
	later := verdict.Verdict{Epoch: 3, Ranks: []topo.Rank{0, 1}, Reason: "silence"}
	for _, c := range []struct{ publish, want verdict.Verdict }{
		{first, first},
		{verdict.Verdict{Epoch: 2, Ranks: []topo.Rank{5}}, first},
		{verdict.Verdict{Epoch: 1, Ranks: []topo.Rank{5}}, first},
		{later, later},
	} {
		if err := verdict.Publish(t.Context(), s, c.publish); err != nil {
			t.Fatal(err)
		}
		if got := read(t, s); !reflect.DeepEqual(got, c.want) {
			t.Errorf("after %+v: got %+v, want %+v", c.publish, got, c.want)
		}
	}
}

func TestFormat(t *testing.T) {
	s := new(store)
	if err := verdict.Publish(t.Context(), s, verdict.Verdict{Epoch: 7, Ranks: []topo.Rank{2}, Reason: "text"}); err != nil {
		t.Fatal(err)
	}
	if want := `{"epoch":7,"ranks":[2],"reason":"text"}`; string(s.value) != want {
		t.Errorf("got %s, want %s", s.value, want)
	}
}

func TestMalformedIsReplaced(t *testing.T) {
	for _, there := range []string{"", "{", `{"epoch":9}`} {
		s := &store{value: []byte(there)}
		if _, err := verdict.Read(t.Context(), s); !errors.Is(err, verdict.ErrMalformed) {
			t.Errorf("%q: got error %v, want %v", there, err, verdict.ErrMalformed)
		}
		if err := verdict.Publish(t.Context(), s, verdict.Verdict{Epoch: 1, Ranks: []topo.Rank{0}}); err != nil {
			t.Fatal(err)
		}
		if got := read(t, s); got.Epoch != 1 {
			t.Errorf("%q: got %+v, want the new one", there, got)
		}
	}
}

func TestReasonIsBounded(t *testing.T) {
	s := new(store)
	for _, reason := range []string{
		strings.Repeat("x", 1<<20),
		strings.Repeat("\x01", 1<<20),
		strings.Repeat("é", 1<<20),
		"x" + strings.Repeat("é", 1<<20), // cut inside a character
		strings.Repeat("\xff", 1<<20),
	} {
		if err := verdict.Publish(t.Context(), s, verdict.Verdict{Ranks: []topo.Rank{0}, Reason: reason}); err != nil {
			t.Fatal(err)
		}
		got := read(t, s).Reason
		if len(got) > verdict.MaxReasonBytes || !strings.HasPrefix(reason, got) {
			t.Errorf("%.10q: got %d bytes, want at most %d of the beginning", reason, len(got), verdict.MaxReasonBytes)
		}
		s.value = nil
	}
}

func TestErrors(t *testing.T) {
	down := errors.New("store is down")
	if err := verdict.Publish(t.Context(), &store{err: down}, verdict.Verdict{Ranks: []topo.Rank{0}}); !errors.Is(err, down) {
		t.Errorf("got error %v, want %v", err, down)
	}
	for _, v := range []verdict.Verdict{
		{},
		{Ranks: []topo.Rank{-1}},
		{Ranks: make([]topo.Rank, 1<<20)},
	} {
		s := new(store)
		if err := verdict.Publish(t.Context(), s, v); !errors.Is(err, verdict.ErrMalformed) || s.value != nil {
			t.Errorf("%d ranks: got error %v and %d bytes stored, want %v and none", len(v.Ranks), err, len(s.value), verdict.ErrMalformed)
		}
	}
	if _, err := verdict.Read(t.Context(), new(store)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no verdict: got error %v, want the store's", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"epoch":7,"ranks":[2],"reason":"text"}`))
	f.Add([]byte(`{"epoch":7,"ranks":[-2]}`))
	f.Add([]byte(`{"ranks":[0]} x`))
	f.Fuzz(func(t *testing.T, text []byte) {
		v, err := verdict.Read(t.Context(), &store{value: append([]byte{}, text...)})
		if err != nil {
			if !errors.Is(err, verdict.ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		if len(v.Ranks) == 0 || len(v.Reason) > verdict.MaxReasonBytes {
			t.Fatalf("got %+v", v)
		}
		// What was read can be published.
		s := new(store)
		if err := verdict.Publish(t.Context(), s, v); err != nil {
			t.Fatal(err)
		}
		var again verdict.Verdict
		if err := json.Unmarshal(s.value, &again); err != nil || !reflect.DeepEqual(again, v) {
			t.Fatalf("got %+v and error %v, want %+v", again, err, v)
		}
	})
}
