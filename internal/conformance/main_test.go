package conformance

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/gohvd/gohvd/internal/testcuda"
)

var (
	full = flag.Bool("full", false, "run all combinations, for hours")
	seed = flag.Uint64("seed", 0, "make random programs from this seed; 0 draws one")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testcuda.M{M: m}) }
