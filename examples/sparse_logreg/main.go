// Sparse_logreg trains a logistic regression with millions of features through a parameter server, and
// compares the result with the known optimum. ../README.md describes it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/ps"
)

// options holds the settings of a training.
type options struct {
	features int // number of features
	examples int // number of examples of each worker
	nonzeros int // number of features of an example
	batch    int // number of examples in a step of a worker
	epochs   int // number of passes of each worker over its examples
	rate     float64
	seed     uint64
}

func defaults() options {
	return options{features: 3_000_000, examples: 20_000, nonzeros: 30, batch: 1000, epochs: 20, rate: 0.3,
		seed: 1}
}

func main() {
	o, staleness := defaults(), -1
	flag.IntVar(&o.features, "features", o.features, "number of features")
	flag.IntVar(&o.examples, "examples", o.examples, "number of examples of each worker")
	flag.IntVar(&o.nonzeros, "nonzeros", o.nonzeros, "number of features of an example")
	flag.IntVar(&o.batch, "batch", o.batch, "number of examples in a step of a worker")
	flag.IntVar(&o.epochs, "epochs", o.epochs, "number of passes of each worker over its examples")
	flag.Float64Var(&o.rate, "rate", o.rate, "learning rate")
	flag.Uint64Var(&o.seed, "seed", o.seed, "seed of the data")
	flag.IntVar(&staleness, "staleness", staleness,
		"0: bulk-synchronous; more: stale-synchronous with this bound; -1: as HVD_STALENESS says")
	flag.Parse()
	if flag.NArg() > 0 || min(o.features, o.examples, o.nonzeros, o.batch, o.epochs) < 1 ||
		o.nonzeros > o.features {
		fmt.Fprintln(os.Stderr, "sparse_logreg: invalid command line: want no arguments, and numbers of at least 1")
		flag.Usage()
		os.Exit(2)
	}
	job := ps.Config{Settings: make(map[string]string)}
	if staleness >= 0 {
		job.Settings["HVD_STALENESS"] = strconv.Itoa(staleness)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, job, o, os.Stdout); err != nil {
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
		_, err = ps.NewKVServer(node, ps.Adagrad[float32](o.rate, 1e-8), ps.App(weightsApp))
		if err == nil {
			_, err = ps.NewKVServer(node, ps.Sum[float64](), ps.App(totalsApp))
		}
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
	if err := t.initialize(ctx); err != nil {
		return err
	}
	if err := t.meet(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := t.train(ctx); err != nil {
		return err
	}
	if err := t.meet(ctx); err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	sums, err := t.totals(ctx)
	if err != nil || node.Rank() != 0 {
		return err
	}
	objective, optimum := sums[0]/sums[2], sums[1]/sums[2]
	excess := objective/optimum - 1
	fmt.Fprintf(out, "sparse_logreg: servers=%d workers=%d features=%d examples=%.0f objective=%.5f optimum=%.5f "+
		"excess_percent=%.3f seconds=%.2f keys_per_second=%.0f\n", node.NumServers(), node.NumWorkers(), o.features,
		sums[2], objective, optimum, 100*excess, seconds, sums[3]/seconds)
	if excess > 0.01 {
		return errors.New("sparse_logreg: the objective is more than 1% above the optimum")
	}
	return nil
}
