package client_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/gohvd/gohvd/hvd"
)

// failing is a program of three ranks whose last operation fails at rank 1, at least, with the error that it gives.
type failing struct {
	title string
	opts  []hvd.InitOption
	// is are the sorts of error that it is, and text what it says, where that is not the same words in every run.
	is   []string
	do   func(ctx context.Context, e *hvd.Engine) error
	ends bool // the job is over then
}

// sorts are the sorts of error that err is.
func sorts(err error) (names []string) {
	as := func(name string, is bool) {
		if is {
			names = append(names, name)
		}
	}
	as("usage", errors.As(err, new(*hvd.UsageError)))
	as("duplicate", errors.As(err, new(*hvd.DuplicateNameError)))
	as("mismatch", errors.As(err, new(*hvd.MismatchError)))
	as("peer", errors.As(err, new(*hvd.PeerError)))
	as("stall", errors.As(err, new(*hvd.StallError)))
	as("op", errors.As(err, new(*hvd.OpError)))
	as("shut down", errors.Is(err, hvd.ErrShutDown))
	as("closed", errors.Is(err, hvd.ErrClosed))
	as("no process set", errors.Is(err, hvd.ErrNoProcessSet))
	as("not initialized", errors.Is(err, hvd.ErrNotInitialized))
	as("deadline", errors.Is(err, context.DeadlineExceeded))
	return names
}

func named(name string, e *hvd.Engine, more ...hvd.Option) []hvd.Option {
	return append(more, hvd.Name(name), hvd.On(e))
}

// waiting begins an operation at rank 0 alone, which so waits.
func waiting(e *hvd.Engine, more ...hvd.Option) (*hvd.Handle[int32], error) {
	return hvd.AllreduceAsync([]int32{1}, append(named("waits", e), more...)...)
}

