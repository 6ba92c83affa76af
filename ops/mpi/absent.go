//go:build !mpi

package mpi

import "context"

// Join returns ErrNotBuilt.
func Join(context.Context, Options) (World, error) { return nil, ErrNotBuilt }
