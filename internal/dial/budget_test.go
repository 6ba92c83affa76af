package dial

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
)

// If a Budget has no bytes left, Acquire waits until bytes are released, at most 10 s after the last release
// or until its context ends.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("requests", 10)
		for _, n := range []int64{6, 4} {
			if err := b.Acquire(t.Context(), n); err != nil {
				t.Fatal(err)
			}
		}
		got := make(chan error, 2)
		for range 2 {
			go func() { got <- b.Acquire(t.Context(), 3) }()
		}
		synctest.Wait()
		b.Release(2)
		synctest.Wait()
		if len(got) != 0 {
			t.Fatal("two bytes were enough for three")
		}
		b.Release(4)
		for range 2 {
			if err := <-got; err != nil {
				t.Error(err)
			}
		}
		began := time.Now()
		time.AfterFunc(budgetWait-1, func() { // the time begins again
			b.Release(1)
			if err := b.TryAcquire(1); err != nil {
				t.Error(err)
			}
		})
		time.AfterFunc(budgetWait, func() { b.Release(0) }) // changes nothing
		err := b.Acquire(t.Context(), 2)
		testnet.WantError(t, err, "all clients together hold 10 bytes for requests", "2 more", "at most 10")
		if d := time.Since(began); d != 2*budgetWait-1 {
			t.Errorf("it has waited for %v", d)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := b.Acquire(ctx, 1); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