var failures = []failing{
	{title: "a name in flight", is: []string{"usage", "duplicate"}, do: func(ctx context.Context, e *hvd.Engine) error {
		h, err := waiting(e)
		if err != nil {
			return err
		}
		_, err = waiting(e)
		if _, failed := h.Wait(ctx); failed != nil {
			return failed
		}
		return err
	}},
	{title: "a name that nobody has seen done", is: []string{"usage", "duplicate"}, do: func(ctx context.Context, e *hvd.Engine) error {
		h, err := waiting(e)
		if err != nil {
			return err
		}
		if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
			return err
		}
		_, err = waiting(e)
		if _, failed := h.Wait(ctx); failed != nil {
			return failed
		}
		return err
	}},
	{title: "a name of a group in flight", is: []string{"usage", "duplicate"}, do: func(ctx context.Context, e *hvd.Engine) error {
		h, err := hvd.AllreduceAsync([]int32{1}, named("g", e)...)
		if err != nil {
			return err
		}
		_, err = hvd.GroupedAllreduce(ctx, [][]int32{{1}, {2}}, named("g", e)...)
		if _, failed := h.Wait(ctx); failed != nil {
			return failed
		}
		return err
	}},
	{title: "shapes", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		_, err := hvd.Allreduce(ctx, make([]int32, 3+min(e.Rank(), 1)), named("x", e)...)
		return err
	}},
	{title: "types", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) (err error) {
		if e.Rank() == 0 {
			_, err = hvd.Broadcast(ctx, make([]int32, 3), 0, named("x", e)...)
		} else {
			_, err = hvd.Broadcast(ctx, make([]float64, 3), 0, named("x", e)...)
		}
		return err
	}},
	{title: "operations", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) (err error) {
		if e.Rank() == 0 {
			return hvd.Barrier(ctx, named("x", e)...)
		}
		_, err = hvd.Allreduce(ctx, make([]int32, 3), named("x", e)...)
		return err
	}},
	{title: "shapes in a group", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		_, err := hvd.GroupedAllreduce(ctx, [][]int32{make([]int32, 2), make([]int32, 3+min(e.Rank(), 1))}, named("g", e)...)
		return err
	}},
	{title: "a size in place", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		_, _, err := hvd.Alltoall(ctx, make([]int32, 3), []int{1, 0, 0}, named("x", e, hvd.InPlace())...)
		return err
	}},
	{title: "no member", is: []string{"usage"}, opts: []hvd.InitOption{hvd.WithProcessSets([]int{0})}, do: func(ctx context.Context, e *hvd.Engine) error {
		_, err := hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Over(e.ProcessSets()[1]))...)
		return err
	}},
	{title: "a removed set", is: []string{"usage", "no process set"}, do: func(ctx context.Context, e *hvd.Engine) error {
		set, err := hvd.AddProcessSet(ctx, []int{0, 1}, hvd.On(e))
		if err != nil {
			return err
		}
		if err := hvd.RemoveProcessSet(ctx, set); err != nil {
			return err
		}
		_, err = hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Over(set))...)
		return err
	}},
	{title: "removal of a removed set", is: []string{"usage", "no process set"}, do: func(ctx context.Context, e *hvd.Engine) error {
		set, err := hvd.AddProcessSet(ctx, []int{1, 0}, hvd.On(e))
		if err != nil {
			return err
		}
		if err := hvd.RemoveProcessSet(ctx, set); err != nil {
			return err
		}
		return hvd.RemoveProcessSet(ctx, set)
	}},
	{title: "a set that is removed while it is waited in", is: []string{"op", "no process set"}, do: func(ctx context.Context, e *hvd.Engine) error {
		set, err := hvd.AddProcessSet(ctx, []int{0, 1}, hvd.On(e))
		if err != nil {
			return err
		}
		var h *hvd.Handle[int32]
		if e.Rank() == 1 {
			if h, err = waiting(e, hvd.Over(set)); err != nil {
				return err
			}
		}
		if err := hvd.RemoveProcessSet(ctx, set); err != nil {
			return err
		}
		if h == nil {
			return nil
		}
		_, err = h.Wait(ctx)
		return err
	}},
	{title: "sets that contradict each other", is: []string{"mismatch", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		_, err := hvd.AddProcessSet(ctx, []int{e.Rank()}, hvd.On(e))
		return err
	}},
	{title: "after joining", is: []string{"usage"}, do: func(ctx context.Context, e *hvd.Engine) error {
		h, err := hvd.JoinAsync(hvd.On(e))
		if err != nil {
			return err
		}
		_, err = hvd.Allreduce(ctx, make([]int32, 3), named("x", e)...)
		if _, failed := h.Wait(ctx); failed != nil {
			return failed
		}
		return err
	}},
	{title: "a giving up", is: []string{"deadline"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() != 1 {
			<-e.Done()
			return nil
		}
		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		_, err := hvd.Allreduce(short, make([]int32, 3), named("x", e)...)
		return err
	}, ends: true},
	{title: "another's shutdown", is: []string{"peer", "op", "shut down"}, do: func(ctx context.Context, e *hvd.Engine) error {
		switch e.Rank() {
		case 0:
			return e.Shutdown(ctx)
		case 2:
			<-e.Done()
			return nil
		}
		h, err := waiting(e)
		if err != nil {
			return err
		}
		_, err = h.Wait(ctx)
		return err
	}, ends: true},
	{title: "after the own shutdown", is: []string{"op", "shut down"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if err := e.Shutdown(ctx); err != nil {
			return err
		}
		_, err := hvd.Allreduce(ctx, make([]int32, 3), named("x", e)...)
		return err
	}, ends: true},
	{title: "a shutdown cut short", is: []string{"op", "closed"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() != 1 {
			<-e.Done()
			return nil
		}
		h, err := waiting(e)
		if err != nil {
			return err
		}
		short, cancel := context.WithCancel(ctx)
		cancel()
		if err := e.Shutdown(short); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("shutdown: got %w, want %w", err, context.Canceled)
		}
		_, err = h.Wait(ctx)
		return err
	}, ends: true},
	{title: "out of time", is: []string{"peer", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() != 1 {
			<-e.Done()
			return nil
		}
		_, err := hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Timeout(100*time.Millisecond))...)
		return err
	}, ends: true},
	{title: "an added set out of time", is: []string{"peer", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() != 1 {
			<-e.Done()
			return nil
		}
		_, err := hvd.AddProcessSet(ctx, []int{0, 1}, hvd.On(e), hvd.Timeout(100*time.Millisecond))
		return err
	}, ends: true},
	{title: "a removed set out of time", is: []string{"peer", "op"}, opts: []hvd.InitOption{hvd.WithProcessSets([]int{0})},
		do: func(ctx context.Context, e *hvd.Engine) error {
			if e.Rank() != 1 {
				<-e.Done()
				return nil
			}
			return hvd.RemoveProcessSet(ctx, e.ProcessSets()[1], hvd.Timeout(100*time.Millisecond))
		}, ends: true},
	{title: "after a failure", is: []string{"peer", "op"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() == 0 {
			_, _ = hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Timeout(100*time.Millisecond))...)
		}
		<-e.Done()
		_, err := hvd.Allreduce(ctx, make([]int32, 3), named("later", e)...)
		return err
	}, ends: true},
	{title: "why it failed", is: []string{"peer"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() == 0 {
			_, _ = hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Timeout(100*time.Millisecond))...)
		}
		<-e.Done()
		return e.Err()
	}, ends: true},
	{title: "shutdown after a failure", is: []string{"peer"}, do: func(ctx context.Context, e *hvd.Engine) error {
		if e.Rank() == 0 {
			_, _ = hvd.Allreduce(ctx, make([]int32, 3), named("x", e, hvd.Timeout(100*time.Millisecond))...)
		}
		<-e.Done()
		return e.Shutdown(ctx)
	}, ends: true},
	{title: "a stall", is: []string{"stall", "op", "shut down"},
		opts: with("HOROVOD_STALL_CHECK_TIME_SECONDS", "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2"),
		do: func(ctx context.Context, e *hvd.Engine) error {
			if e.Rank() != 1 {
				<-e.Done()
				return nil
			}
			_, err := hvd.Allreduce(ctx, make([]int32, 3), named("x", e)...)
			return err
		}, ends: true},
	{title: "why it was shut down", is: []string{"stall", "shut down"},
		opts: with("HOROVOD_STALL_CHECK_TIME_SECONDS", "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2"),
		do: func(ctx context.Context, e *hvd.Engine) error {
			if e.Rank() == 1 {
				_, _ = hvd.AllreduceAsync(make([]int32, 3), named("x", e)...)
			}
			<-e.Done()
			return e.Err()
		}, ends: true},
}

