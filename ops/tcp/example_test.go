package tcp_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/ops/tcp"
)

// Two ranks add their tensors with an allreduce.
func Example() {
	ranks := []topo.Rank{0, 1}
	world := mem.New(len(ranks))
	grads := [][]float32{{1, 2, 3}, {10, 20, 30}}
	var wg sync.WaitGroup
	for me := range ranks {
		wg.Go(func() {
			b := tcp.New(world.Mesh(ranks[me]), transport.DataLane(topo.Global), ranks, me, tcp.Config{})
			buf := tensor.Bytes(grads[me])
			err := ops.Run(context.Background(), b, ops.Operation{
				Kind: message.Allreduce, Algorithm: message.Ring, DType: tensor.Float32, Op: tensor.Sum,
				Tensors: []ops.Tensor{{In: buf, Out: buf}}, Scaling: ops.Scaling{Pre: 1, Post: 1},
			})
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(grads)
	// Output: [[11 22 33] [11 22 33]]
}
