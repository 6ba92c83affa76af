package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

const (
	// storeAddrVariable names the variable that tells the program "store" the address to listen on.
	storeAddrVariable = "GOHVD_E2E_STORE"
	// secondsVariable names the variable that tells the program "checked" for how many seconds to run
	// operations.
	secondsVariable = "GOHVD_E2E_SECONDS"
	// idVariable and methodVariable name variables that tell the program "checked" how to meet the other
	// ranks. The first has the form "RANK SIZE ID", and the second is a URL. If neither is set, the program
	// uses the default of Init.
	idVariable     = "GOHVD_E2E_ID"
	methodVariable = "GOHVD_E2E_METHOD"
)

// initialize joins the job by the init method or the unique id that is set in the environment. If neither is
// set, it uses the default of Init.
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

// makeID is the program "id". It prints a new unique id and serves the ranks that use this id. It ends when
// standard input ends.
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

// overHosts runs a program of a job on several hosts and returns the exit status. It prints the error on
// standard output, because the tests read only this stream line by line.
func overHosts(run func() error) int {
	if err := run(); err != nil {
		fmt.Println("error", err)
		return 1
	}
	return 0
}

// printPage is the program "get", which prints what a server answers to a host.
func printPage(url string) error {
	answer, err := http.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

// serveStore is the program "store", which serves the store of a job without hvdrun. It prints its address
// and ends when standard input ends.
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

// checked is the program of a rank that runs operations with inputs whose results are known. It ends when the
// number of seconds in secondsVariable has passed at rank 0.
func checked(ctx context.Context) error {
	if err := initialize(ctx); err != nil {
		return err
	}
	fmt.Println("place", hvd.Rank(), hvd.Size(), hvd.LocalRank(), hvd.LocalSize(), hvd.CrossRank(),
		hvd.CrossSize())
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
			fmt.Println("ran", ran())
			return hvd.Shutdown(ctx)
		}
	}
}

// ran returns the operations that this rank has executed, with their backends, such as "hier/allreduce".
func ran() (all []string) {
	page := httptest.NewRecorder()
	hvd.MetricsHandler().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	for _, m := range executed.FindAllStringSubmatch(page.Body.String(), -1) {
		all = append(all, m[1]+"/"+m[2])
	}
	return all
}

// executed finds the backend and the kind of the operations in the metrics of a rank.
var executed = regexp.MustCompile(`(?m)^hvd_collective_tensors_total\{backend="([^"]*)",op="([^"]*)"`)

// checkRound moves data of each kind between the ranks once and checks the results. At the same time it runs
// thirty allreduces, and each rank submits these in an order of its own.
func checkRound(ctx context.Context, round int) error {
	me, n := hvd.Rank(), hvd.Size()
	type pending struct {
		h    *hvd.Handle[[]float32]
		want []float32
	}
	var sums []pending
	for _, i := range rand.Perm(30) {
		// The values are integers, so the float32 sums are exact in any order of additions.
		numElems := []int{0, 1, 37 * i, 5000 * i}[i%4]
		h, err := hvd.AllreduceAsync(ramp(numElems, me+round), hvd.Op(hvd.Sum),
			hvd.Name(fmt.Sprint("sum", i)))
		if err != nil {
			return err
		}
		want := ramp(numElems, 0)
		for k := range want {
			want[k] = float32(n)*(want[k]+float32(round)) + float32(n*(n-1)/2)
		}
		sums = append(sums, pending{h, want})
	}
	for _, check := range []func(ctx context.Context, round, me, n int) error{
		checkReducescatter, checkAllgather, checkBroadcast, checkAlltoall, checkProcessSet, checkLarge,
	} {
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

// ramp returns numElems values: from, from+1 and so on. After every 1,000 values it starts again with the
// first.
func ramp(numElems, from int) []float32 {
	x := make([]float32, numElems)
	for k := range x {
		x[k] = float32(from + k%1000)
	}
	return x
}

// check returns err if it is not nil. Otherwise it compares the slices got and want and returns an error with
// the first difference.
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

// part returns the rows that one rank sends to another in a round. The number of rows differs between pairs
// of ranks.
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

// dealt returns the rows that member m of n gets from a reducescatter. If the number of rows is not a
// multiple of n, each of the first members gets one row more.
func dealt[T any](rows []T, m, n int) []T {
	from := func(m int) int { return m*(len(rows)/n) + min(m, len(rows)%n) }
	return rows[from(m):from(m+1)]
}

// sumOfRamps returns the sum of ramp(numElems, r+round) over the given ranks r.
func sumOfRamps(numElems, round int, ranks ...int) []float32 {
	want := make([]float32, numElems)
	for _, r := range ranks {
		for k, v := range ramp(numElems, r+round) {
			want[k] += v
		}
	}
	return want
}

// all returns the ranks from 0 to n-1.
func all(n int) (ranks []int) {
	for r := range n {
		ranks = append(ranks, r)
	}
	return ranks
}

func checkReducescatter(ctx context.Context, round, me, n int) error {
	numElems := 5000 + round%7
	got, err := hvd.Reducescatter(ctx, ramp(numElems, me+round), hvd.Op(hvd.Sum), hvd.Name("reducescatter"))
	return check("reducescatter", got, dealt(sumOfRamps(numElems, round, all(n)...), me, n), err)
}

// checkProcessSet checks operations on a process set with all ranks except one. If the job has two ranks, the
// set has one rank.
func checkProcessSet(ctx context.Context, round, me, n int) error {
	ranks := slices.DeleteFunc(all(n), func(r int) bool { return r == round%n })
	set, err := hvd.AddProcessSet(ctx, ranks)
	if err != nil {
		return err
	}
	if set.Included() {
		got, err := hvd.Allreduce(ctx, ramp(3000, me+round), hvd.Op(hvd.Sum), hvd.Over(set),
			hvd.Name("of a set"))
		if err := check("allreduce of a process set", got, sumOfRamps(3000, round, ranks...),
			err); err != nil {
			return err
		}
		got, err = hvd.Broadcast(ctx, ramp(10, me), ranks[0], hvd.Over(set), hvd.Name("in a set"))
		if err := check("broadcast in a process set", got, ramp(10, ranks[0]), err); err != nil {
			return err
		}
	}
	return hvd.RemoveProcessSet(ctx, set)
}

// checkLarge checks allreduces of 6 MiB, which two levels cut into several chunks. It runs in every third
// round, because it takes much time.
func checkLarge(ctx context.Context, round, me, n int) error {
	if round%3 != 0 {
		return nil
	}
	contribution := func(r int) []float32 {
		x := make([]float32, 6<<18)
		for k := range x {
			x[k] = float32((k + 3*r + round) % 7)
		}
		return x
	}
	want := contribution(0)
	for r := 1; r < n; r++ {
		for k, v := range contribution(r) {
			want[k] += v
		}
	}
	for _, options := range [][]any{{hvd.Name("6 MiB")},
		{hvd.Name("compressed 6 MiB"), hvd.CompressFP16()}} {
		got, err := hvd.Allreduce(ctx, contribution(me), as[hvd.AllreduceOption](append(options,
			hvd.Op(hvd.Sum)))...)
		if err := check("large allreduce", got, want, err); err != nil {
			return err
		}
	}
	return nil
}

// as converts options to those of an operation. It panics if one does not apply.
func as[O any](options []any) []O {
	all := make([]O, len(options))
	for i, o := range options {
		all[i] = o.(O)
	}
	return all
}
