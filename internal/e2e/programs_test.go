package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"

	"github.com/gohvd/gohvd/hvd"
)

// program is what a rank runs; it returns the exit status.
func program(name string) int {
	ctx := context.Background()
	if name == "again" {
		return again(ctx)
	}
	if err := hvd.Init(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("pid", os.Getpid())
	var err error
	switch name {
	case "large":
		err = large(ctx)
	case "small":
		err = small(ctx)
	case "waiting":
		err = waiting(ctx)
	case "steady":
		err = steady(ctx)
	case "idle":
		// The parent measures, then interrupts.
		select {}
	case "leave":
		if hvd.Rank() == 1 {
			return 0 // without Shutdown: a death
		}
		err = hvd.Barrier(ctx, hvd.Name("after"))
	default:
		fmt.Fprintf(os.Stderr, "unknown program %q\n", name)
		return 2
	}
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	if err := hvd.Shutdown(ctx); err != nil {
		fmt.Println("error", err)
		return 1
	}
	return 0
}

// large reduces 64 MiB for ever.
func large(ctx context.Context) error {
	x := make([]float32, 16<<20)
	for i := 0; ; i++ {
		if _, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("large")); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}

// small reduces small tensors for ever, in an order of each rank's own, so that it is nearly always negotiating.
func small(ctx context.Context) error {
	const tensors = 50
	for step := 0; ; step++ {
		var handles [tensors]*hvd.Handle[float32]
		for _, i := range rand.Perm(tensors) {
			var err error
			if handles[i], err = hvd.AllreduceAsync(make([]float32, 1+i), hvd.Name(fmt.Sprint("small", i, step%3))); err != nil {
				return err
			}
		}
		var first error
		for _, h := range handles {
			if _, err := h.Wait(ctx); err != nil && first == nil {
				first = err
			}
		}
		if first != nil {
			return first
		}
		if step == 3 {
			fmt.Println("ready")
		}
	}
}

// waiting leaves every rank with a request that can never be answered: the last one asks for another tensor than
// the rest.
func waiting(ctx context.Context) error {
	if err := hvd.Barrier(ctx, hvd.Name("start")); err != nil {
		return err
	}
	name := "unanswered"
	if hvd.Rank() == hvd.Size()-1 {
		name = "other"
	}
	h, err := hvd.AllreduceAsync([]float32{1}, hvd.Name(name))
	if err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = h.Wait(ctx)
	return err
}

// stopVariable names a file whose existence ends steady.
const stopVariable = "GOHVD_E2E_STOP"

// steady works until rank 0 sees the stop file.
func steady(ctx context.Context) error {
	for i := int64(0); ; i++ {
		stop := int64(0)
		if hvd.Rank() == 0 {
			if _, err := os.Stat(os.Getenv(stopVariable)); err == nil {
				stop = 1
			}
		}
		sum, err := hvd.Allreduce(ctx, []int64{stop, i}, hvd.Op(hvd.Sum), hvd.Name("steady"))
		if err != nil {
			return err
		}
		if sum[1] != i*int64(hvd.Size()) {
			return fmt.Errorf("round %d: got %d", i, sum[1])
		}
		if i == 10 {
			fmt.Println("ready")
		}
		if sum[0] > 0 {
			fmt.Println("rounds", i)
			return nil
		}
	}
}

// again joins and leaves the job several times.
func again(ctx context.Context) int {
	const rounds = 5
	for i := range rounds {
		if err := hvd.Init(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		sum, err := hvd.Allreduce(ctx, []int64{int64(i)}, hvd.Op(hvd.Sum), hvd.Name("round"))
		if err != nil || sum[0] != int64(i*hvd.Size()) {
			fmt.Fprintf(os.Stderr, "round %d: got %v and error %v\n", i, sum, err)
			return 1
		}
		if i == rounds-1 {
			fmt.Println("place", hvd.Rank(), hvd.Size(), hvd.LocalRank(), hvd.LocalSize(), hvd.CrossRank(), hvd.CrossSize())
		}
		if err := hvd.Shutdown(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}
