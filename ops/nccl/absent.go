//go:build !nccl || !cgo

package nccl

import (
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops"
)

// Library is NCCL together with the CUDA runtime. This build has none.
type Library struct{ Devices *cuda.Devices }

// Load returns cuda.ErrNotBuilt.
func Load(path, cudaPath string) (*Library, error) { return nil, cuda.ErrNotBuilt }

// Find reports that this build has no NCCL.
func Find(path, cudaPath string, devices bool) cuda.Found { return cuda.Found{} }

// Register panics. It cannot be called, because Load returns no Library.
func (l *Library) Register(Config) ops.Registration { panic("nccl: not built") }

// Count returns cuda.ErrNotBuilt.
func (l *Library) Count() (int, error) { return 0, cuda.ErrNotBuilt }

// Fail does nothing.
func (l *Library) Fail(error) {}

// Close does nothing.
func (l *Library) Close() error { return nil }
