//go:build !nccl || !cgo

package hvd_test

import (
	"context"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestDeviceNotBuilt checks that a program that was built without NCCL says so.
func TestDeviceNotBuilt(t *testing.T) {
	run(t, 1, func(ctx context.Context, e *hvd.Engine) {
		x := cuda.Buffer[float32]{Pointer: 4096, Len: 1}
		err := cuda.Allreduce(ctx, x, x, hvd.On(e))
		testnet.WantError(t, err, "this program was built without NCCL and CUDA (tag nccl, with cgo)")
	})
}
