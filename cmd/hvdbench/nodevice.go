//go:build !nccl || !cgo

package main

import "github.com/gohvd/gohvd/internal/cuda"

// openDevice returns an error, because this build cannot use CUDA devices.
func openDevice(negotiated, string) (path, func() error, error) { return nil, nil, cuda.ErrNotBuilt }
