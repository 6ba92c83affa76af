// Digits trains a small network on handwritten digits, data-parallel. ../README.md describes it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/hvd"
)

func main() {
	o := defaults()
	flag.IntVar(&o.epochs, "epochs", o.epochs, "number of passes over the training images")
	flag.IntVar(&o.batch, "batch", o.batch, "number of images in a step, over all ranks")
	flag.Float64Var(&o.rate, "rate", o.rate, "learning rate")
	flag.Uint64Var(&o.seed, "seed", o.seed, "seed of the split, the weights and the order of the images")
	flag.IntVar(&o.slowRank, "slow-rank", o.slowRank,
		"rank that takes longer for each step, as an example for the timeline; -1 makes no rank slow")
	flag.DurationVar(&o.slow, "slow", o.slow, "how much longer the slow rank takes for each step")
	flag.Parse()
	if flag.NArg() > 0 || o.epochs < 0 || o.batch < 1 || o.slow < 0 {
		fmt.Fprintln(os.Stderr,
			"digits: invalid command line: want no arguments, -epochs and -slow of at least 0, and -batch of at least 1")
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	on, err := hvd.New(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	m, accuracy, err := train(ctx, on, o, os.Stdout)
	if err == nil {
		fmt.Printf("digits: ranks=%d epochs=%d test_accuracy=%.4f seconds=%.2f weights_sha256=%s\n",
			on.Size(), o.epochs, accuracy, time.Since(began).Seconds(), m.hash())
	} else if errors.Is(err, context.Canceled) {
		err = fmt.Errorf("digits: interrupted: %w", err)
	}
	// After an interrupt the other ranks are interrupted too and may never shut down. So the shutdown needs a
	// timeout.
	end, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(err, on.Shutdown(end))
}
