package config

import (
	"slices"
	"strings"
)

// GPUBackend says how operations on tensors on CUDA devices run.
type GPUBackend uint8

const (
	// GPUNone lets operations on such tensors fail.
	GPUNone GPUBackend = iota
	// GPUNCCL runs them with NCCL.
	GPUNCCL
	// GPUHost copies the tensors to host memory and runs the operations there.
	GPUHost
)

// GPUOperations holds the backend of each kind of operation on tensors on CUDA devices. Either all backends
// are GPUNone, or none is. Allreduce applies to reduces too, and Alltoall to gathers and scatters.
type GPUOperations struct {
	Allreduce, Allgather, Broadcast, Alltoall, Reducescatter GPUBackend
}

// Use reports whether b is the backend of some kind of operation.
func (g *GPUOperations) Use(b GPUBackend) bool {
	return slices.ContainsFunc(g.all(), func(have *GPUBackend) bool { return *have == b })
}

// OffersNCCL reports whether no setting says how operations on CUDA devices run, so that they run with NCCL
// if all ranks have it.
func (c *Config) OffersNCCL() bool {
	return !c.Given("HOROVOD_GPU_OPERATIONS") && c.GPU.Use(GPUNone)
}

// mayUseNCCL reports whether some operation may run with NCCL.
func (c *Config) mayUseNCCL() bool { return c.GPU.Use(GPUNCCL) || c.OffersNCCL() }

// UseAll makes b the backend of all kinds of operations.
func (g *GPUOperations) UseAll(b GPUBackend) {
	for _, of := range g.all() {
		*of = b
	}
}

func (g *GPUOperations) all() []*GPUBackend {
	return []*GPUBackend{&g.Allreduce, &g.Allgather, &g.Broadcast, &g.Alltoall, &g.Reducescatter}
}

const ncclUnused = "the settings choose NCCL for no operation"

// settleGPUs makes the kinds of operations run in host memory for which no backend was chosen, if one was
// chosen for another kind. In Horovod too, an operation for which the build has no library is copied through
// host memory. It returns warnings about settings that have no effect.
func (c *Config) settleGPUs() (warnings []warning) {
	g := &c.GPU
	if g.Use(GPUNCCL) || g.Use(GPUHost) {
		for _, b := range g.all() {
			if *b == GPUNone {
				*b = GPUHost
			}
		}
	}
	if c.NCCLStreams > 1 && !c.mayUseNCCL() {
		warnings = append(warnings, noEffect("HOROVOD_NUM_NCCL_STREAMS", ncclUnused))
	}
	if c.AsyncCompletion && !c.mayUseNCCL() {
		warnings = append(warnings, noEffect("HOROVOD_ENABLE_ASYNC_COMPLETION", ncclUnused))
	}
	for _, s := range []struct {
		name string
		on   bool
		by   GPUBackend
	}{
		{"HOROVOD_HIERARCHICAL_ALLREDUCE", c.HierarchicalAllreduce, g.Allreduce},
		{"HOROVOD_HIERARCHICAL_ALLGATHER", c.HierarchicalAllgather, g.Allgather},
	} {
		if c.Given(s.name) && s.on && s.by == GPUNCCL {
			warnings = append(warnings, warning{s.name, s.name + " has no effect on tensors that NCCL moves: " +
				"NCCL itself uses the fastest links inside each host and between hosts"})
		}
	}
	return warnings
}

// gpuBackends are the words of the settings for operations on devices.
var gpuBackends = map[string]GPUBackend{"none": GPUNone, "nccl": GPUNCCL, "host": GPUHost}

// gpuBackend returns the kind of a setting that chooses among the words. It stores the backend in the fields.
func gpuBackend(fields func(*GPUOperations) []*GPUBackend, words ...string) kind {
	return builtOnly(oneOf(func(c *Config, word string) {
		for _, f := range fields(&c.GPU) {
			*f = gpuBackends[word]
		}
	}, words...), "mpi", "ddl")
}

// gpuOperation returns the row of a setting for one kind of operation on devices. what names the operations.
func gpuOperation(name, what string, field func(*GPUOperations) *GPUBackend) Setting {
	return Setting{
		Name: "HOROVOD_GPU_" + strings.ToUpper(name), Section: sectionChoice, Scope: PerJob,
		Key:       "gpu_" + name,
		Otherwise: "HOROVOD_GPU_OPERATIONS",
		Doc:       "backend for " + what + " of tensors on CUDA devices, nccl or host, as in HOROVOD_GPU_OPERATIONS",
		kind: gpuBackend(func(g *GPUOperations) []*GPUBackend { return []*GPUBackend{field(g)} }, "nccl",
			"host"),
	}
}

// GPUChoice returns the first setting, as NAME=value, that chooses the backend b for operations on devices.
func (c Config) GPUChoice(b GPUBackend) string {
	for _, s := range settings {
		if text := strings.ToLower(c.Value(s.Name)); strings.HasPrefix(s.Name, "HOROVOD_GPU_") &&
			text != "" && gpuBackends[text] == b {
			return s.Name + "=" + text
		}
	}
	return ""
}
