package bootstrap

import (
	"context"
	"errors"
	"testing"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// A process without the secret changes values in a store in which ranks meet. The ranks get an error,
// whatever it writes: a text, the value of another key, or a value that is sealed with another secret.
func TestSealedValues(t *testing.T) {
	ctx := testnet.Context(t)
	open := newStore(t)
	key, _ := secret.New()
	other, _ := secret.New()
	s := sealed(open, key)
	set := func(key, value string) {
		t.Helper()
		if err := s.Set(ctx, key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	set("root", "127.0.0.1:1")
	set("else", "127.0.0.1:6")
	if got, err := s.Get(ctx, "root"); string(got) != "127.0.0.1:1" || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	if got, swapped, err := s.CompareAndSet(ctx, "root", []byte("127.0.0.1:1"), []byte("127.0.0.1:2")); !swapped ||
		string(got) != "127.0.0.1:2" || err != nil {
		t.Fatalf("got %q, %v, %v", got, swapped, err)
	}
	if got, swapped, err := s.CompareAndSet(ctx, "root", nil, []byte("127.0.0.1:3")); swapped ||
		string(got) != "127.0.0.1:2" || err != nil {
		t.Fatalf("got %q, %v, %v", got, swapped, err)
	}
	if got, swapped, err := s.CompareAndSet(ctx, "new", nil, []byte("x")); !swapped || string(got) != "x" ||
		err != nil {
		t.Fatalf("got %q, %v, %v", got, swapped, err)
	}
	if n, err := s.Add(ctx, "count", 2); n != 2 || err != nil {
		t.Fatalf("got %d, %v", n, err)
	}
	swapped, err := open.Get(ctx, "else")
	if err != nil {
		t.Fatal(err)
	}
	prev, err := s.Watch(ctx, "root", nil)
	if err != nil {
		t.Fatal(err)
	}
	for what, value := range map[string][]byte{
		"a text":              []byte("127.0.0.1:6"),
		"nothing":             {},
		"another key's value": swapped,
		"another secret":      other.Seal("root", []byte("127.0.0.1:6")),
	} {
		if err := open.Set(ctx, "root", value); err != nil {
			t.Fatal(err)
		}
		for op, try := range map[string]func() error{
			"get":   func() error { _, err := s.Get(ctx, "root"); return err },
			"watch": func() error { _, err := s.Watch(ctx, "root", prev); return err },
			"compare-and-set": func() error {
				_, _, err := s.CompareAndSet(ctx, "root", []byte("no"), []byte("no"))
				return err
			},
		} {
			if err := try(); !errors.Is(err, secret.ErrForged) {
				t.Errorf("%s: %s: got %v, want ErrForged", what, op, err)
			}
		}
	}
	for op, try := range map[string]func(context.Context) error{
		"append":    func(ctx context.Context) error { return s.Append(ctx, "k", nil) },
		"multi-get": func(ctx context.Context) error { _, err := s.MultiGet(ctx, "k"); return err },
		"multi-set": func(ctx context.Context) error { return s.MultiSet(ctx, []string{"k"}, [][]byte{nil}) },
		"push":      func(ctx context.Context) error { return s.Push(ctx, "k", nil) },
		"pop":       func(ctx context.Context) error { _, err := s.Pop(ctx, "k"); return err },
		"try-pop":   func(ctx context.Context) error { _, _, err := s.TryPop(ctx, "k"); return err },
	} {
		if err := try(ctx); !errors.Is(err, store.ErrUnsupported) {
			t.Errorf("%s: got %v, want ErrUnsupported", op, err)
		}
	}
}
