// Ps_digits trains a linear classifier of handwritten digits through a parameter server.
// ../README.md describes it.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/ps"
)

// options holds the settings of a training.
type options struct {
	epochs int // number of passes of each worker over its images
	batch  int // number of images in a step of a worker
	rate   float64
	seed   uint64
}

func defaults() options { return options{epochs: 20, batch: 16, rate: 0.5, seed: 1} }

func main() {
	o := defaults()
	flag.IntVar(&o.epochs, "epochs", o.epochs, "number of passes of each worker over its images")
	flag.IntVar(&o.batch, "batch", o.batch, "number of images in a step of a worker")
	flag.Float64Var(&o.rate, "rate", o.rate, "learning rate")
	flag.Uint64Var(&o.seed, "seed", o.seed, "seed of the split and of the order of the images")
	flag.Parse()
	if flag.NArg() > 0 || o.epochs < 0 || o.batch < 1 {
		fmt.Fprintln(os.Stderr,
			"ps_digits: invalid command line: want no arguments, -epochs of at least 0, and -batch of at least 1")
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, ps.Config{}, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run takes part in a training, as the node that DMLC_ROLE says. The worker with rank 0 writes the result.
func run(ctx context.Context, job ps.Config, o options, out io.Writer) error {
	node, err := ps.Join(ctx, job)
	if err != nil {
		return err
	}
	defer node.Close() // does nothing after Finalize
	switch node.Role() {
	case ps.Server:
		_, err = ps.NewKVServer(node, ps.SGD[float32](o.rate))
	case ps.Worker:
		err = work(ctx, node, o, out)
	}
	if err != nil {
		return err
	}
	return node.Finalize(ctx) // waits for the other nodes
}

// work trains together with the other workers.
func work(ctx context.Context, node *ps.Node, o options, out io.Writer) error {
	t, err := newTrainer(node, o)
	if err != nil {
		return err
	}
	// The first worker sets the weights. The others must not pull them before.
	if node.Rank() == 0 {
		if err := t.initialize(ctx); err != nil {
			return err
		}
	}
	if err := node.Barrier(ctx, ps.WorkerGroup); err != nil {
		return err
	}
	began := time.Now()
	if err := t.train(ctx); err != nil {
		return err
	}
	// The other workers may still train.
	if err := node.Barrier(ctx, ps.WorkerGroup); err != nil || node.Rank() != 0 {
		return err
	}
	seconds := time.Since(began).Seconds()
	accuracy, err := t.test(ctx)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "ps_digits: servers=%d workers=%d epochs=%d test_accuracy=%.4f seconds=%.2f\n",
		node.NumServers(), node.NumWorkers(), o.epochs, accuracy, seconds)
	return err
}
