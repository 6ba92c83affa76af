//go:build !nccl || !cgo

package pythontest

import "testing"

// withStandIns runs the tests without stand-ins for the libraries of GPUs, which this build does not load.
func withStandIns(m *testing.M) int { return m.Run() }
