//go:build !nccl || !cgo

package main

import (
	"errors"
	"testing"

	"github.com/gohvd/gohvd/internal/cuda"
)

// TestNoDevice checks that --gpu fails in a build without NCCL.
func TestNoDevice(t *testing.T) {
	_, _, err := runs(t, 1, nil, func(o *options, _ int) { o.gpu = true })
	if !errors.Is(err, cuda.ErrNotBuilt) {
		t.Errorf("got %v, want %v", err, cuda.ErrNotBuilt)
	}
}
