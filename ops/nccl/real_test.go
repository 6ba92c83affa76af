//go:build nccl && cgo

package nccl_test

import (
	"flag"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops/nccl"
)

var (
	realNCCL = flag.String("nccl", "", "the `file` of a real NCCL for TestRealLibraries")
	realCUDA = flag.String("cudart", "", "the `file` of a real CUDA runtime for TestRealLibraries")
)

// The real libraries have all functions that gohvd calls, and say which versions they are. On a machine
// without a device, Load says that there is none.
func TestRealLibraries(t *testing.T) {
	if *realNCCL == "" || *realCUDA == "" {
		t.Skip("give the files of the libraries with -args -nccl FILE -cudart FILE, as make nccl-libraries does")
	}
	found := nccl.Find(*realNCCL, *realCUDA)
	t.Logf("%+v", found)
	if found.NCCL.Error+found.CUDA.Error != "" || found.NCCL.Code < 21400 || found.CUDA.Code < 11000 ||
		found.NCCL.File != *realNCCL || found.CUDA.File != *realCUDA {
		t.Errorf("got %+v, want both libraries", found)
	}
	r, err := cuda.Load(*realCUDA)
	if err == nil {
		_, err = cuda.NewIPC(r)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nccl.Load(*realNCCL, *realCUDA); (err == nil) != (found.Devices > 0) ||
		err != nil && !strings.Contains(err.Error(), "this host has no CUDA device") {
		t.Errorf("got %v from a host with %d devices", err, found.Devices)
	}
}
