package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/rank"
)

// staysVariable is the variable that makes a rank stay alive after it has printed its error. Otherwise hvdrun
// ends the ranks that print their errors more than 5 s after the first rank, as may happen on a busy machine.
const staysVariable = "E2E_STAYS"

// program runs the program with the given name as a rank, and returns the exit status.
func program(name string) int {
	ctx := context.Background()
	if os.Getenv(levelsVariable) != "" {
		ctx = rank.WithLevelsAbove(ctx, 1)
	}
	switch name {
	case "again":
		return again(ctx)
	case "dies":
		return dies(ctx)
	case "store":
		return overHosts(serveStore)
	case "id":
		return overHosts(func() error { return makeID(ctx) })
	case "ends", "survives", "late-root":
		run := map[string]func(context.Context) error{"ends": ends, "survives": survives,
			"late-root": lateRoot}[name]
		switch err := run(ctx); {
		case errors.Is(err, errCulprit):
			return 3
		case err != nil:
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	case "elastic":
		if err := trainElastic(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	case "bound":
		if err := bound(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	case "elastic-steps":
		return ended(trainSteadily(ctx))
	case "elastic-alone":
		return ended(startAlone(ctx))
	case "elastic-votes":
		return ended(voteForSteps(ctx))
	case "elastic-ahead":
		return ended(stepAhead(ctx))
	case "elastic-exact":
		return ended(trainExactly(ctx))
	case "faulty":
		return ended(faulty(ctx))
	case "faulty-elastic":
		return ended(faultyElastic(ctx))
	case "faulty-node":
		return ended(faultyNode(ctx))
	case "get":
		return overHosts(func() error { return printPage(os.Args[1]) })
	case "watched":
		return ended(watched(ctx))
	case "checked":
		return overHosts(func() error { return checked(ctx) })
	case "node", "returning", "lagging", "starting":
		run := map[string]func(context.Context) error{"node": node, "returning": returning, "starting": starting,
			"lagging": lagging}[name]
		if err := run(ctx); err != nil {
			fmt.Println("error", err)
			return 1
		}
		return 0
	}
	if err := hvd.Init(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("pid", os.Getpid())
	var err error
	switch name {
	case "large":
		err = large(ctx, make([]float32, 16<<20))
	case "arena":
		err = arena(ctx)
	case "noarena":
		err = noArena(ctx)
	case "refill":
		err = refill(ctx)
	case "small":
		err = small(ctx)
	case "waiting":
		err = waiting(ctx)
	case "messages":
		err = messages(ctx)
	case "mixed":
		err = mixed(ctx)
	case "groups":
		err = groups(ctx)
	case "joined":
		err = joined(ctx)
	case "sums":
		err = sums(ctx)
	case "steady":
		err = steady(ctx)
	case "stalls":
		err = stalls(ctx)
	case "steps":
		err = steps(ctx)
	case "severed":
		err = severed(ctx)
	case "idle":
		// The test measures this process while it is idle, and then interrupts it.
		select {}
	default:
		fmt.Fprintf(os.Stderr, "unknown program %q\n", name)
		return 2
	}
	if err != nil {
		fmt.Println("error", err)
		if os.Getenv(staysVariable) != "" {
			time.Sleep(jobLimit) // the test ends the job when all ranks have printed their errors
		}
		return 1
	}
	if err := hvd.Shutdown(ctx); err != nil {
		fmt.Println("error", err)
		return 1
	}
	return 0
}

// stalls submits ten gradients in each of three steps. In the last step, rank 2 does not submit one of them.
func stalls(ctx context.Context) error {
	for step := range 3 {
		var handles []*hvd.Handle[[]float32]
		for g := range 10 {
			if step == 2 && g == 7 && hvd.Rank() == 2 {
				continue
			}
			h, err := hvd.AllreduceAsync(make([]float32, 100), hvd.Name(fmt.Sprintf("grad/%d", g)),
				hvd.InPlace())
			if err != nil {
				return err
			}
			handles = append(handles, h)
		}
		if step == 2 {
			fmt.Println("ready")
		}
		for _, h := range handles {
			if _, err := h.Wait(ctx); err != nil {
				return err
			}
		}
	}
	select {} // reached only by rank 2, which does nothing, as if busy with other work
}

// steps runs allreduces until rank 0 finds the file whose path is in the variable E2E_END.
func steps(ctx context.Context) error {
	x := make([]float32, 1000)
	for step := 0; ; step++ {
		hvd.MarkStep(uint64(step))
		if _, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("x")); err != nil {
			return err
		}
		if step == 20 {
			fmt.Println("ready")
		}
		// Rank 0 decides for all ranks, so that all ranks end after the same step.
		if on, err := hvd.Broadcast(ctx, []bool{proceed()}, 0, hvd.Name("proceed")); err != nil || !on[0] {
			return err
		}
	}
}

// proceed reports whether the file whose path is in the variable E2E_END is missing.
func proceed() bool {
	_, err := os.Stat(os.Getenv("E2E_END"))
	return err != nil
}

// arena runs the function large with a buffer from hvd.Alloc, which the other ranks read in place.
func arena(ctx context.Context) error {
	x, err := hvd.Alloc[float32](16 << 20)
	if err != nil {
		return err
	}
	return large(ctx, x)
}

// noArena tries to allocate more memory than there is, and then runs the function sums without this memory.
func noArena(ctx context.Context) error {
	var refused *hvd.NoMemoryError
	_, err := hvd.Alloc[float32](16 << 20)
	if !errors.As(err, &refused) {
		return fmt.Errorf("got %v, want that there is no memory", err)
	}
	fmt.Println("refused:", err)
	return sums(ctx)
}

// refill runs the function large with a buffer from hvd.Alloc until the job fails. From then on the buffer
// belongs to the rank again. refill writes to the buffer, and checks 4 s later that no other process has
// changed it.
func refill(ctx context.Context) error {
	x, err := hvd.Alloc[float32](1 << 20)
	if err != nil {
		return err
	}
	failure := large(ctx, x)
	for i := range x {
		x[i] = float32(i)
	}
	fmt.Println("refilled")
	<-time.After(4 * time.Second)
	for i := range x {
		if x[i] != float32(i) {
			fmt.Println("changed", i)
			return failure
		}
	}
	fmt.Println("unchanged")
	return failure
}

// large runs allreduces of x until one of them fails.
func large(ctx context.Context, x []float32) error {
	for i := 0; ; i++ {
		if _, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("large")); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}

// small runs allreduces of small tensors until one of them fails. Each rank submits them in an order of its
// own, so that the ranks negotiate nearly all the time.
func small(ctx context.Context) error {
	const tensors = 50
	for step := 0; ; step++ {
		var handles [tensors]*hvd.Handle[[]float32]
		for _, i := range rand.Perm(tensors) {
			var err error
			if handles[i], err = hvd.AllreduceAsync(make([]float32, 1+i),
				hvd.Name(fmt.Sprint("small", i, step%3))); err != nil {
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

// waiting makes every rank wait for an operation that never completes, because the last rank submits a tensor
// with a different name.
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

// messages passes small and large messages round all ranks in a loop until one of them fails. Those of every
// second step are in shared memory.
func messages(ctx context.Context) error {
	me, n := hvd.Rank(), hvd.Size()
	const most = 200_001
	shared, err := hvd.Alloc[float32](most)
	if err != nil {
		return err
	}
	for step := 0; ; step++ {
		x := shared[:1+step%3*100_000]
		if step%2 == 0 {
			x = make([]float32, len(x))
		}
		sent, err := hvd.SendAsync(x, (me+1)%n, step%5)
		if err != nil {
			return err
		}
		source := (me + n - 1) % n
		if step%2 == 1 {
			source = hvd.AnySource
		}
		if _, err := hvd.Recv(ctx, make([]float32, len(x)), source, step%5); err != nil {
			return err
		}
		if _, err := sent.Wait(ctx); err != nil {
			return err
		}
		if step == 10 {
			fmt.Println("ready")
		}
	}
}

// mixed runs most kinds of operations in a loop until one of them fails. In each iteration it adds, uses and
// removes a process set. It needs at least three ranks.
func mixed(ctx context.Context) error {
	n := hvd.Size()
	x := make([]float32, n<<18)
	for step := 0; ; step++ {
		set, err := hvd.AddProcessSet(ctx, []int{(1 + step) % (n - 1), n - 1})
		if err != nil {
			return err
		}
		if _, _, err := hvd.Alltoall(ctx, x, nil, hvd.Name("alltoall")); err != nil {
			return err
		}
		if _, err := hvd.Reducescatter(ctx, x, hvd.Name("reducescatter")); err != nil {
			return err
		}
		if _, err := hvd.GroupedAllgather(ctx, [][]float32{x[:hvd.Rank()], x[:100]},
			hvd.Name("allgathers")); err != nil {
			return err
		}
		if _, err := hvd.Broadcast(ctx, x[:1000], step%n, hvd.Name("broadcast")); err != nil {
			return err
		}
		if set.Included() {
			if _, err := hvd.Allreduce(ctx, x, hvd.Op(hvd.Adasum), hvd.Over(set),
				hvd.Name("adasum")); err != nil {
				return err
			}
		}
		if err := hvd.RemoveProcessSet(ctx, set); err != nil {
			return err
		}
		if step == 2 {
			fmt.Println("ready")
		}
	}
}

// groups adds overlapping process sets, each by its members only: all pairs of neighbours and one set of
// three ranks. For each set of this rank a goroutine adds the set, runs operations on it and removes it,
// until an operation fails. The goroutines start in a random order.
func groups(ctx context.Context) error {
	n := hvd.Size()
	sets := [][]int{{0, 1, 2}}
	for r := range n {
		sets = append(sets, []int{r, (r + 1) % n})
	}
	var all, begun sync.WaitGroup // begun waits until each goroutine has run three rounds
	failed := make(chan error, len(sets))
	for _, i := range rand.Perm(len(sets)) {
		if !slices.Contains(sets[i], hvd.Rank()) {
			continue
		}
		begun.Add(1)
		all.Go(func() {
			for round := 0; ; round++ {
				if err := useGroup(ctx, sets[i], round); err != nil {
					failed <- err
					return
				}
				if round == 2 {
					begun.Done()
				}
			}
		})
	}
	go func() {
		begun.Wait()
		fmt.Println("ready")
	}()
	all.Wait()
	close(failed)
	return <-failed
}

// useGroup adds a process set by its members only, runs operations on it and removes it.
func useGroup(ctx context.Context, ranks []int, round int) error {
	set, err := hvd.AddProcessSet(ctx, ranks, hvd.MembersOnly())
	if err != nil {
		return err
	}
	want := 0
	for _, r := range ranks {
		want += r + round
	}
	for _, elements := range []int{1, 1000, 100_000} {
		x := slices.Repeat([]float32{float32(hvd.Rank() + round)}, elements)
		sum, err := hvd.Allreduce(ctx, x, hvd.Op(hvd.Sum), hvd.Over(set))
		if err != nil {
			return err
		}
		if sum[0] != float32(want) || sum[elements-1] != float32(want) {
			return fmt.Errorf("round %d of %v: got the sum %v, want %d", round, set, sum[0], want)
		}
	}
	all, err := hvd.Allgather(ctx, []int32{int32(hvd.Rank())}, hvd.Over(set))
	if err != nil {
		return err
	}
	for i, r := range set.Ranks() {
		if int(all[i]) != r {
			return fmt.Errorf("round %d of %v: gathered %v", round, set, all)
		}
	}
	return hvd.RemoveProcessSet(ctx, set)
}

// joined makes all ranks join except the rank with the highest number. That rank runs allreduces until one of
// them fails.
func joined(ctx context.Context) error {
	if hvd.Rank() < hvd.Size()-1 {
		h, err := hvd.JoinAsync()
		if err != nil {
			return err
		}
		fmt.Println("ready")
		_, err = h.Wait(ctx)
		return err
	}
	x := make([]float32, 1<<20)
	for i := 0; ; i++ {
		if _, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Name("alone")); err != nil {
			return err
		}
		if i == 10 {
			fmt.Println("ready")
		}
	}
}

// stopVariable names the variable with the path of the stop file. The program "steady" ends when this file
// exists.
const stopVariable = "GOHVD_E2E_STOP"

// steady runs allreduces until rank 0 finds the stop file. Then it prints the number of allreduces.
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

// sums runs allreduces of tensors of many sizes. The order of submissions differs between ranks and between
// runs.
func sums(ctx context.Context) error {
	const tensors, steps = 30, 20
	for step := range steps {
		var handles [tensors]*hvd.Handle[[]float32]
		for _, i := range rand.Perm(tensors) {
			x := make([]float32, 1+37*i)
			for k := range x {
				x[k] = float32(1+step) / float32(3+7*hvd.Rank()+k)
			}
			var err error
			if handles[i], err = hvd.AllreduceAsync(x, hvd.InPlace(),
				hvd.Name(fmt.Sprint("sum", i))); err != nil {
				return err
			}
		}
		for _, h := range handles {
			if _, err := h.Wait(ctx); err != nil {
				return err
			}
		}
	}
	fmt.Println("done")
	return nil
}

// again joins and leaves the job five times. In the last round it prints its rank, local rank and cross rank,
// and the three sizes.
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
			fmt.Println("place", hvd.Rank(), hvd.Size(), hvd.LocalRank(), hvd.LocalSize(), hvd.CrossRank(),
				hvd.CrossSize())
		}
		if err := hvd.Shutdown(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}
