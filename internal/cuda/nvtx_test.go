//go:build nccl && cgo

package cuda_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestRanges checks that there are ranges only while a tool records them, and what they say.
func TestRanges(t *testing.T) {
	// Then the process finds it by its name, as it finds that of a package that torch brings.
	if err := cuda.OpenLibrary(func(*cuda.Library) error { return nil }, testcuda.NVTX()); err != nil {
		t.Fatal(err)
	}
	calls, failure := testcuda.Calls(t), errors.New("the operation has failed")
	in := func(r *cuda.Ranges, name string, others, open int) {
		t.Helper()
		if err := r.In("allreduce", name, others, func() error {
			if n := calls("end of range"); n != open {
				t.Errorf("%s: %d ranges have ended, want %d", name, n, open)
			}
			return failure
		}); !errors.Is(err, failure) {
			t.Errorf("%s: got %v, want %v", name, err, failure)
		}
	}
	r := cuda.OpenRanges()
	if in(r, "unseen", 0, 0); r != nil || calls("range gohvd: allreduce unseen") != 0 {
		t.Error("there are ranges although no tool records them")
	}
	t.Setenv("NVTX_INJECTION64_PATH", "tool.so")
	r = cuda.OpenRanges()
	long := strings.Repeat("n", 300)
	in(r, "a", 0, 0)
	in(r, "b", 63, 1)
	in(r, long, 1<<30, 2)
	for _, want := range []string{"a", "b and 63 more", long[:200] + " and 1073741824 more"} {
		if n := calls("range gohvd: allreduce " + want); n != 1 {
			t.Errorf("got %d ranges %q, want 1", n, want)
		}
	}
	if n := calls("end of range"); n != 3 {
		t.Errorf("%d ranges have ended, want 3", n)
	}
}
