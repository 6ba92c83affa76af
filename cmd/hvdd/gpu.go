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
	"github.com/gohvd/gohvd/ops/nccl"
)

// gpuProgram is the name of hvdd in a build with NCCL. It is in the folder of hvdd.
const gpuProgram = "hvdd-gpu"

// driverFile exists on hosts with a driver for CUDA devices.
const driverFile = "/dev/nvidiactl"

// replace replaces this process by hvdd-gpu if the settings ask for NCCL or the host has CUDA devices. It
// returns if this program can do no less than hvdd-gpu or if there is no hvdd-gpu. It must be called before
// anything else in the process has started.
func replace(asked bool) error {
	if withNCCL {
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
	if path == self {
		return errors.New("hvdd-gpu was built without the tag nccl or without cgo")
	}
	err = unix.Exec(path, append([]string{path}, os.Args[1:]...), unix.Environ())
	if errors.Is(err, fs.ErrNotExist) {
		return nil // Init reports the lack of NCCL if the job uses it
	}
	return fmt.Errorf("cannot execute %s: %w", path, err)
}

// checkGPUs writes as JSON which libraries for GPUs ranks of this hvdd, or of its hvdd-gpu, load.
func checkGPUs(w io.Writer) error {
	settings, err := config.FromEnvironment(nil, true)
	if err == nil {
		err = replace(true)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(nccl.Find(settings.NCCLLibrary, settings.CUDALibrary))
}
