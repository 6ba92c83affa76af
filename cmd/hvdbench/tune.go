package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/tcp"
)

// tuning is a series of cases that --tune measures with several algorithms.
type tuning struct {
	kind       message.Kind
	dt         tensor.DType
	op         tensor.ReduceOp
	algorithms []message.Algorithm
}

// tunings returns the series that --tune measures. The last series is for sums that must be computed in the
// order of the ranks, which only some algorithms do. Its rules follow the rules of the first series in the
// table, so they count only for these sums.
func tunings() []tuning {
	var all []tuning
	for _, k := range []message.Kind{message.Allreduce, message.Reducescatter, message.Allgather,
		message.Broadcast} {
		t := tuning{k, tensor.Float32, tensor.NoReduce, tcp.Algorithms(k)}
		if k.Reduces() {
			t.op = tensor.Sum
		}
		all = append(all, t)
	}
	return append(all, tuning{message.Allreduce, tensor.BFloat16, tensor.Sum,
		[]message.Algorithm{message.Direct, message.Exchange}})
}

// keep is how much faster an algorithm must be than the best algorithm of the size before to replace it.
const keep = 0.95

// tune measures the algorithms of the TCP backend at all sizes, and makes rules for the table of algorithms.
// At rank 0 it writes the rules to the file of --tune. Rules in the file for other numbers of ranks stay
// there.
func (b *benchmark) tune(ctx context.Context) error {
	if !b.job.backend.tcpOnly {
		return errors.New("--tune measures algorithms over TCP: set HOROVOD_CPU_OPERATIONS=tcp")
	}
	if b.team.Size() < 2 {
		return errors.New("--tune needs at least 2 ranks")
	}
	var rules tcp.Table
	for _, t := range tunings() {
		series, err := b.measureAlgorithms(ctx, t)
		if err != nil {
			return err
		}
		rules = append(rules, series...)
	}
	if b.team.Rank() != 0 {
		return nil
	}
	return writeRules(b.tuneFile, rules, b.team.Size())
}

// measureAlgorithms measures one series and returns its rules: one for each range of sizes with the same best
// algorithm. The last rule has no limit of bytes.
func (b *benchmark) measureAlgorithms(ctx context.Context, t tuning) (tcp.Table, error) {
	var rules tcp.Table
	for _, size := range b.sizes() {
		s := opSpec{kind: t.kind, dt: t.dt, op: t.op, inPlace: true,
			count: size / int64(t.dt.Size()) / parts(t.kind, b.team.Size())}
		if s.count == 0 {
			continue
		}
		times := make(map[message.Algorithm]float64)
		for _, s.algorithm = range t.algorithms {
			r, err := b.shoot(ctx, s)
			if err != nil {
				return nil, err
			}
			b.wrong += max(0, r.wrong)
			times[s.algorithm] = r.p50
		}
		before := message.NoAlgorithm
		if len(rules) > 0 {
			before = rules[len(rules)-1].Algorithm
		}
		best := choose(t.algorithms, times, before)
		b.out.note(describe(s, b.team.Size(), t.algorithms, times, best))
		if best == before {
			rules[len(rules)-1].MaxBytes = s.numBytes(b.team.Size())
			continue
		}
		rules = append(rules, tcp.Rule{Kind: t.kind, MaxRanks: b.team.Size(),
			MaxBytes: s.numBytes(b.team.Size()), Algorithm: best})
	}
	if len(rules) > 0 {
		rules[len(rules)-1].MaxBytes = 0
	}
	return rules, nil
}

// choose returns the fastest algorithm. It prefers the algorithm before, the best one of the next smaller
// size, unless another one takes less than keep times its time.
func choose(algorithms []message.Algorithm, times map[message.Algorithm]float64,
	before message.Algorithm) message.Algorithm {
	best, least := message.NoAlgorithm, math.Inf(1)
	for _, a := range algorithms {
		if times[a] < least {
			best, least = a, times[a]
		}
	}
	if t, ok := times[before]; ok && least > keep*t {
		return before
	}
	return best
}

// describe returns the line of output for a case: the median time of each algorithm and the choice.
func describe(s opSpec, ranks int, algorithms []message.Algorithm, times map[message.Algorithm]float64,
	best message.Algorithm) string {
	var all []string
	for _, a := range algorithms {
		all = append(all, fmt.Sprintf("%v %s", a, micros(times[a])))
	}
	return fmt.Sprintf("%v of %d bytes of %s, us: %s: %v", s.kind, s.numBytes(ranks), ncclType(s.dt),
		strings.Join(all, ", "), best)
}

// writeRules puts rules for the given number of ranks into the table in a file. It replaces the rules that
// the table has for this number of ranks. Rules for fewer ranks come first, because the first rule that
// applies counts.
func writeRules(file string, rules tcp.Table, ranks int) error {
	table, err := readRules(file)
	if err != nil {
		return err
	}
	table = slices.DeleteFunc(table, func(r tcp.Rule) bool { return r.MaxRanks == ranks })
	at := slices.IndexFunc(table, func(r tcp.Rule) bool { return r.MaxRanks == 0 || r.MaxRanks > ranks })
	if at < 0 {
		at = len(table)
	}
	f, err := outfile.Create(file, 0o666)
	if err == nil {
		_, err = f.Write(slices.Insert(table, at, rules...).Encode())
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("write the table of algorithms: %w", err)
	}
	return nil
}

// readRules returns the table in a file. If the file does not exist, the table is empty.
func readRules(file string) (tcp.Table, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the table of algorithms: %w", err)
	}
	table, err := tcp.ParseTable(text)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return table, nil
}
