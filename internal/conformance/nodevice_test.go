//go:build !nccl || !cgo

package conformance

import (
	"testing"

	"go.uber.org/goleak"
)

// withStandIns returns m, because this build has no stand-ins for the libraries of GPUs.
func withStandIns(m *testing.M) goleak.TestingM { return m }
