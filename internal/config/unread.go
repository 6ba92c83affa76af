package config

import (
	"slices"
	"strings"
)

// Reader is a kind of process that reads settings.
type Reader uint8

const (
	// Rank is a rank of a job.
	Rank Reader = iota
	// Node is a node of a parameter server.
	Node
)

// WarnUnread adds a warning to c.Warnings for each setting that a source gives but that has no effect in a
// process of kind r with these settings. It adds none for a switch that is off, and none for another setting
// with its default value, because these ask for nothing. It adds none about a name for which there is already
// a warning.
func (c *Config) WarnUnread(r Reader) {
	var warnings []warning
	for _, s := range settings {
		value := c.Value(s.Name)
		nothing := same(value, s.Default)
		if s.want == wantBoolean {
			on, _ := boolean(value)
			nothing = !on
		}
		if nothing || !c.Given(s.Name) || s.always() {
			continue
		}
		if why := c.unread(s, r); why != "" {
			warnings = append(warnings, noEffect(s.Name, why))
		}
	}
	c.warn(warnings, c.warned)
}

// always reports whether WarnUnread ignores the setting, because another program than the user may have set
// it: the launcher, which sets the same variables for processes of all kinds, or in the case of PORT any
// other program. HVD_SIZE=1 in a node is for its calls of Init.
func (s Setting) always() bool {
	return s.Scope == ByLauncher ||
		slices.Contains([]string{"HVD_SIZE", "PORT", "HVD_RUN", "HOROVOD_SPARK_START_TIMEOUT", LibraryVariable,
			SidecarVariable, SidecarBinaryVariable}, s.Name)
}

// nodeSettings are the settings outside of the section about parameter servers that nodes use.
var nodeSettings = []string{
	FileVariable, "HOROVOD_GLOO_TIMEOUT_SECONDS", "HVD_SECRET_FILE", "HVD_INSECURE", "HVD_TLS",
	"HVD_OPERATION_TIMEOUT_SECONDS", "HOROVOD_CPU_OPERATIONS", "HOROVOD_TIMELINE", "HVD_TIMELINE_MAX_MB",
	"HVD_METRICS_ADDR", "HVD_FLIGHT_RECORDER", "HVD_DUMP_DIR", "HOROVOD_LOG_LEVEL",
	"HOROVOD_LOG_HIDE_TIME", "HVD_LOG_FORMAT", "HVD_HOSTID",
}

// unread returns the reason why the setting s has no effect in a process of kind r. It is empty if s has an
// effect.
func (c *Config) unread(s Setting, r Reader) string {
	if r == Node {
		switch {
		case s.Name == "HOROVOD_CPU_OPERATIONS" && c.SharedMemory == SharedAlways:
			return "nodes of a parameter server use TCP, and shared memory where a host has it, unless it is tcp"
		case s.Section == sectionServer || slices.Contains(nodeSettings, s.Name):
			return ""
		case s.Name == "HOROVOD_GLOO_IFACE":
			return "nodes of a parameter server use DMLC_INTERFACE"
		}
		return "nodes of a parameter server do not use it"
	}
	if s.Section == sectionServer && c.PS.Role == "" {
		return "DMLC_ROLE is not set, so this process is no node of a parameter server"
	}
	const mpiChooses = "HOROVOD_CPU_OPERATIONS is mpi, and MPI chooses its algorithms itself"
	overMPI := c.MPIController || c.MPIOperations
	switch s.Name {
	case "HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER":
		switch {
		case c.MPIOperations:
			return mpiChooses
		case c.SharedMemory == SharedNever:
			return "HOROVOD_CPU_OPERATIONS is tcp, so the ranks share no memory"
		case c.SharedMemory == SharedAlways:
			return "HOROVOD_CPU_OPERATIONS is shm, so all ranks are on one host"
		}
	case "HVD_ALGORITHM":
		switch {
		case c.MPIOperations:
			return mpiChooses
		case c.SharedMemory == SharedAlways:
			return "HOROVOD_CPU_OPERATIONS is shm, and it chooses among algorithms over TCP"
		}
	case "HVD_LEADERS_ABOVE":
		if c.Lockstep {
			return "HVD_NEGOTIATION is lockstep, which has no leaders"
		}
	case "HOROVOD_MPI_THREADS_DISABLE":
		if !overMPI {
			return "neither HOROVOD_CONTROLLER nor HOROVOD_CPU_OPERATIONS is mpi"
		}
	case "HVD_NCCL_LIBRARY":
		if !c.mayUseNCCL() {
			return ncclUnused
		}
	case "HVD_CUDART_LIBRARY":
		if !c.mayUseNCCL() && !c.GPU.Use(GPUHost) {
			return "the settings choose no backend for tensors on CUDA devices"
		}
	case "HVD_RENDEZVOUS_HOST", "HVD_RENDEZVOUS_PORT", "HVD_SUBDOMAIN":
		switch {
		case c.haveStore:
			return "the program says where the ranks meet"
		case c.byLauncher || c.RendezvousAddr != "":
			return "the ranks meet at the store of hvdrun"
		case s.Name == "HVD_SUBDOMAIN" && c.Variable("JOB_COMPLETION_INDEX") == "":
			return "JOB_COMPLETION_INDEX is not set, so this process is no pod of an Indexed Job"
		}
	case "HVD_INIT_METHOD", "HVD_UNIQUE_ID":
		if c.haveStore {
			return "the program says where the ranks meet"
		}
	}
	if strings.HasPrefix(s.Name, "HOROVOD_AUTOTUNE_") && !c.Autotune && c.AutotuneFile == "" {
		return "HOROVOD_AUTOTUNE is off"
	}
	return ""
}
