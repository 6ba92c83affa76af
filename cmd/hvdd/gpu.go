package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
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
