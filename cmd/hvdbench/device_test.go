//go:build nccl && cgo

package main

import (
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcuda"
)

// TestDevice measures allreduces of several types on devices, which ranks verify, and copies.
func TestDevice(t *testing.T) {
	t.Setenv("STANDIN_CUDA_DELAY_US", "100")
	for _, n := range []int{1, 2} {
		out, log, err := runs(t, n, map[string]string{"HOROVOD_GPU_OPERATIONS": "nccl",
			"HVD_NCCL_LIBRARY": testcuda.NCCL(), "HVD_CUDART_LIBRARY": testcuda.CUDA()},
			func(o *options, _ int) {
				o.gpu, o.types, o.minBytes = true, []tensor.DType{tensor.Float32, tensor.Int64}, 0
				o.maxBytes, o.stepBytes, o.stepFactor = 1000, 1000, 0
			})
		if err != nil {
			t.Fatalf("%v\n%s", err, log)
		}
		count := make(map[string]int)
		for _, row := range table(t, out) {
			ran := strings.TrimPrefix(row["ran"], "nccl ")
			count[row["collective"]+" "+row["memory"]+" "+ran+" wrong "+row["wrong"]]++
		}
		// Two types and two sizes, the allreduces in place and out of place.
		if count["allreduce gpu nccl wrong 0"] != 8 || count["copy gpu cudaMemcpyAsync wrong -1"] != 4 {
			t.Errorf("%d ranks: got %v\n%s", n, count, out)
		}
	}
}

// TestDeviceWithoutNCCL checks that a benchmark on devices ends with an error if the job does not use NCCL.
func TestDeviceWithoutNCCL(t *testing.T) {
	_, _, err := runs(t, 1, map[string]string{"HVD_CUDART_LIBRARY": testcuda.CUDA()},
		func(o *options, _ int) { o.gpu = true })
	if err == nil || !strings.Contains(err.Error(), "operations on CUDA devices are not possible") {
		t.Errorf("got %v", err)
	}
}
