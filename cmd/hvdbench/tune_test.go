package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/ops/tcp"
)

// --tune writes rules for the number of ranks of the job. It keeps the rules of the file for other numbers,
// and replaces those for the same number.
func TestTune(t *testing.T) {
	file := filepath.Join(t.TempDir(), "table.json")
	others := tcp.Table{
		{Kind: message.Alltoall, MaxRanks: 2, Algorithm: message.Direct},
		{Kind: message.Broadcast, MaxRanks: 3, Algorithm: message.Tree, MaxBytes: 77},
		{Kind: message.Broadcast, Algorithm: message.Chain},
	}
	if err := os.WriteFile(file, others.Encode(), 0o666); err != nil {
		t.Fatal(err)
	}
	out, log, err := runs(t, 3, map[string]string{"HOROVOD_CPU_OPERATIONS": "tcp"}, func(o *options, _ int) {
		o.raw, o.tuneFile, o.format = true, file, "nccl"
		o.minBytes, o.maxBytes, o.stepFactor = 100, 10000, 10
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	if n := strings.Count(out, "us: "); n != 5*3 {
		t.Errorf("%d cases, want 3 sizes of 5 series:\n%s", n, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	table, err := tcp.ParseTable(text)
	if err != nil {
		t.Fatal(err)
	}
	if first, last := table[0], table[len(table)-1]; first != others[0] || last != others[2] {
		t.Errorf("got %v, want first and last %v and %v", table, others[0], others[2])
	}
	kinds := make(map[message.Kind]bool)
	for _, r := range table[1 : len(table)-1] {
		if r.MaxRanks != 3 || r.MaxBytes == 77 {
			t.Errorf("got rule %v, want a new rule for 3 ranks", r)
		}
		kinds[r.Kind] = kinds[r.Kind] || r.MaxBytes == 0
	}
	want := map[message.Kind]bool{message.Allreduce: true, message.Reducescatter: true,
		message.Allgather: true,
		message.Broadcast: true}
	if !reflect.DeepEqual(kinds, want) {
		t.Errorf("got unlimited rules for %v, want %v", kinds, want)
	}
}

func TestTuneNeedsTCP(t *testing.T) {
	_, _, err := runs(t, 2, nil, func(o *options, _ int) { o.raw, o.tuneFile, o.format = true, "x", "nccl" })
	if err == nil || !strings.Contains(err.Error(), "HOROVOD_CPU_OPERATIONS=tcp") {
		t.Errorf("got %v, want an error that names HOROVOD_CPU_OPERATIONS=tcp", err)
	}
}

// The algorithm of the next smaller size stays unless another one is at least 5 % faster.
func TestChoose(t *testing.T) {
	all := []message.Algorithm{message.Ring, message.Direct}
	times := map[message.Algorithm]float64{message.Ring: 100, message.Direct: 96}
	for before, want := range map[message.Algorithm]message.Algorithm{
		message.NoAlgorithm: message.Direct, message.Ring: message.Ring, message.Direct: message.Direct,
	} {
		if got := choose(all, times, before); got != want {
			t.Errorf("after %v: got %v, want %v", before, got, want)
		}
	}
	times[message.Direct] = 94
	if got := choose(all, times, message.Ring); got != message.Direct {
		t.Errorf("got %v, want %v", got, message.Direct)
	}
}
