package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/cuda"
)

// errNoNCCL is the reason why there is no NCCL if hvdd was built without it.
var errNoNCCL = errors.New("hvdd was built without NCCL")

// gpus returns which libraries for GPUs the ranks in Python load. Ranks in Go load the same ones if they are
// built with NCCL. The error says why NCCL cannot be used. A machine without devices is no error. The first
// call asks hvdd, which may have to start the driver.
func (s *System) gpus(ctx context.Context) (cuda.Found, error) {
	s.asked.Do(func() { s.found, s.whyNoGPUs = s.askForGPUs(ctx) })
	return s.found, s.whyNoGPUs
}

func (s *System) askForGPUs(ctx context.Context) (found cuda.Found, err error) {
	hvdd, err := s.findSidecar()
	if err != nil {
		return found, err
	}
	text, err := s.Output(ctx, s.Environ, []string{hvdd, "--check-gpus"})
	if err == nil {
		err = json.Unmarshal([]byte(text), &found)
	}
	switch {
	case err != nil:
		return found, fmt.Errorf("%s --check-gpus: %w", hvdd, err)
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
const libraryFix = "install NCCL and the CUDA runtime where the loader finds them, or name their files with " +
	"HVD_NCCL_LIBRARY and HVD_CUDART_LIBRARY"

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
		return report("use the hvdd of a wheel or build it with the tag nccl (docs/nccl.md)", "%v", err)
	case err != nil:
		return report(libraryFix, "%v", err)
	}
	text := fmt.Sprintf("NCCL %s at %s; CUDA %s at %s", found.NCCL.Version, found.NCCL.File, found.CUDA.Version,
		found.CUDA.File)
	if found.Devices == 0 {
		return report("give this process access to the GPUs, and the driver that the runtime needs",
			"%s; no device", text)
	}
	return []Line{ok("", "%s; the driver supports CUDA %s; number of devices: %d", text, found.Driver,
		found.Devices)}
}
