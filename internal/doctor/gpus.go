package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/cuda"
)

// errNoNCCL is the reason why there is no NCCL if the library was built without it.
var errNoNCCL = errors.New("libgohvd was built without NCCL")

// gpuProbe is a Python program that prints which libraries for GPUs libgohvd loads, as JSON.
const gpuProbe = notHere + `
import json, gohvd._library
print(json.dumps(gohvd._library.gpu_libraries(count_devices=True)))
`

// libraryError reports why libgohvd could not be asked.
type libraryError struct{ error }

// gpus returns which libraries for GPUs the ranks in Python load. Ranks in Go load the same ones if they are
// built with NCCL. The error says why NCCL cannot be used. A machine without devices is no error. The first
// call runs Python, whose library may have to start the driver.
func (s *System) gpus(ctx context.Context) (cuda.Found, error) {
	s.asked.Do(func() { s.found, s.whyNoGPUs = s.askForGPUs(ctx) })
	return s.found, s.whyNoGPUs
}

func (s *System) askForGPUs(ctx context.Context) (found cuda.Found, err error) {
	python, err := s.LookPath(s.Python)
	if err != nil {
		return found, libraryError{fmt.Errorf("%s is not in PATH", s.Python)}
	}
	text, err := s.Output(ctx, s.ranksEnviron(), []string{python, "-c", gpuProbe})
	if err == nil {
		err = json.Unmarshal([]byte(text), &found)
	}
	switch {
	case err != nil:
		return found, libraryError{fmt.Errorf("%s cannot load libgohvd: %w", python, err)}
	case !found.Built:
		return found, errNoNCCL
	case found.CUDA.Error != "":
		return found, errors.New(found.CUDA.Error)
	case found.NCCL.Error != "":
		return found, errors.New(found.NCCL.Error)
	}
	return found, nil
}

// libraryFix says how ranks find the libraries for GPUs.
const libraryFix = "install PyPI's packages of NCCL and of the CUDA runtime, which PyTorch brings, or name the " +
	"files with HVD_NCCL_LIBRARY and HVD_CUDART_LIBRARY"

// nccl reports which versions of NCCL and CUDA the ranks load. It is a problem if they have none, or no
// device, only on a machine with device files of GPUs.
func nccl(ctx context.Context, s *System) []Line {
	report := func(fix, format string, args ...any) []Line {
		if len(s.gpuFiles()) > 0 {
			return []Line{warn("", fix, format, args...)}
		}
		return []Line{ok("", format, args...)}
	}
	found, err := s.gpus(ctx)
	switch {
	case err != nil && !found.Built:
		return report(libgohvdFix, "%v", err)
	case err != nil:
		return report(libraryFix, "%v", err)
	}
	text := fmt.Sprintf("NCCL %s at %s; CUDA %s at %s", found.NCCL.Version, found.NCCL.File, found.CUDA.Version,
		found.CUDA.File)
	if found.Devices == 0 {
		why := "no device"
		if found.NoDevice != "" {
			why = found.NoDevice
		}
		return report("give this process access to the GPUs, and the driver that the runtime needs; with error 802, "+
			"start nvidia-fabricmanager", "%s; %s", text, why)
	}
	return []Line{ok("", "%s; the driver supports CUDA %s; number of devices: %d", text, found.Driver,
		found.Devices)}
}
