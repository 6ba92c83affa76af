package tcp_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/ops/tcp"
	"github.com/gohvd/gohvd/tensor"
	"github.com/gohvd/gohvd/topo"
	"github.com/gohvd/gohvd/transport"
	"github.com/gohvd/gohvd/transport/mem"
)

// Two ranks add what they have.
func Example() {
	ranks := []topo.Rank{0, 1}
	world := mem.New(len(ranks))
	grads := [][]float32{{1, 2, 3}, {10, 20, 30}}
	var wg sync.WaitGroup
	for me := range ranks {
		wg.Go(func() {
			b := tcp.New(world.Mesh(ranks[me]), transport.DataLane(topo.Global), ranks, me, tcp.Config{})
			err := b.Allreduce(context.Background(), message.Ring, tensor.Float32, tensor.Sum, tensor.Bytes(grads[me]))
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(grads)
	// Output: [[11 22 33] [11 22 33]]
}
