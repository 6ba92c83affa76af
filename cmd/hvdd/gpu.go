package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/ops/nccl"
)

// gpuProgram is the name of hvdd in a build with NCCL. It is in the folder of hvdd.
const gpuProgram = "hvdd-gpu"

// driverFile exists on hosts with a driver for CUDA devices.
const driverFile = "/dev/nvidiactl"

// replace replaces this process by hvdd-gpu if asked is set, because the settings ask for operations on CUDA
// devices, or if the host has such devices. It returns if this program can do no less than hvdd-gpu or if
// there is no hvdd-gpu. It must be called before anything else in the process has started.
func replace(asked bool) error {
	if cuda.Built {
		return nil
	}
	if !asked {
		if _, err := os.Stat(driverFile); err != nil {
			return nil
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	path := filepath.Join(filepath.Dir(self), gpuProgram)
	other, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // Init reports the lack of NCCL if the job uses it
	}
	own, ownErr := os.Stat("/proc/self/exe") // self may have been replaced since
	if err = errors.Join(err, ownErr); err != nil {
		return err
	}
	if os.SameFile(own, other) { // it would execute itself for ever
		return fmt.Errorf("%s was built without the tag nccl or without cgo", path)
	}
	err = unix.Exec(path, append([]string{path}, os.Args[1:]...), unix.Environ())
	return fmt.Errorf("cannot execute %s: %w", path, err)
}

// checkGPUs writes as JSON which libraries for GPUs ranks of this hvdd, or of its hvdd-gpu, load.
func checkGPUs(w io.Writer) error {
	// HVD_SIDECAR may be set, because it concerns the programs that use hvdd.
	settings, err := config.Load(config.Sources{Environ: config.Environ(), HaveStore: true})
	if err == nil {
		err = replace(true)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(nccl.Find(settings.NCCLLibrary, settings.CUDALibrary))
}
