//go:build nccl && cgo

package nccl_test

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops/nccl"
)

var (
	realNCCL = flag.String("nccl", "", "the `file` of a real NCCL for TestRealLibraries")
	realCUDA = flag.String("cudart", "", "the `file` of a real CUDA runtime for TestRealLibraries")
	realNVTX = flag.String("nvtx", "", "the `file` of a real NVTX for TestRealLibraries, or empty for none")
)

// The real libraries have all functions that gohvd calls, and say which versions they are. On a machine
// without a device, Load says that there is none.
func TestRealLibraries(t *testing.T) {
	if *realNCCL == "" || *realCUDA == "" {
		t.Skip("give the files of the libraries with -args -nccl FILE -cudart FILE, as make nccl-libraries does")
	}
	found := nccl.Find(*realNCCL, *realCUDA, true)
	t.Logf("%+v", found)
	if found.NCCL.Error+found.CUDA.Error != "" || found.NCCL.Code < 21400 || found.CUDA.Code < 11000 ||
		found.NCCL.File != *realNCCL || found.CUDA.File != *realCUDA {
		t.Errorf("got %+v, want both libraries", found)
	}
	r, err := cuda.Load(*realCUDA)
	if err != nil {
		t.Fatal(err)
	}
	if f := []string{"cudaMemcpyBatchAsync"}; found.CUDA.Code >= 12080 {
		if missing := r.Library.Symbols(make([]unsafe.Pointer, 1), f); missing != nil {
			t.Errorf("CUDA %s lacks %v", found.CUDA.Version, missing)
		}
	}
	if *realNVTX != "" {
		if err := cuda.OpenLibrary(func(l *cuda.Library) error {
			table := make([]unsafe.Pointer, len(cuda.RangeFunctions))
			if missing := l.Symbols(table, cuda.RangeFunctions); missing != nil {
				t.Errorf("%s lacks %v", l.File, missing)
			}
			return nil
		}, *realNVTX); err != nil {
			t.Error(err)
		}
	}
	l, err := nccl.Load(*realNCCL, *realCUDA)
	if err == nil {
		_, err = l.Count()
	}
	if (err == nil) != (found.Devices > 0) ||
		err != nil && !strings.Contains(err.Error(), "this host has no ") {
		t.Errorf("got %v from a host with %d devices", err, found.Devices)
	}
}

// declarations is a C program that does not compile if CUDA declares cudaMemcpyBatchAsync in another way than
// internal/cuda does. It uses the version of CUDA that the header states.
const declarations = `
#include <stddef.h>
#include <cuda_runtime_api.h>

_Static_assert(cudaMemcpySrcAccessOrderStream == 1 && cudaMemLocationTypeDevice == 1, "numbers");
_Static_assert(sizeof(struct cudaMemLocation) == 8 && offsetof(struct cudaMemLocation, id) == 4, "location");
_Static_assert(sizeof(struct cudaMemcpyAttributes) == 24, "size");
_Static_assert(offsetof(struct cudaMemcpyAttributes, srcAccessOrder) == 0, "order");
_Static_assert(offsetof(struct cudaMemcpyAttributes, srcLocHint) == 4, "source");
_Static_assert(offsetof(struct cudaMemcpyAttributes, dstLocHint) == 12, "destination");
_Static_assert(offsetof(struct cudaMemcpyAttributes, flags) == 20, "flags");

#if CUDART_VERSION < 13000
cudaError_t (*batch)(void **, void **, size_t *, size_t, struct cudaMemcpyAttributes *, size_t *, size_t, size_t *,
	cudaStream_t) = cudaMemcpyBatchAsync;
#else
cudaError_t (*batch)(void *const *, const void *const *, const size_t *, size_t, struct cudaMemcpyAttributes *,
	size_t *, size_t, cudaStream_t) = cudaMemcpyBatchAsync;
#endif
`

// hostDefines stands for a header that the packages of the runtime do not contain.
const hostDefines = `
#define CUDARTAPI
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
`

// The real headers declare the function for several copies as gohvd calls it.
func TestRealHeaders(t *testing.T) {
	if *realCUDA == "" {
		t.Skip("give the file of the runtime of a package with its headers, as make nccl-libraries does")
	}
	r, err := cuda.Load(*realCUDA)
	if err != nil {
		t.Fatal(err)
	}
	if r.Version < 12080 {
		t.Skipf("CUDA %s has no cudaMemcpyBatchAsync", cuda.VersionText(r.Version))
	}
	dir := t.TempDir()
	include := filepath.Join(filepath.Dir(filepath.Dir(*realCUDA)), "include")
	for name, text := range map[string]string{"program.c": declarations, "crt/host_defines.h": hostDefines} {
		file := filepath.Join(dir, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600))
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("gcc", "-fsyntax-only", "-Werror", "-I", dir, "-I", include,
		filepath.Join(dir, "program.c")).CombinedOutput()
	if err != nil {
		t.Errorf("CUDA %s: %v\n%s", cuda.VersionText(r.Version), err, out)
	}
}
