package main

import (
	"context"
	"errors"
	"flag"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

var rewrite = flag.Bool("rewrite", false, "write the goldens again")

// golden checks that got equals a file in testdata. If the flag -rewrite is set, it first writes got to the
// file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *rewrite {
		testnet.WriteFile(t, file, got)
	}
	want := testnet.ReadFile(t, file)
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

// sample returns options for a benchmark that takes little time.
func sample() options {
	return options{
		kind: message.Allreduce, minBytes: 1000, maxBytes: 1000, stepFactor: 2, iters: 3, warmup: 1,
		maxSeconds: 3, checks: 1, average: byKind,
		types: []tensor.DType{tensor.Float32}, ops: []tensor.ReduceOp{tensor.Sum}, roots: []int{0},
		placements: []bool{false, true}, modes: []stepMode{asynchronous}, format: "csv",
	}
}

// cluster calls f concurrently for each of the n ranks of a job. It returns the joined errors of all calls.
func cluster(t *testing.T, n int, settings map[string]string,
	f func(ctx context.Context, at jobPlace, rank int) error) error {
	t.Helper()
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		at := jobPlace{store: kv, settings: map[string]string{
			"HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": strconv.Itoa(n), "HOROVOD_HOSTNAME": "test",
		}}
		for name, value := range settings {
			at.settings[name] = value
		}
		wg.Go(func() { errs[r] = f(ctx, at, r) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// runs executes the function measure at n ranks. Each rank has the options that sample returns, changed by
// the function change. It returns what rank 0 prints, and fails the test if another rank prints a result.
func runs(t *testing.T, n int, settings map[string]string,
	change func(o *options, rank int)) (out, log string, err error) {
	t.Helper()
	outs, logs := make([]strings.Builder, n), make([]strings.Builder, n)
	err = cluster(t, n, settings, func(ctx context.Context, at jobPlace, rank int) error {
		o := sample()
		change(&o, rank)
		return measure(ctx, o, at, streams{&outs[rank], &logs[rank]}, nil)
	})
	for r := 1; r < n; r++ {
		if outs[r].Len() > 0 {
			t.Errorf("rank %d printed %q", r, outs[r].String())
		}
	}
	return outs[0].String(), logs[0].String(), err
}

// table returns the rows of a CSV. Each row maps column names to fields.
func table(t *testing.T, out string) []map[string]string {
	t.Helper()
	var columns []string
	var rows []map[string]string
	for l := range strings.Lines(out) {
		l = strings.TrimSpace(l)
		fields := strings.Split(l, ",")
		switch {
		case strings.HasPrefix(l, "#"):
		case columns == nil:
			columns = fields
		case len(fields) != len(columns):
			t.Fatalf("row %q has %d fields, want %d", l, len(fields), len(columns))
		default:
			row := make(map[string]string)
			for i, c := range columns {
				row[c] = fields[i]
			}
			rows = append(rows, row)
		}
	}
	return rows
}