// varies are the parts of errors that are not the same in every run.
var varies = regexp.MustCompile(`[0-9.]+(m?s|µs)\b|pid \d+|127\.0\.0\.1:\d+`)

// An error over a sidecar is of the sorts, and says the words, of the same error in process.
func TestErrors(t *testing.T) {
	for _, f := range failures {
		t.Run(f.title, func(t *testing.T) {
			t.Parallel()
			var texts [2]string // by way
			for i, w := range ways {
				do := func(ctx context.Context, t *testing.T, e *hvd.Engine) {
					err := f.do(ctx, e)
					if e.Rank() == 1 {
						if err == nil {
							t.Errorf("%s: no error", w.name)
							return
						}
						if got := sorts(err); fmt.Sprint(got) != fmt.Sprint(f.is) {
							t.Errorf("%s: got %v, which is %q, want %q", w.name, err, got, f.is)
						}
						texts[i] = varies.ReplaceAllString(err.Error(), "#")
					} else if err != nil && !f.ends && len(sorts(err)) == 0 {
						t.Errorf("%s: rank %d: %v", w.name, e.Rank(), err)
					}
					if f.ends {
						short, cancel := context.WithCancel(ctx)
						cancel()
						_ = e.Shutdown(short) // it may have failed, and others need not come
					}
				}
				if f.ends {
					w.start(t, 3, do, f.opts...)
				} else {
					w.run(t, 3, do, f.opts...)
				}
			}
			if texts[0] != texts[1] {
				t.Errorf("the error\nin process:     %s\nover sidecars:  %s", texts[0], texts[1])
			}
		})
	}
}
