//go:build nccl && cgo

package hvd_test

import (
	"context"
	"fmt"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testcuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestDeviceChoices checks that each operation on devices runs with the backend that the settings choose for
// it. Tensors of operations in host memory are copied there, and each rank logs a warning about that.
func TestDeviceChoices(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	engines(t, 2, func(ctx context.Context, e *hvd.Engine) {
		me, on := float32(e.Rank()), hvd.On(e)
		d := openDevice(t, e.Rank())
		defer d.stream.Close()
		x, y, z := d.buffer(1, me), d.buffer(0, 0, 0, 0), d.buffer(0, 0)
		d.want("allreduce", x, cuda.Allreduce(ctx, x, x, hvd.Op(hvd.Sum), on), 2, 1)
		d.want("allgather", y, cuda.Allgather(ctx, x, y, on), 2, 1, 2, 1)
		d.want("broadcast", z, cuda.Broadcast(ctx, d.buffer(5, me), z, 1, on), 5, 1)
		_, err := cuda.Alltoall(ctx, d.buffer(me, 7), z, nil, on)
		d.want("alltoall", z, err, [][]float32{{0, 1}, {7, 7}}[e.Rank()]...)
		err = cuda.Reducescatter(ctx, y, portion(z, 0, 2), hvd.Op(hvd.Sum), on)
		d.want("reducescatter", z, err, 4, 2)
		noError(t, e.Shutdown(ctx))
	}, []hvd.InitOption{hvd.WithLogger(writesTo(core))}, "HOROVOD_GPU_OPERATIONS", "host",
		"HOROVOD_GPU_ALLGATHER", "nccl", "HOROVOD_GPU_ALLTOALL", "nccl", "HVD_NCCL_LIBRARY", testcuda.NCCL(),
		"HVD_CUDART_LIBRARY", testcuda.CUDA())
	got := make(map[string]int)
	for _, line := range logged.FilterMessageSnippet("tensors on CUDA devices are copied to host memory").All() {
		got[fmt.Sprint(line.ContextMap()["operation"], ": ", line.ContextMap()["error"])]++
	}
	want := map[string]int{"allreduce: HOROVOD_GPU_ALLREDUCE is not nccl": 2,
		"broadcast: HOROVOD_GPU_BROADCAST is not nccl":         2,
		"reducescatter: HOROVOD_GPU_REDUCESCATTER is not nccl": 2}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got warnings %v, want %v", got, want)
	}
}

// TestDeviceChoiceRefused checks the errors of Init if one operation has a backend that cannot be used, or
// another one than at the other rank.
func TestDeviceChoiceRefused(t *testing.T) {
	for _, c := range []struct{ value, library, want string }{
		{"nccl", "/missing/libnccl.so", "HOROVOD_GPU_BROADCAST=nccl: nccl: "},
		{"mpi", testcuda.NCCL(), `HOROVOD_GPU_BROADCAST from API: got "mpi", which gohvd does not have: want nccl or host`},
	} {
		_, err := hvd.New(t.Context(), hvd.WithSetting("HOROVOD_GPU_BROADCAST", c.value),
			hvd.WithSetting("HVD_NCCL_LIBRARY", c.library), hvd.WithSetting("HVD_CUDART_LIBRARY", testcuda.CUDA()))
		testnet.WantError(t, err, c.want)
	}
}
