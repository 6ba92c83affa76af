package autotune

import (
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/testnet"
)

func logSpace() Space {
	return Space{FusionThreshold(128 << 20), CycleTime(0), SegmentSize(256 << 10), Algorithm(algorithms...),
		Toggle(CacheEnabledName, true), Toggle(TorusAllreduceName, false).Fix()}
}

// The log has Horovod's columns, in their order, then ours. Its last row is the best point.
func TestWriteLog(t *testing.T) {
	s := logSpace()
	tn := mustNew(t, s, DefaultOptions())
	second := s.Default()
	second.values = []float64{0, 0.14, 1 << 20, 1, 0, 0}
	third := s.Default()
	third.values = []float64{94208, 25, 64 << 10, 3, 1, 0}
	tn.rounds = []Round{{s.Default(), 1234.5678901, 3, false}, {second, 0.001, 2, false},
		{third, 2e9, 3, true}}
	tn.best, tn.score = third, 2e9
	var b strings.Builder
	if err := tn.WriteLog(&b); err != nil {
		t.Fatal(err)
	}
	want := testnet.ReadFile(t, "testdata/log.csv")
	if b.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	if err := tn.WriteLog(failing{}); !errors.Is(err, errFull) {
		t.Errorf("got error %v, want that of the writer", err)
	}
}

var errFull = errors.New("full")

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errFull }
