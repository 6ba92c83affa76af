package rendezvous_test

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// Example makes three ranks meet. In this example the ranks are goroutines that share a store. In a real job
// each rank is a process, which connects to a store server with store.Dial.
func Example() {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	const size = 3
	var sessions [size]*rendezvous.Session
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			var err error
			sessions[rank], err = rendezvous.Join(ctx, rendezvous.JoinConfig{
				Store: kv, Job: "example", Rank: topo.Rank(rank), Size: size,
				Self: rendezvous.Record{Addr: fmt.Sprintf("10.0.0.%d:4000", rank), Host: "node",
					PID: 100 + rank},
			})
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	for _, s := range sessions {
		defer s.Close()
	}
	fmt.Println("epoch", sessions[2].Epoch)
	for rank, r := range sessions[2].Records {
		fmt.Println("rank", rank, "is", r)
	}
	// Output:
	// epoch 1
	// rank 0 is pid 100 on host "node" at 10.0.0.0:4000
	// rank 1 is pid 101 on host "node" at 10.0.0.1:4000
	// rank 2 is pid 102 on host "node" at 10.0.0.2:4000
}
