//go:build nccl && cgo

package main

// withNCCL says that this build has NCCL.
const withNCCL = true
