package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/secret"
	"github.com/gohvd/gohvd/store"
)

const (
	// storeAddrVariable is where the store of a job over hosts listens.
	storeAddrVariable = "GOHVD_E2E_STORE"
	// secondsVariable is how long checked works.
	secondsVariable = "GOHVD_E2E_SECONDS"
	// idVariable and methodVariable are how checked meets, in place of Init's own way: "RANK SIZE ID", and a URL.
	idVariable     = "GOHVD_E2E_ID"
	methodVariable = "GOHVD_E2E_METHOD"
)

// initialize is Init, as the variables say.
func initialize(ctx context.Context) error {
	if method := os.Getenv(methodVariable); method != "" {
		return hvd.Init(ctx, hvd.WithInitMethod(method))
	}
	given := os.Getenv(idVariable)
	if given == "" {
		return hvd.Init(ctx)
	}
	var rank, size int
	var text string
	if _, err := fmt.Sscan(given, &rank, &size, &text); err != nil {
		return err
	}
	id, err := hvd.ParseUniqueID(text)
	if err != nil {
		return err
	}
	return hvd.InitWithID(ctx, id, rank, size)
}

// makeID prints an id, and answers those who have it until its input ends.
func makeID(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	id, err := hvd.NewUniqueID(ctx)
	if err != nil {
		return err
	}
	fmt.Println(id)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// overHosts runs a program of a job over hosts; it returns the exit status. Errors go where the rest goes, since nobody reads
// two streams of each rank.
func overHosts(run func() error) int {
	if err := run(); err != nil {
		fmt.Println("error", err)
		return 1
	}
	return 0
}

// serveStore is the job's store where no hvdrun has one. It prints its address, and serves until its input ends.
func serveStore() error {
	s, err := secret.Parse(os.Getenv("HVD_SECRET"))
	if err != nil {
		return err
	}
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	server, err := store.Serve(os.Getenv(storeAddrVariable), kv, store.Config{Secret: s})
	if err != nil {
		return err
	}
	fmt.Println(server.Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, server.Close())
}

// checked runs every operation with inputs whose results are known, until rank 0's time is over.
func checked(ctx context.Context) error {
	if err := initialize(ctx); err != nil {
		return err
	}
	fmt.Println("place", hvd.Rank(), hvd.Size(), hvd.LocalRank(), hvd.LocalSize(), hvd.CrossRank(), hvd.CrossSize())
	seconds, err := strconv.ParseFloat(os.Getenv(secondsVariable), 64)
	if err != nil {
		return err
	}
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	for round := 0; ; round++ {
		if err := checkRound(ctx, round); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		stop := int64(0)
		if hvd.Rank() == 0 && time.Now().After(end) {
			stop = 1
		}
		sum, err := hvd.Allreduce(ctx, []int64{stop}, hvd.Op(hvd.Sum), hvd.Name("stop"))
		if err != nil {
			return err
		}
		if sum[0] > 0 {
			fmt.Println("rounds", round+1)
			return hvd.Shutdown(ctx)
		}
	}
}

// checkRound runs every operation once, and a few dozen allreduces beside them in an order of each rank's own.
func checkRound(ctx context.Context, round int) error {
	me, n := hvd.Rank(), hvd.Size()
	type pending struct {
		h    *hvd.Handle[float32]
		want []float32
	}
	var sums []pending
	for _, i := range rand.Perm(30) {
		// Whole numbers, of which float32 has the sums exactly, in any order.
		numElems := []int{0, 1, 37 * i, 5000 * i}[i%4]
		h, err := hvd.AllreduceAsync(ramp(numElems, me+round), hvd.Op(hvd.Sum), hvd.Name(fmt.Sprint("sum", i)))
		if err != nil {
			return err
		}
		want := ramp(numElems, 0)
		for k := range want {
			want[k] = float32(n)*(want[k]+float32(round)) + float32(n*(n-1)/2)
		}
		sums = append(sums, pending{h, want})
	}
	for _, check := range []func(context.Context, int, int, int) error{checkAllgather, checkBroadcast, checkAlltoall, checkBarrier} {
		if err := check(ctx, round, me, n); err != nil {
			return err
		}
	}
	for _, p := range sums {
		got, err := p.h.Wait(ctx)
		if err := check("allreduce", got, p.want, err); err != nil {
			return err
		}
	}
	return nil
}

// ramp is from, from+1 and so on, over again after a thousand.
func ramp(numElems, from int) []float32 {
	x := make([]float32, numElems)
	for k := range x {
		x[k] = float32(from + k%1000)
	}
	return x
}

// check holds what an operation gave against what it should.
func check[T comparable](op string, got, want []T, err error) error {
	if err != nil || slices.Equal(got, want) {
		return err
	}
	if len(got) != len(want) {
		return fmt.Errorf("%s: got %d elements, want %d", op, len(got), len(want))
	}
	k := 0
	for got[k] == want[k] {
		k++
	}
	return fmt.Errorf("%s: got %v at %d of %d, want %v", op, got[k], k, len(got), want[k])
}

// part is what a rank gives another in a round, of a length of its own.
func part(from, to, round int) []int64 {
	return slices.Repeat([]int64{int64(1000*round + 10*from + to)}, 100*((from+2*to+round)%3))
}

func checkAllgather(ctx context.Context, round, me, n int) error {
	var want []int64
	for r := range n {
		want = append(want, part(r, 0, round)...)
	}
	got, err := hvd.Allgather(ctx, part(me, 0, round), hvd.Name("allgather"))
	return check("allgather", got, want, err)
}

func checkBroadcast(ctx context.Context, round, me, n int) error {
	root := round % n
	got, err := hvd.Broadcast(ctx, ramp(20000, me), root, hvd.Name("broadcast"))
	return check(fmt.Sprint("broadcast from ", root), got, ramp(20000, root), err)
}

func checkAlltoall(ctx context.Context, round, me, n int) error {
	var x, want []int64
	splits, from := make([]int, n), make([]int, n)
	for r := range n {
		x, want = append(x, part(me, r, round)...), append(want, part(r, me, round)...)
		splits[r], from[r] = len(part(me, r, round)), len(part(r, me, round))
	}
	got, received, err := hvd.Alltoall(ctx, x, splits, hvd.Name("alltoall"))
	if err := check("alltoall", got, want, err); err != nil {
		return err
	}
	return check("rows of alltoall", received, from, nil)
}

// checkBarrier has one rank come late to a barrier: nobody may leave it before. All hosts have one clock here.
func checkBarrier(ctx context.Context, round, me, n int) error {
	if round%n == me {
		<-time.After(2 * time.Millisecond)
	}
	entered := clock()
	if err := hvd.Barrier(ctx, hvd.Name("barrier")); err != nil {
		return err
	}
	left := clock()
	last, err := hvd.Allreduce(ctx, []int64{entered}, hvd.Op(hvd.Max), hvd.Name("entered"))
	if err == nil && left < last[0] {
		err = fmt.Errorf("barrier: rank %d left %v before the last rank entered", me, time.Duration(last[0]-left))
	}
	return err
}

// clock is in nanoseconds, the same for all processes of this machine.
func clock() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0 // there is no machine without it
	}
	return t.Nano()
}
