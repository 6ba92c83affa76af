package bootstrap_test

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gohvd/gohvd/rendezvous/bootstrap"
	"github.com/gohvd/gohvd/topo"
)

// Three ranks meet. They are goroutines here; processes would each get the text of the id.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	id, root, err := bootstrap.NewID(ctx, bootstrap.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer root.Close()
	text := id.String() // a secret

	const size = 3
	var rings [size]*bootstrap.Ring
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			id, err := bootstrap.ParseID(text)
			if err != nil {
				fmt.Println(err)
				return
			}
			rings[rank], err = bootstrap.Join(ctx, []bootstrap.ID{id}, bootstrap.Config{
				Rank: topo.Rank(rank), Size: size,
				Self: bootstrap.Record{Addr: fmt.Sprintf("10.0.0.%d:4000", rank), HostHash: "node", Device: fmt.Sprint(rank)},
			})
			if err != nil {
				fmt.Println(err)
				return
			}
		})
	}
	wg.Wait()
	for _, r := range rings {
		if r == nil {
			return
		}
		defer r.Close()
	}
	for rank, r := range rings[2].Records() {
		fmt.Printf("rank %d is at %s with device %s\n", rank, r.Addr, r.Device)
	}
	// Output:
	// rank 0 is at 10.0.0.0:4000 with device 0
	// rank 1 is at 10.0.0.1:4000 with device 1
	// rank 2 is at 10.0.0.2:4000 with device 2
}
