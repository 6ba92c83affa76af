package main

import (
	"encoding/json"
	"io"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/ops/nccl"
)

// checkGPUs writes as JSON which libraries for GPUs ranks of this hvdd load.
func checkGPUs(w io.Writer) error {
	// HVD_SIDECAR may be set, because it concerns the programs that use hvdd.
	settings, err := config.Load(config.Sources{Environ: config.Environ(), HaveStore: true})
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(nccl.Find(settings.NCCLLibrary, settings.CUDALibrary))
}
