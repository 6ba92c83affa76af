package main

import (
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
)

// TestNoDevices checks that Init fails if the settings ask for operations on CUDA devices.
func TestNoDevices(t *testing.T) {
	t.Setenv("HOROVOD_GPU_OPERATIONS", "nccl")
	p, c := pair(t)
	c.Hello()
	r := c.Call(sidecartest.Init(map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}))
	if want := "unset HVD_SIDECAR, or unset HOROVOD_GPU_OPERATIONS"; !strings.Contains(r.Error.GetText(), want) {
		t.Errorf("got %v, want an error with %q", r.Error, want)
	}
	c.Bye()
	p.wants(0, "")
}
