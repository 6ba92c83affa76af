package hvd_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gohvd/gohvd/hvd"
)

// Without a launcher a program is rank 0 of a job with one rank, so this example runs anywhere. Under hvdrun
// -np N it is one of N ranks.
func Example() {
	ctx := context.Background()
	if err := hvd.Init(ctx); err != nil {
		log.Fatal(err)
	}
	// All parts of the gradient are in flight at the same time. The ranks match the parts by name, so each
	// rank may submit them in any order, even in the random order of a map.
	parts := map[string][]float32{"weight": {2, 4}, "bias": {6}}
	handles := make(map[string]*hvd.Handle[[]float32])
	for name, part := range parts {
		h, err := hvd.AllreduceAsync(part, hvd.Name("gradient/"+name), hvd.InPlace())
		if err != nil {
			log.Fatal(err)
		}
		handles[name] = h
	}
	for _, h := range handles {
		if _, err := h.Wait(ctx); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(hvd.Rank(), hvd.Size(), parts["weight"], parts["bias"])
	if err := hvd.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: 0 1 [2 4] [6]
}

func ExampleAllgather() {
	ctx := context.Background()
	if err := hvd.Init(ctx); err != nil {
		log.Fatal(err)
	}
	defer hvd.Shutdown(ctx)
	// Ranks may contribute different numbers of rows. In this example each row has two elements.
	rows := []int64{1, 2, 3, 4}
	all, err := hvd.Allgather(ctx, rows, hvd.Shape(2, 2), hvd.Name("rows"))
	fmt.Println(all, err)
	// Output: [1 2 3 4] <nil>
}
